"""``qkv eval sweep``: models x caches x evaluations from a YAML file, resumable after a kill.

The YAML file::

    output: results/smollm2.jsonl            # lines are appended to it
    models: [smollm2]                        # names for --model, or {name: ..., dtype: ...}
    dtype: float32                           # of models that do not say their own
    caches: [int8, fp8_e4m3, configs/int8_sinks.yaml]
    evaluations:
      - name: ppl                            # a name of evaluations(); the rest are its settings
        window: 2048
        limit: 4
      - name: decode
        context: [128, 4096]
        caches: [none, int8]                 # instead of the caches above
        together: true                       # all missing caches in one call

Paths in it are relative to the current folder. A cell is one cache under one evaluation of one model. Its key is a
digest of everything that its figures depend on: what the model's files and the cache's set-up contain, all settings
with their defaults, the versions of qkv, torch, transformers and Python, and for timings the processor and threads.

The output has one JSON object on a line for each finished cell: ``key``, ``model``, ``dtype``, ``cache``,
``evaluation``, ``command``, ``settings``, ``seconds`` (of the call that made it), ``rows`` (as the evaluation gave
them), ``meta`` (the set-up), and, where there is a single row, its figures once more as columns beside them. So::

    pandas.read_json("smollm2.jsonl", lines=True)[["model", "cache", "evaluation", "ppl", "kld_mean"]]
    duckdb: select model, cache, unnest(rows, recursive := true) from read_json_auto('smollm2.jsonl')

What every figure is measured against, ``dynamic``, must come from the same run. Where turns are timed, all missing
cells of one (model, evaluation) therefore share one call; elsewhere each cell is a call of its own with its own
baseline, so that a kill costs one cell, and ``together: true`` saves the baseline's time instead.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.named_caches import UNQUANTIZED, named_cache
from qkv_eval.keys import file_contents, make_key, model_identity
from qkv_eval.results_file import ResultsFile
from qkv_eval.sweep_config import Sweep, Wanted, find_evaluation, load_part, make_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv_eval.peers import Progress

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

# Part of every key: to be raised when the same words come to mean another computation.
KEY_VERSION = 1


# ---- cells and their keys -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cache under one evaluation of one model.

    Attributes:
        key: digest of everything that its figures depend on.
        cache: the name that tables show.
        cache_given: the name or path that makes the cache.
        settings: all settings of the evaluation but the caches.
        together: whether it may share a call with other cells.
        identity: the model as keys see it: what is in its files, and the dtype.
    """

    key: str
    model: str
    dtype: str
    cache: str
    cache_given: str
    evaluation: str
    settings: Mapping[str, Any]
    together: bool
    identity: tuple[Any, ...] = ()

    @property
    def title(self) -> str:
        """The cell in words."""
        return f"{self.model}, {self.evaluation}, {self.cache}"


def plan(sweep: Sweep, setup: Mapping[str, Any], seed: int = 0) -> list[Cell]:
    """Returns the cells of a sweep in the order in which they are computed.

    Args:
        sweep: what to do.
        setup: versions and machine, as ``qkv.cli.run.describe_setup`` gives them.
        seed: for evaluations that have one and are given none.

    Raises:
        ValueError: there is no such model, dtype or cache, or two caches would be shown under one name.
    """
    from qkv.models import check_dtype
    from qkv_eval.peers import with_baseline

    for wanted in sweep.evaluations:
        with_baseline(wanted.caches)
    cells: dict[str, Cell] = {}
    for model, dtype in sweep.models:
        check_dtype(dtype)
        identity = (*model_identity(model), dtype)
        for wanted in sweep.evaluations:
            entry = find_evaluation(wanted.name)
            settings = _without_caches(wanted, seed)
            together = entry.timed if wanted.together is None else wanted.together
            for given in wanted.caches:
                if given == UNQUANTIZED and not entry.baseline:
                    continue
                key = _key(wanted.name, settings, identity, _cache_identity(given), setup)
                shown = named_cache(given).name
                cells.setdefault(key, Cell(key, model, dtype, shown, given, wanted.name, settings, together, identity))
    return list(cells.values())


