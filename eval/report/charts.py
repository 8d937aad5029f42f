"""Drawings in SVG for a page of HTML: their colours are variables of the page, and text is text in the page's font.

matplotlib draws with colours that stand for variables, and :func:`_to_html` puts the variables in, so that one drawing
serves light, dark and print. Sizes are in pixels of the page at its full width. A point or cell has what it is and its
exact value as a title, which browsers show under the pointer.
"""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 1060
NARROW = 516
_FONT = 12.0
# A character's mean width at that size, and of bold ones; rather too much than too little.
_CHARACTER, _BOLD = 7.4, 8.4
HEAT_LEVELS = 24

# Colours that stand for variables of the page; what follows the variable's name is for a drawing taken out of it.
_INK, _MUTED, _GRID, _SURFACE = "#a0b0f0", "#a0b0f1", "#a0b0f2", "#a0b0f3"
_LOW_TEXT, _HIGH_TEXT = "#a0b0f4", "#a0b0f5"
_VARIABLES = {
    _INK: "var(--ink,#1b2330)",
    _MUTED: "var(--muted,#5a6573)",
    _GRID: "var(--grid,#e4e8ed)",
    _SURFACE: "var(--surface,#ffffff)",
    _LOW_TEXT: "var(--low-text,#1b2330)",
    _HIGH_TEXT: "var(--high-text,#ffffff)",
}
# Of markers, what matplotlib calls them and the same in the 16 x 16 pixels of a legend.
_MARKERS = {
    "o": "M8 4a4 4 0 1 1 0 8a4 4 0 1 1 0-8z",
    "s": "M4.4 4.4h7.2v7.2h-7.2z",
    "^": "M8 3.6l4.4 8h-8.8z",
    "D": "M8 3l5 5l-5 5l-5-5z",
    "v": "M8 12.4l4.4-8h-8.8z",
    "P": "M6.4 3.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z",
    "X": "M4 6l2-2l2 2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2z",
    "p": "M8 3.4l4.6 3.3l-1.8 5.4h-5.6l-1.8-5.4z",
}
# Series with colours of their own; the first three are what the others are measured against.
_REFERENCES = {"dynamic": 0, "torch": 0, "none": 1, "noise floor": 2}
COLOURS = 8


@dataclass(frozen=True)
class Style:
    """How one cache looks in all drawings of a page: a variable with a colour, a marker, whether lines are dashed."""

    variable: str
    marker: str
    dashed: bool

    @property
    def swatch(self) -> Markup:
        """The line and marker for a legend."""
        dash = ' stroke-dasharray="4 3"' if self.dashed else ""
        return Markup(
            f'<svg class="swatch" viewBox="-6 0 28 16" width="28" height="16" aria-hidden="true" '
            f'style="color:var({self.variable})"><path d="M-6 8h28" stroke="currentColor" stroke-width="1.8"{dash}/>'
            f'<path d="{_MARKERS[self.marker]}" fill="currentColor" stroke="none"/></svg>'
        )


