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

A line is written in one go and flushed to the disk when its cell is finished. A last line that was cut, by a kill or by
a full disk, is found when the file is next opened, reported, and cut off; it was no finished cell.

What every figure is measured against, ``dynamic``, must come from the same run. Where turns are timed, all missing
cells of one (model, evaluation) therefore share one call; elsewhere each cell is a call of its own with its own
baseline, so that a kill costs one cell, and ``together: true`` saves the baseline's time instead.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from qkv.named_caches import UNQUANTIZED, named_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv_eval.peers import Progress

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

# Part of every key: to be raised when the same words come to mean another computation.
KEY_VERSION = 1
# How every line begins, which tells a line that was cut from a file that is something else.
_BEGINNING = b'{"key": "'
_REQUIRED = ("key", "model", "cache", "evaluation", "rows")
VERSIONS = ("version", "torch", "transformers", "python")
MACHINE = ("processor", "capability", "threads")


# ---- the evaluations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """How a sweep calls an evaluation. Nothing is imported before it is used.

    Attributes:
        command: the command that makes the same rows, such as ``eval ppl``; it says what kind of rows they are.
        run: ``module:function``; called by the names of its parameters with what it has of ``model``, ``tokenizer``,
            ``settings`` and ``progress``, it returns a mapping with ``rows``.
        settings: ``module:class`` of a dataclass.
        caches: the field of the settings that takes the names of caches.
        column: the key of a row that says which cache it is about.
        baseline: whether it gives rows of ``dynamic``, listed or not.
        timed: whether its figures are times.
    """

    command: str
    run: str
    settings: str
    caches: str = "formats"
    column: str = "format"
    baseline: bool = True
    timed: bool = False


_EVALUATIONS: dict[str, Evaluation] = {
    "compare": Evaluation("compare", "qkv_eval.compare:run", "qkv_eval.compare:CompareSettings", timed=True),
    "ppl": Evaluation("eval ppl", "qkv_eval.ppl:run", "qkv_eval.ppl:PplSettings"),
    "lm": Evaluation("eval lm", "qkv_eval.lm_compare:run", "qkv_eval.lm_compare:LmSettings"),
    "recall": Evaluation("eval recall", "qkv_eval.recall:run", "qkv_eval.recall:RecallSettings"),
    "layers": Evaluation("eval layers", "qkv_eval.layers:run", "qkv_eval.layers:LayersSettings", baseline=False),
    "decode": Evaluation(
        "bench decode",
        "qkv_eval.bench.decode:run",
        "qkv_eval.bench.decode:DecodeSettings",
        caches="caches",
        column="cache",
        timed=True,
    ),
    "prefill": Evaluation(
        "bench prefill",
        "qkv_eval.bench.prefill:run",
        "qkv_eval.bench.prefill:PrefillSettings",
        caches="caches",
        column="cache",
        timed=True,
    ),
    "memory": Evaluation(
        "bench memory",
        "qkv_eval.bench.memory:run",
        "qkv_eval.bench.memory:MemorySettings",
        caches="caches",
        column="cache",
        timed=True,  # no times, but peaks, which hold what each thread of this machine needs
    ),
    "kernel": Evaluation(
        "bench kernel",
        "qkv_eval.bench.kernel:run",
        "qkv_eval.bench.kernel:KernelSettings",
        baseline=False,
        timed=True,
    ),
}


def evaluations() -> tuple[str, ...]:
    """Returns the names of the evaluations that a sweep knows."""
    return tuple(_EVALUATIONS)


def register_evaluation(name: str, evaluation: Evaluation) -> None:
    """Adds an evaluation from outside under a new name.

    Raises:
        ValueError: the name is taken.
    """
    if name in _EVALUATIONS:
        raise ValueError(f"there is already an evaluation {name!r}; choose another name")
    _EVALUATIONS[name] = evaluation


def _load(what: str, evaluation: str) -> Any:
    module, _, attribute = what.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the evaluation {evaluation!r} cannot be used here: {error}") from error


# ---- what to do -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """One evaluation as a sweep's YAML file asks for it; ``together`` None: as suits the evaluation."""

    name: str
    settings: Mapping[str, Any]
    caches: tuple[str, ...]
    together: bool | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep's YAML file, read and checked as far as it can be without a model.

    Attributes:
        output: the results file.
        models: pairs of a name and a dtype.
        evaluations: what to run on each model.
        source: the YAML file, for messages.
    """

    output: Path
    models: tuple[tuple[str, str], ...]
    evaluations: tuple[Wanted, ...]
    source: str = ""


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


def read_sweep(path: str | Path, output: str | None = None) -> Sweep:
    """Reads a sweep from a YAML file.

    Args:
        path: the YAML file.
        output: a results file instead of the one that it names.

    Raises:
        ValueError: the file is missing or is no YAML, or something in it is missing, unknown or wrong. The message
            names the file.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the sweep {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return _check_sweep(content, output, str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_sweep(content: Any, output: str | None, source: str) -> Sweep:
    _check_keys("a sweep", content, ("output", "models", "dtype", "caches", "evaluations"))
    output = output or content.get("output")
    if not isinstance(output, str) or not output:
        raise ValueError("output must name the file for the results, such as results/sweep.jsonl")
    dtype = content.get("dtype", "float32")
    models = []
    for item in _items("models", content.get("models")):
        given = {"name": item} if isinstance(item, str) else item
        _check_keys("a model", given, ("name", "dtype"))
        models.append((_text("the name of a model", given.get("name")), _text("dtype", given.get("dtype", dtype))))
    common = _cache_list("caches", content["caches"]) if "caches" in content else None
    wanted = []
    for number, item in enumerate(_items("evaluations", content.get("evaluations"))):
        where = f"evaluations[{number}]"
        given = {"name": item} if isinstance(item, str) else item
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ValueError(f"{where} must be a name, or map names to values with one called name; found {item!r}")
        settings = dict(given)
        name, together = settings.pop("name", None), settings.pop("together", None)
        if name not in _EVALUATIONS:
            raise ValueError(f"{where}: unknown evaluation {name!r}; use one of {', '.join(_EVALUATIONS)}")
        if together is not None and not isinstance(together, bool):
            raise ValueError(f"{where}: together must be true or false, not {together!r}")
        own = _cache_list(f"{where}: caches", settings.pop("caches")) if "caches" in settings else common
        if own is None:
            raise ValueError(f"{where}: there are no caches; list them at the top, or here")
        try:
            make_settings(name, settings, own, 0)
        except ValueError as error:
            raise ValueError(f"{where} ({name}): {error}") from error
        wanted.append(Wanted(name, settings, own, together))
    return Sweep(Path(output), tuple(dict.fromkeys(models)), tuple(wanted), source)


def make_settings(evaluation: str, given: Mapping[str, Any], caches: Sequence[str], seed: int) -> Any:
    """Makes the settings of an evaluation from what a YAML file says.

    Args:
        evaluation: its name.
        given: settings by name; a list for a tuple, and a single value where a tuple is wanted, will do.
        caches: names of caches, as the evaluation takes them.
        seed: for settings with a seed, if ``given`` has none.

    Raises:
        ValueError: a setting that is unknown, missing, or of another type than its default.
    """
    entry = _EVALUATIONS[evaluation]
    kind = _load(entry.settings, evaluation)
    known = {field.name: field for field in fields(kind) if field.init}
    values: dict[str, Any] = {"seed": seed} if "seed" in known else {}
    for name, value in given.items():
        if name == entry.caches:
            raise ValueError(f"list the caches under 'caches', not under {name!r}")
        if name not in known:
            raise ValueError(
                f"unknown setting {name!r}; known settings: {', '.join(n for n in known if n != entry.caches)}"
            )
        values[name] = _fitting(known[name], value)
    for name, field in known.items():
        if name not in values and name != entry.caches and field.default is field.default_factory is MISSING:
            raise ValueError(f"the setting {name!r} is missing")
    return kind(**values, **{entry.caches: tuple(caches)})


def _fitting(field: Field[Any], value: Any) -> Any:
    """Returns a value from YAML in the type of a field's default; a default of None says nothing about the type."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if value is None and "None" in str(field.type):
        return None
    if isinstance(default, tuple):
        items = [_tuples(item) for item in value] if isinstance(value, list) else [value]
        if not items:
            raise ValueError(f"{field.name} is empty; give one value or a list")
        return tuple(_like(field.name, item, default[0]) if default else item for item in items)
    return _tuples(value) if default is MISSING or default is None else _like(field.name, value, default)


def _like(name: str, value: Any, example: Any) -> Any:
    """Returns a value of the type of an example: a whole number will do where the example has a fraction."""
    kinds: tuple[type, ...] = (int, float) if isinstance(example, float) else (type(example),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(example, bool)):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}
        raise ValueError(f"{name} must be {words.get(type(example), type(example).__name__)}, not {value!r}")
    return float(value) if isinstance(value, int) and isinstance(example, float) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _check_keys(what: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} maps names to values ({', '.join(known)}); found {type(value).__name__}")
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in {what}; known keys: {', '.join(known)}")


def _items(name: str, value: Any) -> list[Any]:
    if value is None or value == []:
        raise ValueError(f"{name} is missing or empty; give a list")
    return list(value) if isinstance(value, list) else [value]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text, not {value!r}")
    return value


def _cache_list(name: str, value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_text(f"each of {name}", item) for item in _items(name, value)))


# ---- cells and their keys -------------------------------------------------------------------------------------------


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
            entry = _EVALUATIONS[wanted.name]
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
    del settings[_EVALUATIONS[wanted.name].caches]
    return settings


def _key(
    evaluation: str, settings: Mapping[str, Any], model: Sequence[Any], cache: Any, setup: Mapping[str, Any]
) -> str:
    names = VERSIONS + (MACHINE if _EVALUATIONS[evaluation].timed else ())
    contents = {name: file_contents(value) for name, value in settings.items() if _is_path(value)}
    matters = {
        "key_version": KEY_VERSION,
        "evaluation": evaluation,
        "settings": {**settings, **contents},
        "model": model,
        "cache": cache,
        "setup": {name: setup.get(name) for name in names},
    }
    return hashlib.sha256(json.dumps(matters, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_identity(name: str) -> list[Any]:
    """What a model is: of a local one the contents of its files, wherever it lies; of one on the hub its name."""
    from qkv.models import find_model

    source = find_model(name)
    return [source] if isinstance(source, str) else file_contents(source)


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


def file_contents(path: str | Path) -> list[Any]:
    """Digests of a file, or of the files right in a folder with their names."""
    path = Path(path)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = []
    for each in files:
        try:
            with each.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"cannot read {str(each)!r}: {error.strerror}") from error
        found.append([each.name if path.is_dir() else "", digest])
    return found


# ---- the results file -----------------------------------------------------------------------------------------------


def read_results(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the finished cells of a results file, and leaves the file as it is.

    Returns:
        The rows, the last one of each key; and one line for each thing that was wrong: half-written or damaged lines
        are left out, and what is before and after them is read.

    Raises:
        ValueError: the file cannot be read, or is no results file of a sweep.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the results {str(path)!r}: {error.strerror}") from error
    lines, problems = _parse(str(path), content)
    return _last_of_each_key(row for row, _ in lines if row is not None), problems


def _parse(path: str, content: bytes) -> tuple[list[tuple[dict[str, Any] | None, bytes]], list[str]]:
    """Splits a results file into (row, or None if it is damaged; the line without its end)."""
    lines: list[tuple[dict[str, Any] | None, bytes]] = []
    problems = []
    raw = content.split(b"\n")
    for number, line in enumerate(raw, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            row = None
        if row is not None and not (isinstance(row, dict) and all(name in row for name in _REQUIRED)):
            raise ValueError(f"{path!r} is no results file of a sweep: line {number} is something else")
        if row is None and number == len(raw):
            problems.append(f"the last line of {path!r} is half-written and is left out ({len(line)} bytes)")
        elif row is None:
            problems.append(f"line {number} of {path!r} is damaged and is left out")
        lines.append((row, line))
    if lines and all(row is None for row, _ in lines):
        first = lines[0][1]
        if len(lines) > 1 or not (first.startswith(_BEGINNING) or _BEGINNING.startswith(first)):
            raise ValueError(f"{path!r} is no results file of a sweep: it holds no line of JSON with a cell")
    return lines, problems


def _last_of_each_key(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({row["key"]: row for row in rows}.values())


class ResultsFile:
    """The results file of a sweep, open for appending; use it as a context manager.

    Opening it repairs it: a half-written last line is cut off, and damaged lines elsewhere are moved into a file beside
    it, ``<name>.damaged``, so that pandas and duckdb can read what remains.

    Attributes:
        rows: the finished cells by key.
        problems: a line for each thing that was repaired.

    Raises:
        ValueError: the file cannot be written, is no results file of a sweep, or another sweep has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self.rows: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(path)
            self._repair()
        except OSError as error:
            self.close()
            raise ValueError(f"cannot write the results {str(path)!r}: {error.strerror}") from error
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, which lets another sweep open it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a finished cell, and returns when it is on the disk.

        Raises:
            ValueError: it cannot be written, because the disk is full for one. The file is as it was before.
            TypeError: there is something in the row that JSON has no word for.
        """
        finite = _finite(row)
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            _write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):  # if this fails too, the next sweep finds half a line and cuts it off
                os.ftruncate(self._file, end)
                os.fsync(self._file)
            advice = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to it"
            raise ValueError(
                f"cannot write the results {str(self.path)!r}: {error.strerror}; the {len(self.rows)} finished cells "
                f"in it are whole; {advice} and run the same command again"
            ) from error
        self.rows[finite["key"]] = finite

    def _repair(self) -> None:
        content = self.path.read_bytes()
        lines, self.problems = _parse(str(self.path), content)
        self.rows = {row["key"]: row for row, _ in lines if row is not None}
        damaged = [line for row, line in lines if row is None]
        is_open = bool(lines) and not content.endswith(b"\n")
        if is_open and lines[-1][0] is None:
            os.ftruncate(self._file, content.rfind(b"\n") + 1)
            damaged.pop()
        elif is_open:
            _write(self._file, b"\n")  # whole, but for the end of the line
        if damaged:
            self._move_away(damaged, [line for row, line in lines if row is not None])
        os.fsync(self._file)

    def _move_away(self, damaged: Sequence[bytes], whole: Sequence[bytes]) -> None:
        with self.path.with_name(f"{self.path.name}.damaged").open("ab") as file:
            file.writelines(line + b"\n" for line in damaged)
        repaired = self.path.with_name(f".{self.path.name}.writing")
        with repaired.open("wb") as file:
            file.writelines(line + b"\n" for line in whole)
            file.flush()
            os.fsync(file.fileno())
        repaired.replace(self.path)
        self.close()
        self._file = _open_locked(self.path)


def _open_locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"another sweep is writing to {str(path)!r}; wait for it, or use another output") from None
    except OSError:  # a file system without locks
        pass
    return file


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


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
    entry = _EVALUATIONS[first.evaluation]
    kind, call = _load(entry.settings, first.evaluation), _load(entry.run, first.evaluation)
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
    entry = _EVALUATIONS[first.evaluation]
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
