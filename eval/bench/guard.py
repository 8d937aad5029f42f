"""``qkv bench guard``: whether the figures of benchmarks got worse, by their ratios.

A time belongs to a machine and a day; the ratio of two times out of one run, in turn, hardly does. So a file in the
repository, ``expected.json``, says which ratios are expected and how far they may be off:

    {
      "measured_on": {"processor": ..., "threads": ..., ...},
      "runs": ["kernel --formats int8,int4 --kv-len 8192", ...],
      "checks": [
        {"name": "int8 against torch", "command": "bench kernel", "key": "speedup",
         "row": {"format": "int8", "kv_len": 8192}, "better": "higher", "expected": 6.5, "tolerance": 0.1},
        {"name": "int4 against int8, time", "command": "bench kernel", "key": "ms", "row": {"format": "int4"},
         "over": {"format": "int8"}, "better": "lower", "expected": 0.7, "tolerance": 0.1}
      ]
    }

``runs`` are the arguments of ``qkv bench`` which make the rows. A check finds the one row that agrees with ``row``; its
figure is ``key``, a ratio by itself, or with ``over`` divided by that of the row that agrees with ``over`` as well as,
in everything it does not name, with ``row``. ``tolerance`` is a share of what is expected.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("expected.json")

# What a ratio came to.
HELD, BETTER, WORSE, MISSING, SKIPPED = "held", "better", "worse", "missing", "skipped"
_CHECK_KEYS = {"name", "command", "key", "row", "over", "better", "expected", "tolerance"}
# Two machines that differ in one of these have other ratios.
_MACHINE = ("processor", "threads")


@dataclass(frozen=True)
class Check:
    """One ratio that is watched; see the head of this module."""

    name: str
    command: str
    key: str
    row: Mapping[str, Any]
    better: str
    expected: float
    tolerance: float
    over: Mapping[str, Any] | None = None

    @property
    def limit(self) -> float:
        """The ratio from which on it is worse than it may be."""
        return self.expected * (1 - self.tolerance if self.better == "higher" else 1 + self.tolerance)


@dataclass(frozen=True)
class Expected:
    """A file of expectations: what it says about the machine, the runs that make the rows, and the checks."""

    path: Path
    measured_on: Mapping[str, Any]
    runs: tuple[tuple[str, ...], ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Verdict:
    """What came of a check: ``outcome`` is one of the words of this module, ``note`` what else is to be said."""

    check: Check
    outcome: str
    measured: float | None = None
    spread: float | None = None
    note: str = ""

    @property
    def change_percent(self) -> float | None:
        """By how much the ratio is off what is expected, above 0 if that is better."""
        if self.measured is None:
            return None
        change = 100 * (self.measured / self.check.expected - 1)
        return change if self.check.better == "higher" else -change

    def as_row(self) -> dict[str, Any]:
        """Returns the row of tables and of the results' file."""
        return {
            "check": self.check.name,
            "command": self.check.command,
            "outcome": self.outcome,
            "measured": self.measured,
            "expected": self.check.expected,
            "limit": self.check.limit,
            "change_percent": self.change_percent,
            "spread": self.spread,
            "note": self.note,
        }


@dataclass(frozen=True)
class Judgement:
    """All verdicts, and lines that a reader should know."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def failures(self) -> list[Verdict]:
        """What got worse, or should have been measured and was not."""
        return [verdict for verdict in self.verdicts if verdict.outcome in (WORSE, MISSING)]


def read_expected(path: str | Path = EXPECTED) -> Expected:
    """Reads a file of expectations.

    Raises:
        ValueError: it is missing, or not what it should be; the message says where.
    """
    content = _read_json(path, "expectations")
    checks, runs, machine = content.get("checks"), content.get("runs", []), content.get("measured_on", {})
    if not isinstance(checks, list) or not checks:
        raise ValueError(f"{str(path)!r} has no checks; see the head of qkv_eval.bench.guard for what it should hold")
    if not isinstance(runs, list) or not all(isinstance(run, str) and run.strip() for run in runs):
        raise ValueError(f"runs in {str(path)!r} must be arguments of qkv bench, such as 'kernel --formats int8'")
    if not isinstance(machine, dict):
        raise ValueError(f"measured_on in {str(path)!r} must be an object")
    read = tuple(_check_of(entry, f"check {place} in {str(path)!r}") for place, entry in enumerate(checks, 1))
    names = [check.name for check in read]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two checks in {str(path)!r} are called {name!r}")
    return Expected(Path(path), machine, tuple(tuple(shlex.split(run)) for run in runs), read)


def read_results(path: str | Path) -> dict[str, Any]:
    """Reads a results file of ``qkv bench ... --json``.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    content = _read_json(path, "results")
    meta, rows = content.get("meta"), content.get("rows")
    is_table = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not isinstance(meta, dict) or not is_table or not isinstance(meta.get("command"), str):
        raise ValueError(f"{str(path)!r} is no results file of qkv bench: write one with --json")
    return content