class Styles:
    """Gives each cache its style, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._styles: dict[str, Style] = {}
        self._count = 0

    def of(self, name: str) -> Style:
        """Returns the style of a cache; a name with ``· run N`` behind it looks like the cache, dashed."""
        plain, _, run = name.partition(" · ")
        if plain not in self._styles:
            markers = list(_MARKERS)
            if plain in _REFERENCES:
                style = Style(f"--ref{_REFERENCES[plain]}", "o", plain == "none")
            else:
                place = self._count
                self._count += 1
                marker = markers[(place + place // COLOURS) % len(markers)]
                style = Style(f"--s{place % COLOURS}", marker, place >= COLOURS)
            self._styles[plain] = style
        found = self._styles[plain]
        return Style(found.variable, found.marker, True) if run else found


@dataclass
class Series:
    """What is drawn in one style: points in the order of x; ``errors`` are half the height of bars around them."""

    name: str
    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)
    errors: list[float | None] = field(default_factory=list)
    tips: list[str] = field(default_factory=list)

    def add(self, x: float, y: float, tip: str, error: float | None = None) -> None:
        """Adds a point."""
        self.xs.append(x)
        self.ys.append(y)
        self.tips.append(tip)
        self.errors.append(error)

    def sorted(self) -> Series:
        """The same from left to right."""
        order = sorted(range(len(self.xs)), key=lambda i: self.xs[i])
        parts = ([values[i] for i in order] for values in (self.xs, self.ys, self.errors, self.tips))
        return Series(self.name, *parts)  # type: ignore[arg-type]  # four lists in the order of the fields


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        log: logarithmic.
        zero: on a logarithmic axis, what is not above 0 is drawn at its end, which is marked 0; or "less", if what is
            more than ``tenfolds`` below the largest is drawn there as well.
        signed: of both signs; logarithmic away from 0 where the values differ much in size.
        from_zero: a linear axis shows 0.
        ticks: where they are, if there is room; empty: found.
        form: how values are written.
    """

    label: str = ""
    log: bool = False
    base: int = 10
    ticks: tuple[float, ...] = ()
    zero: bool = False
    tenfolds: int = 5
    signed: bool = False
    from_zero: bool = False
    form: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Chart:
    """A drawing: SVG for the page, the series in it, and whether it takes the whole width."""

    svg: Markup
    names: tuple[str, ...] = ()
    wide: bool = False


def short(value: float) -> str:
    """Returns a number for an axis: three significant digits, no zeros that say nothing."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        digits, _, power = f"{value:.2e}".partition("e")
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return f"{digits}e{int(power)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 0.001 else f"{value:.6f}".rstrip("0")


def clip(text: str, most: int = 26) -> str:
    """Returns a name that fits, with its middle left out if it is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


# ---- charts ---------------------------------------------------------------------------------------------------------


