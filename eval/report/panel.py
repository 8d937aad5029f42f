"""The parts of the page, and which rows stand together in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkv_eval.report.drawing import Chart
from qkv_eval.report.heat import Line
from qkv_eval.report.load import NOISE_FLOOR, Row, Run, name_of, number
from qkv_eval.report.series import short

NEGLIGIBLE = 1e-9  # nats: a divergence below it is rounding, on either side of 0


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading and what it shows."""

    title: str
    caption: str
    chart: Chart


@dataclass
class Panel:
    """A part of the page: figures with a legend.

    Attributes:
        name: for links.
        title: its heading.
        lead: what is drawn.
        needs: the commands whose results it draws.
        parts: pairs of a heading, empty if there is but one, and its figures.
    """

    name: str
    title: str
    lead: str
    needs: str
    parts: list[tuple[str, list[Figure]]] = field(default_factory=list)

    def add(self, heading: str, figures: Sequence[Figure]) -> None:
        """Adds figures, if there are any."""
        if figures:
            self.parts.append((heading, list(figures)))

    @property
    def names(self) -> list[str]:
        """The caches in its figures, each once."""
        return list(
            dict.fromkeys(name for _, figures in self.parts for figure in figures for name in figure.chart.names)
        )


# ---- which rows belong together -------------------------------------------------------------------------------------


def rows_by(
    runs: Sequence[Run], kinds: Sequence[str], key: Callable[[Run], str]
) -> Iterator[tuple[str, list[tuple[Run, Row]]]]:
    """Yields a heading and the rows of the runs that may stand in one drawing."""
    groups: dict[str, list[tuple[Run, Row]]] = {}
    for kind in kinds:
        for run in runs:
            if run.kind == kind:
                groups.setdefault(key(run), []).extend((run, row) for row in run.rows)
    yield from groups.items()


def model_key(run: Run) -> str:
    """What runs share whose answers may be compared: the model."""
    return run.model or "no model"


def text_key(run: Run) -> str:
    """What runs share whose predictions may be compared: the model and the text."""
    text = run.meta.get("text")
    if not isinstance(text, dict):
        return model_key(run)
    window = f" in windows of {text['window']} tokens" if "window" in text else ""
    return f"{model_key(run)}: {text.get('name')}{window}"


def machine_key(run: Run) -> str:
    """What runs share whose times may be compared: the model and the machine."""
    machine = [str(run.meta[key]) for key in ("device", "processor") if run.meta.get(key)]
    threads = run.meta.get("threads")
    if threads is not None:
        machine.append(f"{threads} thread{'s' if threads != 1 else ''}")
    return ", ".join(part for part in (run.model, *machine) if part)


def named(rows: Sequence[tuple[Run, Row]]) -> list[tuple[str, Row]]:
    """Returns each row with the name of its cache, where a run has but one row for it."""
    return marked(rows, lambda row: None)


def marked(rows: Sequence[tuple[Run, Row]], place: Callable[[Row], Any]) -> list[tuple[str, Row]]:
    """Returns each row with the name of its cache, which says the run as well where runs would be mixed up."""
    runs_at: dict[tuple[str, str], set[int]] = {}
    for run, row in rows:
        runs_at.setdefault((name_of(row), repr(place(row))), set()).add(run.number)
    several = {name for (name, _), found in runs_at.items() if len(found) > 1}
    names = [(run, name_of(row)) for run, row in rows]
    shown = [f"{name} · run {run.number}" if name in several else name for run, name in names]
    return [(name, row) for name, (_, row) in zip(shown, rows, strict=True)]


def split_by(
    rows: Sequence[tuple[Run, Row]], *keys: str
) -> Iterator[tuple[tuple[float | None, ...], list[tuple[Run, Row]]]]:
    """Yields the rows that have the same numbers under some keys, and these numbers, in their order."""
    groups: dict[tuple[float | None, ...], list[tuple[Run, Row]]] = {}
    for run, row in rows:
        groups.setdefault(tuple(number(row.get(key)) for key in keys), []).append((run, row))
    yield from sorted(groups.items(), key=lambda item: [part or 0.0 for part in item[0]])


def is_named(name: str, cache: str) -> bool:
    """Whether a name that :func:`marked` gave is that of a cache."""
    return name.partition(" · ")[0] == cache


def ordered(rows: Iterable[Line]) -> list[Line]:
    """Groups in the order in which they come, and the lines of each by their number."""
    groups: dict[str, dict[str, None]] = {}
    for group, name in rows:
        groups.setdefault(group, {})[name] = None
    lines: list[Line] = []
    for group, names in groups.items():
        by_number = sorted(names, key=number_first) if group else list(names)
        lines += [(group, name) for name in by_number]
    return lines


def number_first(text: str) -> tuple[float, str]:
    """A key to sort by: the number that a text begins with, and the text."""
    digits = "".join(itertools.takewhile(lambda c: c.isdigit() or c in ".,-", text.removeprefix("head ")))
    try:
        return float(digits.replace(",", "")), text
    except ValueError:
        return float("inf"), text


# ---- in words and numbers -------------------------------------------------------------------------------------------


def floored(value: float) -> float:
    """A divergence, or 0 if it is nothing but rounding."""
    return value if value > NEGLIGIBLE else 0.0


def noise_in_words(rows: Sequence[tuple[Run, Row]]) -> str:
    """What rounding alone does, in words, if it was measured."""
    found = [number(row.get("kld_mean")) for _, row in rows if name_of(row) == NOISE_FLOOR]
    floors = [floor for floor in found if floor is not None]
    if not floors:
        return ""
    mean = short(max(floors)) if max(floors) > NEGLIGIBLE else f"less than {short(NEGLIGIBLE)}"
    return f" The unquantized cache against itself, computed in another order: {mean} in the mean."


def plus_minus(error: float | None) -> str:
    """A standard error in words, if it is known."""
    return "" if error is None else f" ± {error:.2g}"
