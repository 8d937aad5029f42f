"""The page: panels, tables and set-ups in HTML, all in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_eval.report.load import Run

if TYPE_CHECKING:
    from qkv_eval.report.panel import Panel

# Of the set-up, what comes first, in words; all else follows under its own name.
_SETUP = {
    "model": "Model",
    "dtype": "Weights",
    "date": "Date (UTC)",
    "version": "qkv",
    "commit": "Commit",
    "torch": "torch",
    "transformers": "transformers",
    "python": "Python",
    "device": "Device",
    "processor": "Processor",
    "capability": "Instructions",
    "cores": "Cores",
    "threads": "Threads",
    "seed": "Seed",
}
# Light and dark ends of the colours of heat maps, with what lies between.
_HEAT = {
    "light": ((238, 243, 250), (158, 196, 240), (59, 122, 205), (15, 46, 102)),
    "dark": ((30, 41, 59), (38, 82, 145), (88, 157, 236), (196, 222, 255)),
}


def build_page(runs: Sequence[Run], title: str = "What the cache does") -> str:
    """Makes the page.

    Everything that comes from files is escaped; and the page's own policy lets no script run and nothing be loaded.

    Raises:
        ValueError: there are no results, or a package that is needed is missing.
    """
    if not runs:
        raise ValueError("there are no results to report")
    try:
        import jinja2
        import matplotlib  # noqa: F401  # asked for here, so that the advice comes once
        from markupsafe import Markup
    except ImportError as error:
        raise ValueError(f"a report needs the package {error.name}; run: pip install 'qkv[report]'") from error
    from qkv_eval.report.drawing import HEAT_LEVELS
    from qkv_eval.report.panels import make_panels
    from qkv_eval.report.series import Styles
    from qkv_eval.report.tables import TITLES, make_table

    styles = Styles()
    panels = make_panels(runs, styles)
    files = resources.files("qkv_eval.report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    css = files.joinpath("page.css").read_text(encoding="utf-8")
    for name, ends in _HEAT.items():
        css = css.replace(f"/* heat: {name} */", _heat_variables(ends, HEAT_LEVELS))
    return template.render(
        title=title,
        css=Markup(css),
        made=datetime.now(UTC).strftime("%-d %B %Y, %H:%M UTC"),
        files=list(dict.fromkeys(run.file for run in runs)),
        models=list(dict.fromkeys(run.model for run in runs if run.model)),
        panels=[_shown(panel, styles) for panel in panels if panel.parts],
        missing=[panel for panel in panels if not panel.parts],
        tables=[make_table(run) for run in runs if run.rows],
        runs=[
            {"run": run, "title": TITLES[run.kind], "setup": _setup(run), "settings": list(_flat(run.settings))}
            for run in runs
        ],
        samples=[run for run in runs if any(isinstance(sample.get("text"), str) for sample in run.samples)],
    )


def write_page(page: str, path: str | Path) -> None:
    """Writes the page to a file, which is whole or not there.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.writing")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        if unfinished.is_file():
            unfinished.unlink()
        raise ValueError(f"cannot write the report {str(path)!r}: {error.strerror}") from error


def check_writable(path: str | Path) -> None:
    """Raises ``ValueError`` if a report cannot be written there."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"the report {str(path)!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} for the report")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"the report {str(path)!r} may not be written")


def _shown(panel: Panel, styles: Any) -> dict[str, Any]:
    legend = [(name, styles.of(name).swatch) for name in panel.names]
    headings = len(panel.parts) > 1 or len({heading for heading, _ in panel.parts}) == 1
    return {"panel": panel, "legend": legend, "headings": headings}


def _setup(run: Run) -> list[tuple[str, str]]:
    found = [(words, str(run.meta[key])) for key, words in _SETUP.items() if run.meta.get(key) is not None]
    rest = {key: value for key, value in run.meta.items() if key not in _SETUP and key != "command"}
    return found + list(_flat(rest))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "none"
        elif value is not None:
            yield name, str(value)


def _heat_variables(ends: Sequence[tuple[int, int, int]], levels: int) -> str:
    colours = []
    for level in range(levels):
        place = level / (levels - 1) * (len(ends) - 1)
        first = min(int(place), len(ends) - 2)
        share = place - first
        mixed = (round(a + share * (b - a)) for a, b in zip(ends[first], ends[first + 1], strict=True))
        colours.append(f"--h{level}:#{''.join(f'{part:02x}' for part in mixed)};")
    return "".join(colours)