def lines(
    series: Iterable[Series],
    styles: Styles,
    x: Axis,
    y: Axis,
    what: str,
    *,
    reference: tuple[float, str] | None = None,
    width: int = NARROW,
    height: int = 300,
) -> Chart:
    """Draws lines with their points.

    Args:
        series: what to draw.
        styles: how each is drawn.
        x, y: the axes.
        what: the drawing in words, for those who do not see it.
        reference: a height that all are to be seen against, and its name.
        width, height: in pixels.
    """
    ordered = [one.sorted() for one in series if one.xs]
    with _drawing(width, height) as drawing:
        axes = drawing.axes(58, 16, 14, 48)
        heights = [value for one in ordered for value in one.ys] + ([reference[0]] if reference is not None else [])
        y_place = _scale(axes, "y", y, heights)
        x_place = _scale(axes, "x", x, [value for one in ordered for value in one.xs])
        if reference is not None:
            axes.axhline(reference[0], color=_MUTED, linewidth=1, dashes=(2, 2), zorder=1)
            axes.annotate(
                reference[1],
                (1, reference[0]),
                (-4, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                color=_MUTED,
                fontsize=11,
                zorder=6,
                gid="halo-0",
            )
        for one in ordered:
            style = styles.of(one.name)
            colour = drawing.colour(style.variable)
            places = [(x_place(a), y_place(b)) for a, b in zip(one.xs, one.ys, strict=True)]
            axes.plot(
                *zip(*places, strict=True), color=colour, lw=1.8, ls=(0, (4, 2)) if style.dashed else "-", zorder=3
            )
            for place, error, tip in zip(places, one.errors, one.tips, strict=True):
                if error is not None:
                    axes.errorbar(*place, yerr=error, color=colour, lw=1.2, capsize=3, zorder=3)
                axes.plot(
                    *place, style.marker, color=colour, ms=6, mec=_SURFACE, mew=0.8, gid=drawing.tip(tip), zorder=4
                )
        return drawing.chart(what, [one.name for one in ordered])


def front(points: Sequence[Series], styles: Styles, x: Axis, y: Axis, what: str, *, draw_front: bool = True) -> Chart:
    """Draws one point for each series with its name beside it, and the line of those that no other beats in both.

    Smaller is better on both axes.
    """
    with _drawing(NARROW, 340) as drawing:
        axes = drawing.axes(58, 16, 14, 48)
        found = [one for one in points if one.xs]
        reach = [one.ys[0] + sign * (one.errors[0] or 0.0) for one in found for sign in (-1, 1)]
        y_place = _scale(axes, "y", y, reach, margin=0.1)
        x_place = _scale(axes, "x", x, [value for one in found for value in one.xs], margin=0.12)
        taken: list[tuple[float, float, float, float]] = []
        best = pareto([(one.xs[0], max(one.ys[0], 0.0)) for one in found]) if draw_front else []
        places = [(x_place(a), y_place(b)) for a, b in best]
        if len(places) > 1:
            axes.plot(*zip(*places, strict=True), color=_MUTED, lw=1.4, ls=(0, (3, 2)), ds="steps-post", zorder=2)
            for (x0, y0), (x1, y1) in itertools.pairwise(axes.transData.transform(places)):
                taken += [(x0, y0 - 1, x1, y0 + 1), (x1 - 1, min(y0, y1), x1 + 1, max(y0, y1))]
        labels: dict[tuple[int, int], tuple[list[str], float, float]] = {}
        for one in found:
            style = styles.of(one.name)
            colour = drawing.colour(style.variable)
            px, py = x_place(one.xs[0]), y_place(one.ys[0])
            error = one.errors[0]
            if error is not None:
                axes.errorbar(px, py, yerr=error, color=colour, lw=1.2, capsize=3, zorder=3)
            axes.plot(
                px, py, style.marker, color=colour, ms=9, mec=_SURFACE, mew=1, gid=drawing.tip(one.tips[0]), zorder=4
            )
            dot_x, dot_y = axes.transData.transform((px, py))
            taken.append((dot_x - 6, dot_y - 6, dot_x + 6, dot_y + 6))
            near = (round(dot_x / 9), round(dot_y / 9))
            labels.setdefault(near, ([], dot_x, dot_y))[0].append(one.name)
        fronts = {(round(x / 9), round(y / 9)) for x, y in (axes.transData.transform(places) if places else ())}
        for near, (names, dot_x, dot_y) in labels.items():
            _write_beside(axes, clip(", ".join(names), 34), dot_x, dot_y, taken, near in fronts)
        return drawing.chart(what, [one.name for one in found])


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no other one beats in both coordinates, smaller being better, from left to right."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def bars(
    rows: Sequence[tuple[str, float, str]], styles: Styles, x: Axis, what: str, *, reference: float | None = None
) -> Chart:
    """Draws one bar for each cache: its name, its length, and what it is."""
    left = 16 + _CHARACTER * max(len(clip(name)) for name, _, _ in rows)
    form = x.form or short
    with _drawing(NARROW, 62 + 27 * len(rows)) as drawing:
        axes = drawing.axes(left, 60, 8, 48)
        longest = max([value for _, value, _ in rows] + [reference or 0.0]) or 1.0
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [clip(name) for name, _, _ in rows])
        axes.set_xlabel(x.label)
        _few_ticks(axes, "x", form)
        axes.grid(visible=False, axis="y")
        if reference is not None:
            axes.axvline(reference, color=_MUTED, linewidth=1, dashes=(2, 2), zorder=3)
        for place, (name, value, tip) in enumerate(rows):
            colour = drawing.colour(styles.of(name).variable)
            axes.barh(place, value, height=0.62, color=colour, gid=None, zorder=2)[0].set_gid(drawing.tip(tip))
            axes.annotate(form(value), (value, place), (5, 0), textcoords="offset points", va="center", color=_INK)
        return drawing.chart(what, [name for name, _, _ in rows])


