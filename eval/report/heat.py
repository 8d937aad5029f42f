"""A table of cells whose colour is their value, with its scale above."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qkv_eval.report.drawing import (
    BOLD,
    CHARACTER,
    HEAT_LEVELS,
    HIGH_TEXT,
    INK,
    LOW_TEXT,
    MUTED,
    SURFACE,
    WIDE,
    Chart,
    Drawing,
    drawing_of,
    heat_colour,
    write_left,
)
from qkv_eval.report.series import clip, short

Line = tuple[str, str]


def heat_map(
    rows: Sequence[Line],
    columns: Sequence[Line],
    values: dict[tuple[Line, Line], float],
    what: str,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    form: Callable[[float], str] = short,
    label: str = "",
    unit: str = "",
    written: bool = False,
    less_is_strong: bool = False,
) -> Chart:
    """Draws a table of cells whose colour is their value, with its scale above.

    Args:
        rows, columns: pairs of a group's name and a line's; groups stand apart.
        values: of a cell ``(row, column)``; a cell without one stays empty.
        what: the drawing in words, for those who do not see it.
        log: the colours follow the logarithm.
        limits: the ends of the scale; None: the smallest and largest value.
        form: how values are written.
        label: what the columns are.
        unit: of the scale.
        written: the values stand in the cells, if there is room.
        less_is_strong: the strongest colour is for the smallest value, so that what is missing shows.
    """
    row_places, column_places = _places(rows), _places(columns)
    row_groups = list(dict.fromkeys(group for group, _ in rows))
    names = 12 + CHARACTER * max(len(clip(name)) for _, name in rows)
    left = names + (0 if row_groups == [""] else 8 + BOLD * max(len(clip(group)) for group in row_groups))
    has_column_groups = any(group for group, _ in columns)
    room = WIDE - left - 20
    cell_width = min(room / (column_places[-1] + 1), 84.0)
    cell_height = max(15.0, min(28.0, 26.0 if written else cell_width * 0.8))
    body = cell_height * (row_places[-1] + 1)
    scale = _HeatScale(list(values.values()), limits, log, less_is_strong)
    below = 44 if label else 26
    with drawing_of(WIDE, round(body + 48 + below + (18 if has_column_groups else 0))) as drawing:
        top = 40 + (18 if has_column_groups else 0)
        axes = drawing.axes(left, WIDE - left - cell_width * (column_places[-1] + 1), top, drawing.height - top - body)
        axes.set_xlim(-0.5, column_places[-1] + 0.5)
        axes.set_ylim(row_places[-1] + 0.5, -0.5)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        every = max(1, math.ceil(CHARACTER * (max(len(name) for _, name in columns) + 1) / cell_width))
        shown = [i for i in range(len(columns)) if i % every == 0]
        axes.set_xticks([column_places[i] for i in shown], [columns[i][1] for i in shown])
        axes.set_yticks(row_places, [clip(name) for _, name in rows])
        axes.set_xlabel(label)
        for group in row_groups:
            inside = [place for place, row in zip(row_places, rows, strict=True) if row[0] == group]
            write_left(axes, clip(group), sum(inside) / len(inside), -names)
        for group in dict.fromkeys(group for group, _ in columns):
            inside = [place for place, column in zip(column_places, columns, strict=True) if column[0] == group]
            axes.annotate(
                group, (sum(inside) / len(inside), 1), (0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", color=INK,
            )  # fmt: skip
        from matplotlib.patches import Rectangle

        is_roomy = written and cell_width >= 32
        for row, y in zip(rows, row_places, strict=True):
            for column, x in zip(columns, column_places, strict=True):
                value = values.get((row, column))
                if value is None:
                    continue
                level = scale.level(value)
                tip = ", ".join(part for part in (*row, *column) if part) + f": {form(value)}{unit and ' ' + unit}"
                cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=heat_colour(level), edgecolor=SURFACE, linewidth=1)
                cell.set_gid(drawing.tip(tip))
                axes.add_patch(cell)
                if is_roomy:
                    colour = HIGH_TEXT if level >= HEAT_LEVELS // 2 else LOW_TEXT
                    axes.text(x, y, form(value), ha="center", va="center", color=colour, fontsize=11)
        _draw_scale(drawing, scale, left, form, unit)
        return drawing.chart(what, wide=True)


class _HeatScale:
    """From values to levels of colour."""

    def __init__(
        self, values: Sequence[float], limits: tuple[float, float] | None, log: bool, less_is_strong: bool
    ) -> None:
        positive = [value for value in values if value > 0]
        self.log, self._less_is_strong = log and bool(positive), less_is_strong
        self.low, self.high = limits or (min(positive if self.log else values), max(values))

    def level(self, value: float) -> int:
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(part, self.low)) for part in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        share = 1 - share if self._less_is_strong else share
        return min(HEAT_LEVELS - 1, max(0, int(share * HEAT_LEVELS)))

    def at(self, share: float) -> float:
        """The value at a place of the scale, 0 to 1."""
        share = 1 - share if self._less_is_strong else share
        if self.log:
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)


def _draw_scale(drawing: Drawing, scale: _HeatScale, left: float, form: Callable[[float], str], unit: str) -> None:
    from matplotlib.patches import Rectangle

    length, height = 220, 10
    axes = drawing.axes(left, WIDE - left - length, 2, drawing.height - 2 - height)
    axes.set_xlim(0, HEAT_LEVELS)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for level in range(HEAT_LEVELS):
        # A little wider than a level, so that no line shows between two.
        axes.add_patch(
            Rectangle((level, 0), 1.05 if level < HEAT_LEVELS - 1 else 1, 1, facecolor=heat_colour(level), lw=0)
        )
    shares = (0.0, 0.5, 1.0) if scale.high > scale.low else (0.5,)
    axes.set_xticks([share * HEAT_LEVELS for share in shares], [form(scale.at(share)) for share in shares], fontsize=11)
    axes.tick_params(axis="x", pad=2)
    notes = [part for part in (unit, "logarithmic" if scale.log else "") if part]
    axes.annotate(", ".join(notes), (1, 0.5), (22, 0), xycoords="axes fraction", textcoords="offset points", va="center", color=MUTED)  # fmt: skip # noqa: E501


def _places(lines_: Sequence[Line]) -> list[float]:
    places: list[float] = []
    for number, (group, _) in enumerate(lines_):
        gap = 0.35 if number and group != lines_[number - 1][0] else 0.0
        places.append((places[-1] + 1 if places else 0.0) + gap)
    return places
