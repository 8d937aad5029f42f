"""A drawing, from matplotlib to the page: SVG whose colours are variables of the page, and text in the page's font.

matplotlib draws with colours that stand for variables, and :func:`_to_html` puts the variables in, so that one drawing
serves light, dark and print. Sizes are in pixels of the page at its full width. A point or cell has what it is and its
exact value as a title, which browsers show under the pointer.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 1060
NARROW = 516
_FONT = 12.0
# A character's mean width at that size, and of bold ones; rather too much than too little.
CHARACTER, BOLD = 7.4, 8.4
HEAT_LEVELS = 24

# Colours that stand for variables of the page; what follows the variable's name is for a drawing taken out of it.
INK, MUTED, GRID, SURFACE = "#a0b0f0", "#a0b0f1", "#a0b0f2", "#a0b0f3"
LOW_TEXT, HIGH_TEXT = "#a0b0f4", "#a0b0f5"
_VARIABLES = {
    INK: "var(--ink,#1b2330)",
    MUTED: "var(--muted,#5a6573)",
    GRID: "var(--grid,#e4e8ed)",
    SURFACE: "var(--surface,#ffffff)",
    LOW_TEXT: "var(--low-text,#1b2330)",
    HIGH_TEXT: "var(--high-text,#ffffff)",
}


@dataclass(frozen=True)
class Chart:
    """A drawing: SVG for the page, the series in it, and whether it takes the whole width."""

    svg: Markup
    names: tuple[str, ...] = ()
    wide: bool = False


class Drawing:
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
        """Finishes it; ``what`` says what it shows, for those who do not see it."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
        colours = {colour: f"var({variable},#4269d0)" for variable, colour in self._colours.items()}
        return Chart(_to_html(buffer.getvalue(), what, self._tips, colours, self.width), tuple(names), wide)


class drawing_of(AbstractContextManager["Drawing"]):  # noqa: N801  # used as a function
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
                "axes.edgecolor": GRID,
                "axes.facecolor": "none",
                "axes.grid": True,
                "axes.labelcolor": MUTED,
                "axes.labelpad": 8,
                "axes.labelsize": _FONT,
                "axes.linewidth": 1,
                "axes.spines.left": False,
                "axes.spines.right": False,
                "axes.spines.top": False,
                "grid.color": GRID,
                "grid.linewidth": 1,
                "text.color": INK,
                "xtick.color": MUTED,
                "xtick.major.size": 0,
                "xtick.minor.size": 0,
                "xtick.major.pad": 7,
                "ytick.color": MUTED,
                "ytick.major.size": 0,
                "ytick.minor.size": 0,
                "ytick.major.pad": 8,
            }
        )

    def __enter__(self) -> Drawing:
        from matplotlib.figure import Figure

        self._settings.__enter__()
        width, height = self._size
        return Drawing(Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none"), width, height)

    def __exit__(self, *problem: Any) -> None:
        self._settings.__exit__(*problem)


def heat_colour(level: int) -> str:
    """The colour that stands for a level of a map, of ``HEAT_LEVELS``."""
    return f"#a0c0{level:02x}"


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


def write_left(axes: Axes, text: str, height: float, offset: float) -> None:
    """Writes the name of a group left of the axes, at a height of theirs and so many pixels away."""
    axes.annotate(
        text, (0, height), (offset, 0), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        va="center", color=INK, fontweight="bold",
    )  # fmt: skip
