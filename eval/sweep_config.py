"""What a sweep is told to do: the evaluations it knows, and its YAML file, read and checked.

``qkv_eval.sweep`` shows what such a file looks like.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from qkv_eval.yaml_file import read_yaml

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


def find_evaluation(name: str) -> Evaluation:
    """Returns the evaluation of a name that :func:`evaluations` has."""
    return _EVALUATIONS[name]


def load_part(what: str, evaluation: str) -> Any:
    """Imports what an evaluation names as ``module:attribute``.

    Raises:
        ValueError: there is no such thing.
    """
    module, _, attribute = what.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the evaluation {evaluation!r} cannot be used here: {error}") from error


# ---- the YAML file --------------------------------------------------------------------------------------------------


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


def read_sweep(path: str | Path, output: str | None = None) -> Sweep:
    """Reads a sweep from a YAML file.

    Args:
        path: the YAML file.
        output: a results file instead of the one that it names.

    Raises:
        ValueError: the file is missing or is no YAML, or something in it is missing, unknown or wrong. The message
            names the file.
    """
    content = read_yaml(path, "sweep")
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
    entry = find_evaluation(evaluation)
    kind = load_part(entry.settings, evaluation)
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
