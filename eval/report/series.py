"""What drawings are made of: series with the style of their cache, and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def scale_axis(
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
            few_ticks(axes, which, form)
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


def few_ticks(axes: Axes, which: str, form: Callable[[float], str]) -> None:
    """Writes a few round values along a linear axis, ``x`` or ``y``."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(0.0 if abs(value) < 1e-12 else value)))
