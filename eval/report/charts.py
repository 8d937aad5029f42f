"""Charts of series: lines, points with their Pareto front, bars, rows of marks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qkv_eval.report.drawing import BOLD, CHARACTER, INK, MUTED, NARROW, SURFACE, WIDE, Chart, drawing_of, write_left
from qkv_eval.report.series import Axis, Series, Styles, clip, few_ticks, scale_axis, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    with drawing_of(width, height) as drawing:
        axes = drawing.axes(58, 16, 14, 48)
        heights = [value for one in ordered for value in one.ys] + ([reference[0]] if reference is not None else [])
        y_place = scale_axis(axes, "y", y, heights)
        x_place = scale_axis(axes, "x", x, [value for one in ordered for value in one.xs])
        if reference is not None:
            axes.axhline(reference[0], color=MUTED, linewidth=1, dashes=(2, 2), zorder=1)
            axes.annotate(
                reference[1],
                (1, reference[0]),
                (-4, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                color=MUTED,
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
                    *place, style.marker, color=colour, ms=6, mec=SURFACE, mew=0.8, gid=drawing.tip(tip), zorder=4
                )
        return drawing.chart(what, [one.name for one in ordered])


def front(points: Sequence[Series], styles: Styles, x: Axis, y: Axis, what: str, *, draw_front: bool = True) -> Chart:
    """Draws one point for each series with its name beside it, and the line of those that no other beats in both.

    Smaller is better on both axes.
    """
    with drawing_of(NARROW, 340) as drawing:
        axes = drawing.axes(58, 16, 14, 48)
        found = [one for one in points if one.xs]
        reach = [one.ys[0] + sign * (one.errors[0] or 0.0) for one in found for sign in (-1, 1)]
        y_place = scale_axis(axes, "y", y, reach, margin=0.1)
        x_place = scale_axis(axes, "x", x, [value for one in found for value in one.xs], margin=0.12)
        taken: list[tuple[float, float, float, float]] = []
        best = pareto([(one.xs[0], max(one.ys[0], 0.0)) for one in found]) if draw_front else []
        places = [(x_place(a), y_place(b)) for a, b in best]
        if len(places) > 1:
            axes.plot(*zip(*places, strict=True), color=MUTED, lw=1.4, ls=(0, (3, 2)), ds="steps-post", zorder=2)
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
                px, py, style.marker, color=colour, ms=9, mec=SURFACE, mew=1, gid=drawing.tip(one.tips[0]), zorder=4
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
    left = 16 + CHARACTER * max(len(clip(name)) for name, _, _ in rows)
    form = x.form or short
    with drawing_of(NARROW, 62 + 27 * len(rows)) as drawing:
        axes = drawing.axes(left, 60, 8, 48)
        longest = max([value for _, value, _ in rows] + [reference or 0.0]) or 1.0
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [clip(name) for name, _, _ in rows])
        axes.set_xlabel(x.label)
        few_ticks(axes, "x", form)
        axes.grid(visible=False, axis="y")
        if reference is not None:
            axes.axvline(reference, color=MUTED, linewidth=1, dashes=(2, 2), zorder=3)
        for place, (name, value, tip) in enumerate(rows):
            colour = drawing.colour(styles.of(name).variable)
            axes.barh(place, value, height=0.62, color=colour, gid=None, zorder=2)[0].set_gid(drawing.tip(tip))
            axes.annotate(form(value), (value, place), (5, 0), textcoords="offset points", va="center", color=INK)
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
    names = 16 + CHARACTER * max(len(clip(row.name)) for row in rows)
    groups = list(dict.fromkeys(row.group for row in rows))
    left = names + (0 if groups == [""] else 8 + BOLD * max(len(clip(group)) for group in groups))
    heights: list[float] = []
    for number, row in enumerate(rows):
        gap = 0.5 if number and row.group != rows[number - 1].group else 0.0
        heights.append((heights[-1] + 1 if heights else 0.0) + gap)
    with drawing_of(WIDE, round(62 + 25 * (heights[-1] + 1))) as drawing:
        axes = drawing.axes(left, 20, 8, 48)
        values = [place for row in rows for place, _, _ in row.places]
        values += [end for row in rows for end in row.span or ()]
        place_of = scale_axis(axes, "x", x, values)
        axes.set_ylim(heights[-1] + 0.6, -0.6)
        axes.set_yticks(heights, [clip(row.name) for row in rows])
        axes.grid(visible=False, axis="y")
        if reference is not None:
            axes.axvline(reference, color=MUTED, linewidth=1, dashes=(2, 2), zorder=1)
        for group in groups:
            inside = [height for height, row in zip(heights, rows, strict=True) if row.group == group]
            write_left(axes, clip(group), sum(inside) / len(inside), -names)
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
                    mec=SURFACE,
                    mew=0.8,
                    gid=drawing.tip(tip),
                    zorder=4,
                )
        return drawing.chart(what, list(dict.fromkeys(row.name for row in rows)), wide=True)


def _write_beside(
    axes: Axes, text: str, dot_x: float, dot_y: float, taken: list[tuple[float, float, float, float]], bold: bool
) -> None:
    """Writes a name beside a point where it meets least of what is ``taken``, and adds its own place to that."""
    bounds = axes.get_window_extent()
    wide, high = (BOLD if bold else CHARACTER) * len(text) + 2, 14.0
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
        text, tuple(position), (dx, dy), textcoords="offset points", ha=ha, color=INK, fontweight=weight, zorder=5,
        gid=f"halo-{len(taken)}",
    )  # fmt: skip
