"""Reads results files, of the commands and of sweeps, and says what kind of rows each holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from qkv_eval.results_file import read_results

Row = Mapping[str, Any]

OTHER = "other"
# Names of caches that the others are measured against.
UNQUANTIZED = "dynamic"
NOISE_FLOOR = "noise floor"
# Kind of rows (the command that makes them) -> keys that no kind after it has all of.
KINDS: dict[str, tuple[str, ...]] = {
    "compare": ("format", "ppl", "ms_per_step"),
    "eval ppl": ("format", "ppl", "kld_mean"),
    "eval lm": ("format", "task", "metric", "value"),
    "eval recall": ("format", "depth", "exact_match"),
    "eval layers": ("format", "layer", "head"),
    "tune": ("format", "layer", "side", "kld"),
    "bench kernel": ("format", "kv_len", "ms"),
    "bench memory": ("cache", "context", "bytes_per_token"),
    "bench prefill": ("cache", "context", "seconds"),
    "bench decode": ("cache", "context", "ms_per_step"),
    "bench redundancy": ("cache", "prompt", "positions_computed"),
}


@dataclass(frozen=True)
class Run:
    """The rows of one kind that share a set-up.

    Attributes:
        number: what the page calls it, from 1.
        file: the name of the file that it came from.
        kind: a key of ``KINDS``, or ``OTHER``.
        rows: as the file has them.
        meta: the set-up.
        notes: lines that a reader of the figures should know.
        samples: texts that were written through the caches.
        front: of a tuning, its solutions by budget.
        verified: of a tuning, what was scored on held-out text; it is a run of its own as well.
        settings: of a sweep's evaluation.
    """

    number: int
    file: str
    kind: str
    rows: tuple[Row, ...]
    meta: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    samples: tuple[Row, ...] = ()
    front: tuple[Row, ...] = ()
    verified: tuple[Row, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model and its type as words, or nothing where no model was needed."""
        parts = (self.meta.get("model"), self.meta.get("dtype"))
        return ", ".join(str(part) for part in parts if part is not None)


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Reads any number of results files.

    Raises:
        ValueError: a file is missing, empty, cut off, or holds something else than results. The message names it.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        for parts in _read(path):
            runs.append(Run(len(runs) + 1, path.name, **parts))
    return runs


def number(value: Any) -> float | None:
    """Returns a value as a number, or None if it is none that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None


def name_of(row: Row) -> str:
    """Returns the name of the cache that a row is about."""
    return str(row.get("format", row.get("cache", "?")))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no results file: it is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"cannot read the results {str(path)!r}: {error.strerror}") from error
    if not text.strip():
        raise ValueError(f"the results file {str(path)!r} is empty")
    if text.startswith('{"key": "'):
        return _from_sweep(path)
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"{str(path)!r} is no results file: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or text.lstrip().startswith("{"):
            raise ValueError(
                f"the results file {str(path)!r} is cut off or damaged at line {error.lineno}: {error.msg}"
            ) from error
        raise ValueError(f"{str(path)!r} is no results file: it is not JSON ({error.msg})") from error
    return _from_command(path, content)


def _from_command(path: Path, content: Any) -> list[dict[str, Any]]:
    meta = content.get("meta") if isinstance(content, dict) else None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(meta, dict) or not _are_rows(rows):
        raise ValueError(f'{str(path)!r} is no results file: it has no {{"meta": ..., "rows": [...]}}')
    if meta.get("command") == "eval sweep":
        return _from_lines(path, rows, [])
    more = {key: content.get(key) for key in ("samples", "front", "verified")}
    run = {
        "kind": _kind(meta, rows),
        "rows": tuple(rows),
        "meta": {key: value for key, value in meta.items() if key != "notes"},
        "notes": _strings(meta.get("notes")),
        **{key: tuple(value) if _are_rows(value) else () for key, value in more.items()},
    }
    if not run["verified"]:
        return [run]
    # Scored as by `qkv eval ppl`, and drawn with its results.
    scored = {"kind": "eval ppl", "rows": run["verified"], "meta": run["meta"]}
    return [run, scored]


def _from_sweep(path: Path) -> list[dict[str, Any]]:
    lines, problems = read_results(path)
    if not lines:
        raise ValueError(f"the results file {str(path)!r} holds no finished cell")
    return _from_lines(path, lines, problems)


def _from_lines(path: Path, lines: list[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Puts the cells of a sweep together that have everything but the cache and the time in common."""
    groups: dict[str, dict[str, Any]] = {}
    for line in lines:
        meta, rows, settings = line.get("meta", {}), line.get("rows"), line.get("settings", {})
        if not isinstance(meta, dict) or not _are_rows(rows) or not isinstance(settings, dict):
            raise ValueError(f"{str(path)!r} is no results file: the cell {line.get('key')!r} has no rows and set-up")
        meta = {"command": line.get("command"), "model": line.get("model"), "dtype": line.get("dtype"), **meta}
        same = {key: value for key, value in meta.items() if key not in ("notes", "date")}
        group = groups.setdefault(
            json.dumps([line.get("evaluation"), same, settings], sort_keys=True, default=str),
            {"kind": _kind(meta, rows), "rows": [], "notes": [], "samples": [], "settings": settings, "dates": []},
        )
        group["meta"] = same
        group["rows"] += rows
        group["notes"] += _strings(meta.get("notes"))
        group["dates"].append(str(meta.get("date", "")))
        more = line.get("more")
        samples = more.get("samples") if isinstance(more, dict) else None
        group["samples"] += samples if _are_rows(samples) else []
    for group in groups.values():
        dates = sorted(date for date in set(group.pop("dates")) if date)
        if dates:
            group["meta"]["date"] = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        group["notes"] = tuple(dict.fromkeys(group["notes"] + problems))
        group["rows"], group["samples"] = tuple(group["rows"]), tuple(group["samples"])
    return list(groups.values())


def _kind(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    words = str(meta.get("command") or "").removeprefix("qkv ")
    for kind in KINDS:
        if f"{words} ".startswith(f"{kind} "):
            return kind
    for kind, keys in KINDS.items():
        if rows and all(key in rows[0] for key in keys):
            return kind
    return OTHER


def _are_rows(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