@dataclass(frozen=True)
class Dots:
    """One row of :func:`dot_rows`: places with their markers and what they are, and a line between two of them."""

    group: str
    name: str
    places: tuple[tuple[float, str, str], ...]
    span: tuple[float, float] | None = None


def dot_rows(rows: Sequence[Dots], styles: Styles, x: Axis, what: str, *, reference: float | None = None) -> Chart:
    """Draws a row for each cache, with marks along one axis."""
    names = 16 + _CHARACTER * max(len(clip(row.name)) for row in rows)
    groups = list(dict.fromkeys(row.group for row in rows))
    left = names + (0 if groups == [""] else 8 + _BOLD * max(len(clip(group)) for group in groups))
    heights: list[float] = []
    for number, row in enumerate(rows):
        gap = 0.5 if number and row.group != rows[number - 1].group else 0.0
        heights.append((heights[-1] + 1 if heights else 0.0) + gap)
    with _drawing(WIDE, round(62 + 25 * (heights[-1] + 1))) as drawing:
        axes = drawing.axes(left, 20, 8, 48)
        values = [place for row in rows for place, _, _ in row.places]
        values += [end for row in rows for end in row.span or ()]
        place_of = _scale(axes, "x", x, values)
        axes.set_ylim(heights[-1] + 0.6, -0.6)
        axes.set_yticks(heights, [clip(row.name) for row in rows])
        axes.grid(visible=False, axis="y")
        if reference is not None:
            axes.axvline(reference, color=_MUTED, linewidth=1, dashes=(2, 2), zorder=1)
        for group in groups:
            inside = [height for height, row in zip(heights, rows, strict=True) if row.group == group]
            _write_left(axes, clip(group), sum(inside) / len(inside), -names)
        for height, row in zip(heights, rows, strict=True):
            colour = drawing.colour(styles.of(row.name).variable)
            if row.span is not None:
                axes.plot([place_of(end) for end in row.span], [height, height], color=colour, lw=2, zorder=2)
            for place, marker, tip in row.places:
                axes.plot(
                    place_of(place),
                    height,
                    marker,
                    color=colour,
                    ms=7,
                    mec=_SURFACE,
                    mew=0.8,
                    gid=drawing.tip(tip),
                    zorder=4,
                )
        return drawing.chart(what, list(dict.fromkeys(row.name for row in rows)), wide=True)


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
    names = 12 + _CHARACTER * max(len(clip(name)) for _, name in rows)
    left = names + (0 if row_groups == [""] else 8 + _BOLD * max(len(clip(group)) for group in row_groups))
    has_column_groups = any(group for group, _ in columns)
    room = WIDE - left - 20
    cell_width = min(room / (column_places[-1] + 1), 84.0)
    cell_height = max(15.0, min(28.0, 26.0 if written else cell_width * 0.8))
    body = cell_height * (row_places[-1] + 1)
    scale = _HeatScale(list(values.values()), limits, log, less_is_strong)
    below = 44 if label else 26
    with _drawing(WIDE, round(body + 48 + below + (18 if has_column_groups else 0))) as drawing:
        top = 40 + (18 if has_column_groups else 0)
        axes = drawing.axes(left, WIDE - left - cell_width * (column_places[-1] + 1), top, drawing.height - top - body)
        axes.set_xlim(-0.5, column_places[-1] + 0.5)
        axes.set_ylim(row_places[-1] + 0.5, -0.5)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        every = max(1, math.ceil(_CHARACTER * (max(len(name) for _, name in columns) + 1) / cell_width))
        shown = [i for i in range(len(columns)) if i % every == 0]
        axes.set_xticks([column_places[i] for i in shown], [columns[i][1] for i in shown])
        axes.set_yticks(row_places, [clip(name) for _, name in rows])
        axes.set_xlabel(label)
        for group in row_groups:
            inside = [place for place, row in zip(row_places, rows, strict=True) if row[0] == group]
            _write_left(axes, clip(group), sum(inside) / len(inside), -names)
        for group in dict.fromkeys(group for group, _ in columns):
            inside = [place for place, column in zip(column_places, columns, strict=True) if column[0] == group]
            axes.annotate(
                group, (sum(inside) / len(inside), 1), (0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", color=_INK,
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
                cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_heat(level), edgecolor=_SURFACE, linewidth=1)
                cell.set_gid(drawing.tip(tip))
                axes.add_patch(cell)
                if is_roomy:
                    colour = _HIGH_TEXT if level >= HEAT_LEVELS // 2 else _LOW_TEXT
                    axes.text(x, y, form(value), ha="center", va="center", color=colour, fontsize=11)
        _draw_scale(drawing, scale, left, form, unit)
        return drawing.chart(what, wide=True)


# ---- parts of charts ------------------------------------------------------------------------------------------------


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


def _draw_scale(drawing: _Drawing, scale: _HeatScale, left: float, form: Callable[[float], str], unit: str) -> None:
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
        axes.add_patch(Rectangle((level, 0), 1.05 if level < HEAT_LEVELS - 1 else 1, 1, facecolor=_heat(level), lw=0))
    shares = (0.0, 0.5, 1.0) if scale.high > scale.low else (0.5,)
    axes.set_xticks([share * HEAT_LEVELS for share in shares], [form(scale.at(share)) for share in shares], fontsize=11)
    axes.tick_params(axis="x", pad=2)
    notes = [part for part in (unit, "logarithmic" if scale.log else "") if part]
    axes.annotate(", ".join(notes), (1, 0.5), (22, 0), xycoords="axes fraction", textcoords="offset points", va="center", color=_MUTED)  # fmt: skip # noqa: E501


def _places(lines_: Sequence[Line]) -> list[float]:
    places: list[float] = []
    for number, (group, _) in enumerate(lines_):
        gap = 0.35 if number and group != lines_[number - 1][0] else 0.0
        places.append((places[-1] + 1 if places else 0.0) + gap)
    return places


def _write_left(axes: Axes, text: str, height: float, offset: float) -> None:
    axes.annotate(
        text, (0, height), (offset, 0), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        va="center", color=_INK, fontweight="bold",
    )  # fmt: skip


def _write_beside(
    axes: Axes, text: str, dot_x: float, dot_y: float, taken: list[tuple[float, float, float, float]], bold: bool
) -> None:
    """Writes a name beside a point where it meets least of what is ``taken``, and adds its own place to that."""
    bounds = axes.get_window_extent()
    wide, high = (_BOLD if bold else _CHARACTER) * len(text) + 2, 14.0
    places = [
        (dx, dy, dot_x + dx - (wide if ha == "right" else wide / 2 if ha == "center" else 0), ha)
        for dx, dy, ha in (
            (10, -4, "left"), (0, 11, "center"), (0, -20, "center"), (-10, -4, "right"), (8, 8, "left"),
            (8, -17, "left"), (-8, 8, "right"), (-8, -17, "right"), (0, 26, "center"), (0, -35, "center"),
        )
    ]  # fmt: skip

    def cost(place: tuple[float, float, float, str]) -> float:
        left, low = place[2], dot_y + place[1] - 2
        right, top = left + wide, low + high
        outside = (
            max(0, bounds.x0 + 2 - left)
            + max(0, right - bounds.x1 - 12)
            + max(0, bounds.y0 - low)
            + max(0, top - bounds.y1 - 10)
        )
        met = sum(
            max(0.0, min(right, r) - max(left, l)) * max(0.0, min(top, t) - max(low, b))
            for l, b, r, t in taken  # noqa: E741
        )
        return 50 * outside + met

    dx, dy, left, ha = min(places, key=cost)
    taken.append((left, dot_y + dy - 2, left + wide, dot_y + dy - 2 + high))
    position = axes.transData.inverted().transform((dot_x, dot_y))
    weight = "bold" if bold else "normal"
    axes.annotate(
        text, tuple(position), (dx, dy), textcoords="offset points", ha=ha, color=_INK, fontweight=weight, zorder=5,
        gid=f"halo-{len(taken)}",
    )  # fmt: skip


def _scale(
    axes: Axes, which: str, axis: Axis, values: Sequence[float], margin: float = 0.06
) -> Callable[[float], float]:
    """Sets up an axis for values, and returns where each is drawn."""
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    set_ticks: Callable[..., Any] = axes.set_xticks if which == "x" else axes.set_yticks
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(axis.label if which == "x" else "")
    form = axis.form or short
    values = list(values) or [1.0]
    positive = [value for value in values if value > 0]
    if axis.signed and which == "y":
        sizes = [abs(value) for value in values if value]
        if sizes and max(sizes) > 200 * min(sizes):
            return _signed_scale(axes, values, form)
    if not axis.log or not positive:
        low, high = min(values), max(values)
        if axis.from_zero:
            low = min(low, 0.0)
        room = (high - low or abs(high) or 1.0) * margin
        set_limits(low if axis.from_zero and low == 0 else low - room, high + room)
        if axis.ticks:
            set_ticks(axis.ticks, [form(tick) for tick in axis.ticks])
        else:
            _few_ticks(axes, which, form)
        return lambda value: value
    high = max(positive)
    low = min(value for value in positive if not axis.zero or value >= high / 10**axis.tenfolds)
    floor = low
    has_floor = axis.zero and min(values) < low
    end = "less" if has_floor and min(positive) < low else "0"
    if has_floor:
        floor = low / max((high / low) ** 0.12, 1.8)
    room = max((high / floor) ** margin, 1.08)
    if which == "x":
        axes.set_xscale("log", base=axis.base)
    else:
        axes.set_yscale("log", base=axis.base)
    set_limits(floor / room, high * room)
    # What takes part in the scale beyond the least positive value would be read as a value.
    least = low if has_floor else low / room
    ticks = [tick for tick in axis.ticks or _log_ticks(low, high, room) if least <= tick <= high * room]
    ticks = ticks or [low]
    named = [form(tick) for tick in ticks]
    set_ticks([floor, *ticks] if has_floor else ticks, [end, *named] if has_floor else named)
    set_ticks([], minor=True)
    return lambda value: max(value, floor)


def _signed_scale(axes: Axes, values: Sequence[float], form: Callable[[float], str]) -> Callable[[float], float]:
    """Sets up a height of both signs that is logarithmic away from 0: there, tenfold is as far everywhere."""
    sizes = sorted(abs(value) for value in values if value)
    # Linear up to a size that most values have, and over no more than four tenfolds beyond it.
    linear = 10.0 ** math.floor(math.log10(max(sizes[0], sizes[-1] / 1e4)))
    axes.set_yscale("symlog", linthresh=linear, linscale=0.6)
    low, high = min(*values, 0.0), max(*values, 0.0)
    powers = [linear * 10.0**power for power in range(8)]
    ticks = [*(-power for power in reversed(powers) if power <= -low * 1.01), 0.0]
    ticks += [power for power in powers if power <= high * 1.01]
    axes.set_yticks(ticks, [form(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(min(low * 2.2, -linear * 0.6), max(high * 2.2, linear * 0.6))
    return lambda value: value


def _log_ticks(low: float, high: float, room: float) -> list[float]:
    begin, end = math.floor(math.log10(low / room)), math.ceil(math.log10(high * room))
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)):
        ticks = [step * 10.0**power for power in range(begin, end + 1) for step in steps]
        ticks = [tick for tick in ticks if low / room <= tick <= high * room]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 8)]
    return [low, high] if high > low * 1.2 else [low]