def judge(expected: Expected, results: Sequence[Mapping[str, Any]]) -> Judgement:
    """Holds results against expectations.

    Args:
        expected: what to hold them against.
        results: each with ``meta``, of which ``command`` says what made them, and ``rows``.

    Returns:
        A verdict for each check. One is ``skipped`` if no results of its command are there, and ``missing``, which is
        a failure, if they are there without its row.

    Raises:
        ValueError: the results are of none of the commands that are checked.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        rows.setdefault(one["meta"]["command"], []).extend(one["rows"])
    wanted = sorted({check.command for check in expected.checks})
    if not set(wanted) & set(rows):
        raise ValueError(f"there is nothing to check: no results of {', '.join(wanted)} were given")
    verdicts = tuple(
        _judge_one(check, rows[check.command]) if check.command in rows else Verdict(check, SKIPPED)
        for check in expected.checks
    )
    notes = []
    for key in _MACHINE:
        found = sorted({str(one["meta"].get(key)) for one in results})
        if key in expected.measured_on and found != [str(expected.measured_on[key])]:
            notes.append(f"expected ratios are of {key} {expected.measured_on[key]}, these of {' and '.join(found)}")
    return Judgement(verdicts, tuple(notes))


def updated(expected: Expected, judgement: Judgement, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the content of a file of expectations with what was measured as the new expectation.

    Checks that were not measured stay as they are, and so do all tolerances.
    """
    content = _read_json(expected.path, "expectations")
    measured = {verdict.check.name: verdict.measured for verdict in judgement.verdicts}
    for entry in content["checks"]:
        value = measured.get(entry["name"])
        if value is not None:
            entry["expected"] = float(f"{value:.4g}")
    keys = (*_MACHINE, "version", "commit", "torch", "transformers", "date")
    meta = results[-1]["meta"]
    return {"measured_on": {key: meta[key] for key in keys if key in meta}} | {
        key: value for key, value in content.items() if key != "measured_on"
    }


def as_text(content: Mapping[str, Any]) -> str:
    """Writes the content of a file of expectations, with each run and each check on a line of its own."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            items = ",\n".join(f"    {json.dumps(item)}" for item in value)
            parts.append(f'  "{key}": [\n{items}\n  ]')
        else:
            parts.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _judge_one(check: Check, rows: Sequence[Mapping[str, Any]]) -> Verdict:
    try:
        top = _find(rows, check.row)
        bottom = None if check.over is None else _find(rows, {**check.row, **check.over})
        value = _figure(top, check.key)
        if bottom is not None:
            value /= _figure(bottom, check.key)
    except LookupError as error:
        return Verdict(check, MISSING, note=str(error.args[0]))
    # The spread in a row is that of its time; sizes have none.
    rows_of_times = () if check.key.endswith("bytes") else (top, bottom)
    spreads = [row["spread"] for row in rows_of_times if row is not None and row.get("spread") is not None]
    spread = max(spreads, default=None)
    note = ""
    if spread is not None and spread > check.tolerance:
        note = "noisy: the timings spread more than the tolerance, so measure again"
    change = (value - check.expected) * (1 if check.better == "higher" else -1) / check.expected
    if change < -check.tolerance:
        return Verdict(check, WORSE, value, spread, note)
    if change > check.tolerance:
        return Verdict(check, BETTER, value, spread, note or "expect it from now on with --update")
    return Verdict(check, HELD, value, spread, note)


def _find(rows: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        words = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise LookupError(f"{len(found) or 'no'} rows with {words}" + ("; say which one" if found else ""))
    return found[0]


def _figure(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise LookupError(f"{key} is {value!r}, of which there is no ratio")
    return float(value)


def _check_of(entry: Any, where: str) -> Check:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    unknown = sorted(set(entry) - _CHECK_KEYS)
    missing = sorted(_CHECK_KEYS - {"over"} - set(entry))
    if unknown or missing:
        wrong = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise ValueError(f"{where} {wrong}; its keys are {', '.join(sorted(_CHECK_KEYS))}")
    for key in ("name", "command", "key"):
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"{where}: {key} must be text")
    for key in ("row", "over"):
        if entry.get(key) is not None and (not isinstance(entry[key], dict) or not entry[key]):
            raise ValueError(f"{where}: {key} must name keys of a row and their values")
    if entry["better"] not in ("higher", "lower"):
        raise ValueError(f"{where}: better must be 'higher' or 'lower', not {entry['better']!r}")
    for key, most in (("expected", math.inf), ("tolerance", 1.0)):
        value = entry[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < most:
            raise ValueError(f"{where}: {key} must be a number above 0" + (" and below 1" if most == 1.0 else ""))
    return Check(**entry)


def _read_json(path: str | Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the {what} {str(path)!r} are not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the {what} {str(path)!r} must be a JSON object")
    return content