def _without_caches(wanted: Wanted, seed: int) -> dict[str, Any]:
    settings = asdict(make_settings(wanted.name, wanted.settings, wanted.caches, seed))
    del settings[find_evaluation(wanted.name).caches]
    return settings


def _key(
    evaluation: str, settings: Mapping[str, Any], model: Sequence[Any], cache: Any, setup: Mapping[str, Any]
) -> str:
    contents = {name: file_contents(value) for name, value in settings.items() if _is_path(value)}
    facts = {
        "key_version": KEY_VERSION,
        "evaluation": evaluation,
        "settings": {**settings, **contents},
        "model": model,
        "cache": cache,
    }
    return make_key(facts, setup, timed=find_evaluation(evaluation).timed)


def _cache_identity(given: str) -> Any:
    """What a cache is: of a set-up file its contents, and those of the file with its scales."""
    if not given.endswith((".yaml", ".yml")):
        return given
    import qkv

    values = qkv.CacheConfig.from_yaml(given).to_dict()
    if _is_path(values.get("scales")):
        values["scales"] = file_contents(values["scales"])
    # The name that tables show is part of the row.
    return [named_cache(given).name, values]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and Path(value).exists()


# ---- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a sweep.

    Attributes:
        cells: all cells of the sweep.
        rows: the finished ones as the results file has them, by key.
        computed: keys of the cells that this run computed.
        failed: what the evaluation said, by key, of cells that it gave no result for.
    """

    cells: list[Cell]
    rows: dict[str, dict[str, Any]]
    computed: set[str]
    failed: dict[str, str]


def run(
    sweep: Sweep,
    load_model: Callable[[str, str], Loaded],
    *,
    setup: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Outcome:
    """Computes the cells of a sweep that its results file does not have yet.

    A model is loaded when a cell of it is missing. A cell that fails is told through ``warn`` and left out, the others
    go on, and the next run tries it again; with QKV_DEBUG set, the error ends the run.

    Args:
        sweep: what to do.
        load_model: called with a name and a dtype.
        setup: what figures depend on, for ``meta``; None: as ``qkv.cli.run.describe_setup`` finds it.
        seed: for evaluations that have one and are given none.
        progress: called with what is done, how much of it, and how much it is in all.
        warn: called with a line that a reader of the figures should know.

    Raises:
        ValueError: no such model, dtype or cache, or the results file cannot be used or written.
    """
    if setup is None:
        from qkv.cli.run import describe_setup

        setup = describe_setup()
    cells = plan(sweep, setup, seed)
    outcome = Outcome(cells, {}, set(), {})
    report = progress or (lambda what, done, total: None)
    tell = warn or (lambda line: None)
    with ResultsFile(sweep.output) as results:
        for problem in results.problems:
            tell(problem)
        missing = [cell for cell in cells if cell.key not in results.rows]
        total = len(missing)
        if total:
            report("cells of the sweep", 0, total)
        loaded: tuple[tuple[str, str], Loaded] | None = None
        while missing:
            group = _next_group(missing)
            missing = [cell for cell in missing if cell not in group]
            wanted = group[0].model, group[0].dtype
            try:
                if loaded is None or loaded[0] != wanted:
                    loaded = None  # the last model is let go before the next one comes
                    loaded = wanted, load_model(*wanted)
                begin = time.perf_counter()
                result = _evaluate(group, loaded[1], progress)
                lines = _lines(group, result, time.perf_counter() - begin, setup)
                json.dumps(lines)  # what cannot be written is the evaluation's failure too
            except Exception as error:  # an evaluation's failure is a finding, and no reason to lose a night
                if os.environ.get("QKV_DEBUG"):
                    raise
                for cell in group:
                    outcome.failed[cell.key] = _first_line(error)
                    tell(f"{cell.title}: failed: {_first_line(error)}")
            else:
                for line in lines:
                    if line["key"] not in results.rows:
                        results.append(line)
                        outcome.computed.add(line["key"])
                for cell in group:
                    if cell.key not in results.rows:
                        outcome.failed[cell.key] = "the evaluation gave no row for this cache"
                        tell(f"{cell.title}: {outcome.failed[cell.key]}")
                missing = [cell for cell in missing if cell.key not in results.rows]
            report("cells of the sweep", total - len(missing), total)
        outcome.rows = {cell.key: results.rows[cell.key] for cell in cells if cell.key in results.rows}
    return outcome


def _next_group(missing: Sequence[Cell]) -> list[Cell]:
    """Returns the cells that are computed by the next call: one, or all that may share it."""
    first = missing[0]
    if not first.together:
        # The baseline comes along with any other cell, so a call for it alone would be wasted.
        others = [cell for cell in missing if _same_call(cell, first) and cell.cache_given != UNQUANTIZED]
        return others[:1] or [first]
    return [cell for cell in missing if _same_call(cell, first)]


def _same_call(one: Cell, other: Cell) -> bool:
    return (one.model, one.dtype, one.evaluation, one.settings) == (
        other.model,
        other.dtype,
        other.evaluation,
        other.settings,
    )


def _evaluate(group: Sequence[Cell], loaded: Loaded, progress: Progress | None) -> Mapping[str, Any]:
    first = group[0]
    entry = find_evaluation(first.evaluation)
    kind, call = load_part(entry.settings, first.evaluation), load_part(entry.run, first.evaluation)
    settings = kind(**first.settings, **{entry.caches: tuple(cell.cache_given for cell in group)})
    offered = {"model": loaded[0], "tokenizer": loaded[1], "settings": settings, "progress": progress}
    accepted = inspect.signature(call).parameters
    result: Mapping[str, Any] = call(**{name: value for name, value in offered.items() if name in accepted})
    return result


def _lines(
    group: Sequence[Cell], result: Mapping[str, Any], seconds: float, setup: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Turns the result of one call into lines of the results file: its cells', and what came along with them.

    What comes along, such as the baseline's rows, belongs to no cell of the group; its key is made from its name in
    tables, as that of a cell with that name would be.
    """
    first = group[0]
    entry = find_evaluation(first.evaluation)
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row[entry.column], []).append(row)
    cells = {cell.cache: cell for cell in group}
    meta = {**setup, "command": entry.command, "model": first.model, "dtype": first.dtype}
    meta.update((name, result[name]) for name in ("text", "notes") if name in result)
    more = {name: value for name, value in result.items() if name not in ("rows", "text", "notes")}
    lines = []
    # The baseline first: a kill between two lines of one call then leaves what the others are measured against.
    for cache in sorted(rows, key=lambda name: name in cells):
        cell = cells.get(cache)
        line: dict[str, Any] = {
            "key": cell.key if cell else _key(first.evaluation, first.settings, first.identity, cache, setup),
            "model": first.model,
            "dtype": first.dtype,
            "cache": cache,
            "evaluation": first.evaluation,
            "command": entry.command,
            "settings": dict(first.settings),
            "seconds": seconds,
            "rows": rows[cache],
            "meta": meta,
        }
        about = {name: _about(cache, value, entry.column) for name, value in more.items()}
        if about:
            line["more"] = about
        if len(rows[cache]) == 1:
            line.update(
                (name, value)
                for name, value in rows[cache][0].items()
                if name not in line and isinstance(value, (str, int, float, type(None)))
            )
        lines.append(line)
    return lines


def _about(cache: str, value: Any, column: str) -> Any:
    """Of a list about several caches, returns what is about this one."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and column in item for item in value):
        return [item for item in value if item[column] == cache]
    return value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