def _few_ticks(axes: Axes, which: str, form: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(0.0 if abs(value) < 1e-12 else value)))


def _heat(level: int) -> str:
    return f"#a0c0{level:02x}"


# ---- from matplotlib to the page ------------------------------------------------------------------------------------


class _Drawing:
    """A figure being drawn."""

    def __init__(self, figure: Figure, width: float, height: float) -> None:
        self.figure, self.width, self.height = figure, width, height
        self._tips: list[str] = []
        self._colours: dict[str, str] = {}

    def axes(self, left: float, right: float, top: float, bottom: float) -> Axes:
        """Adds axes with these margins, in pixels."""
        box = (
            left / self.width,
            bottom / self.height,
            (self.width - left - right) / self.width,
            (self.height - top - bottom) / self.height,
        )
        return self.figure.add_axes(box)

    def colour(self, variable: str) -> str:
        """The colour that stands for a variable of the page."""
        return self._colours.setdefault(variable, f"#a0d0{len(self._colours):02x}")

    def tip(self, text: str) -> str:
        """Keeps what something is, and returns the id for it."""
        self._tips.append(text)
        return f"tip-{len(self._tips) - 1}"

    def chart(self, what: str, names: Iterable[str] = (), wide: bool = False) -> Chart:
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
        colours = {colour: f"var({variable},#4269d0)" for variable, colour in self._colours.items()}
        return Chart(_to_html(buffer.getvalue(), what, self._tips, colours, self.width), tuple(names), wide)


class _drawing(AbstractContextManager["_Drawing"]):  # noqa: N801  # used as a function
    """A new drawing of a size in pixels, with matplotlib's settings as they have to be, and back at the end."""

    def __init__(self, width: float, height: float) -> None:
        import matplotlib

        self._size = width, height
        self._settings = matplotlib.rc_context(
            {
                "svg.fonttype": "none",  # text stays text
                "svg.hashsalt": "qkv",  # the same drawing has the same names inside
                "text.parse_math": False,  # names come from files, and a dollar sign in one means nothing
                "font.family": "DejaVu Sans",
                "font.size": _FONT,
                "axes.axisbelow": True,
                "axes.edgecolor": _GRID,
                "axes.facecolor": "none",
                "axes.grid": True,
                "axes.labelcolor": _MUTED,
                "axes.labelpad": 8,
                "axes.labelsize": _FONT,
                "axes.linewidth": 1,
                "axes.spines.left": False,
                "axes.spines.right": False,
                "axes.spines.top": False,
                "grid.color": _GRID,
                "grid.linewidth": 1,
                "text.color": _INK,
                "xtick.color": _MUTED,
                "xtick.major.size": 0,
                "xtick.minor.size": 0,
                "xtick.major.pad": 7,
                "ytick.color": _MUTED,
                "ytick.major.size": 0,
                "ytick.minor.size": 0,
                "ytick.major.pad": 8,
            }
        )

    def __enter__(self) -> _Drawing:
        from matplotlib.figure import Figure

        self._settings.__enter__()
        width, height = self._size
        return _Drawing(Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none"), width, height)

    def __exit__(self, *problem: Any) -> None:
        self._settings.__exit__(*problem)


def _to_html(svg: str, what: str, tips: Sequence[str], colours: dict[str, str], width: float) -> Markup:
    """Makes an SVG file of matplotlib's a part of a page."""
    digest = "g" + hashlib.sha256(f"{what}\n{svg}".encode()).hexdigest()[:10]  # what is named inside is named once
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{digest}-", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<text style="[^"]*?)font-family: [^;"]*;? ?', r"\1", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    for colour, variable in (_VARIABLES | colours).items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"#a0c0([0-9a-f]{2})", lambda found: f"var(--h{int(found[1], 16)},#4269d0)", svg)
    svg = re.sub(
        rf'<g id="{digest}-tip-(\d+)">',
        lambda found: f'<g class="tip"><title>{html.escape(tips[int(found[1])])}</title>',
        svg,
    )
    view = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg class="chart" {view[0] if view else ""} role="img" aria-label="{html.escape(what)}" '
    svg = re.sub(r"^<svg[^>]*>", lambda _: f'{head}style="max-width:{width:.0f}px">', svg, count=1)
    return Markup(re.sub(r"\s*\n\s*", " ", svg))
