"""``qkv eval lm``: tasks of lm-eval through each cache, and which documents were answered otherwise.

Equal accuracy can hide many changed answers, those that become right balancing those that become wrong. So next to the
accuracy and its standard error each row says how many documents changed, in both directions, and McNemar's exact test
of whether the two directions differ by more than chance.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv_eval.lm_tasks import INSTALL, check_installed, load_tasks, quiet
from qkv_eval.peers import Progress, with_baseline

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv_eval.lm import QKVLM

TASK_NAMES = ("arc_easy", "piqa", "lambada_openai")
# Draws for the standard error of a metric that is not a mean.
_DRAWS = 200


@dataclass(frozen=True)
class LmSettings:
    """Which tasks to do through which caches.

    Attributes:
        formats: caches beside ``dynamic``, the baseline.
        tasks: see ``qkv_eval.lm_tasks.load_tasks``.
        data: the folder with the files of our own tasks; None: all tasks are lm-eval's.
        limit: the first documents of each task; None: all.
        batch: continuations, or texts to write, in one pass.
        seed: of the choice of examples that some tasks show, and of the draws for standard errors.
    """

    formats: tuple[str, ...] = ("none", "int8", "fp8_e4m3")
    tasks: tuple[str, ...] = TASK_NAMES
    data: str | None = None
    limit: int | None = 300
    batch: int = 32
    seed: int = 0


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: LmSettings,
    progress: Progress | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Does tasks of lm-eval through each cache; the first, ``dynamic``, is what the others are held against.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer; the model is left plain.
        settings: what to do.
        progress: called with what is being done, how much of it is done, and how much in all.
        tasks: the loaded tasks; None: they are loaded.

    Returns:
        ``rows``, one for each task, metric and cache, in this order, with

        - ``format``, ``task``, ``metric`` (with lm-eval's filter, where a task has several), ``n`` (documents),
          ``scoring`` (``chunked`` or ``stepwise``, see ``qkv_eval.lm``),
        - ``value``, ``stderr``: the metric and its standard error,
        - ``baseline``, ``drift``, ``drift_stderr``: the baseline's value, the difference from it, and the difference's
          standard error over documents, which is smaller than that of two values on different documents would be,
        - ``answers_changed``: documents with another answer than the baseline's, a wrong one for a wrong one included
          where the task shows what was answered,
        - ``to_right``, ``to_wrong``: documents that became right and that became wrong,
        - ``mcnemar_p``: the two-sided p-value of the exact test that both are equally likely.

        The last four are None for a metric that is not right or wrong for each document. Also ``seconds`` by cache,
        and ``notes``, lines that a reader of the figures should know.

    Raises:
        ValueError: lm-eval or scipy is missing, an unknown cache or task, data that are not as they should be, or an
            encoder-decoder model.
    """
    caches = with_baseline(settings.formats)
    check_statistics()
    loaded = tasks if tasks is not None else load_tasks(settings.tasks, settings.data, settings.seed)

    from qkv_eval.lm import QKVLM

    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    seconds: dict[str, float] = {}
    baseline: dict[Any, _Outcome] = {}
    for cache in caches:
        with _hushed(progress) as report:
            lm = QKVLM(model, cache, report, settings.batch, tokenizer=tokenizer)
            began = time.perf_counter()
            try:
                outcomes = _evaluate(lm, loaded, settings.limit)
            except RuntimeError as error:
                if cache.is_ours or not baseline:
                    raise
                # HQQ's 4 bits, for one, refuse an odd number of groups: a finding, and no reason to lose the rest.
                notes.append(f"{cache.name} failed: {str(error).strip().splitlines()[0]}")
                continue
            seconds[cache.name] = time.perf_counter() - began
        if not baseline:
            baseline = outcomes
            if lm.shortened:
                notes.append(f"{lm.shortened} contexts were longer than the model's limit and lost their beginning")
        for key, outcome in outcomes.items():
            compared = compare(outcome, baseline[key], settings.seed)
            rows.append({"format": cache.name, "task": key[0], "metric": key[1], "scoring": lm.scoring, **compared})
    order = {key: place for place, key in enumerate(baseline)}
    rows.sort(key=lambda row: order[row["task"], row["metric"]])
    for task in dict.fromkeys(row["task"] for row in rows):
        count = next(row["n"] for row in rows if row["task"] == task)
        if settings.limit is not None and count < settings.limit:
            notes.append(f"the task {task} has {count} documents, not {settings.limit}")
    return {"rows": rows, "notes": notes, "seconds": seconds}


def check_statistics() -> None:
    """Raises ``ValueError`` unless lm-eval and scipy are installed; the message says how to get them."""
    check_installed()
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise ValueError(f"this evaluation needs the package scipy; run: {INSTALL}") from error


@dataclass(frozen=True)
class _Outcome:
    """One metric of one task through one cache.

    Attributes:
        value: of the metric over all documents.
        values: of each document, as ``aggregate`` takes them.
        answers: of each document; None where the task does not show them.
        aggregate: makes ``value`` out of ``values``; None if it is not known.
        is_mean: whether that is the mean.
    """

    value: float
    values: Sequence[Any]
    answers: Sequence[Any] | None
    aggregate: Callable[[Sequence[Any]], float] | None
    is_mean: bool


def _evaluate(lm: QKVLM, tasks: Mapping[str, Any], limit: int | None) -> dict[tuple[str, str], _Outcome]:
    """Returns the outcomes by task and metric."""
    import lm_eval
    from lm_eval.api.metrics import mean

    # bootstrap_iters=0: lm-eval would start processes for standard errors, next to the threads of torch.
    results = lm_eval.evaluate(lm=lm, task_dict=dict(tasks), limit=limit, bootstrap_iters=0, log_samples=True)
    outcomes = {}
    for name, task in tasks["tasks"].items():
        aggregations = task.aggregation()
        for key, value in results["results"][name].items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            samples = [sample for sample in results["samples"][name] if sample["filter"] == chosen and metric in sample]
            if not samples:
                continue
            samples.sort(key=lambda sample: sample["doc_id"])
            aggregate = aggregations.get(metric)
            shown = metric if chosen == "none" else f"{metric},{chosen}"
            answers = [answer_of(task, sample, metric) for sample in samples]
            outcomes[name, shown] = _Outcome(
                float(value),
                [sample[metric] for sample in samples],
                None if any(answer is None for answer in answers) else answers,
                aggregate,
                aggregate is mean,
            )
    return outcomes


def answer_of(task: Any, sample: Mapping[str, Any], metric: str) -> Any:
    """Returns what was answered in one of lm-eval's samples: the place of a choice, or a text; None: not shown.

    Args:
        task: the task, as lm-eval loads it.
        sample: one entry of ``results["samples"]``.
        metric: says which choice counts as the answer: the likeliest, or by its length in characters (``acc_norm``) or
            bytes (``acc_bytes``).
    """
    given = sample["filtered_resps"]
    if task.OUTPUT_TYPE == "generate_until":
        return str(given[0]) if given else None
    if task.OUTPUT_TYPE != "multiple_choice" or metric not in ("acc", "acc_norm", "acc_bytes"):
        return None
    choices = task.doc_to_choice(sample["doc"])
    scores = np.array([score[0] for score in given[: len(choices)]])
    if metric == "acc_norm":
        scores = scores / np.array([len(choice) for choice in choices])
    elif metric == "acc_bytes":
        scores = scores / np.array([len(choice.encode()) for choice in choices])
    return int(scores.argmax())


def compare(outcome: _Outcome, baseline: _Outcome, seed: int = 0) -> dict[str, Any]:
    """Returns the figures of a row, see ``run``; both outcomes are over the same documents in the same order."""
    result: dict[str, Any] = {
        "value": outcome.value,
        "stderr": _standard_error(outcome, None, seed),
        "baseline": baseline.value,
        "drift": outcome.value - baseline.value,
        "drift_stderr": _standard_error(outcome, baseline, seed),
        **dict.fromkeys(("answers_changed", "to_right", "to_wrong", "mcnemar_p")),
        "n": len(outcome.values),
    }
    if all(_is_right_or_wrong(value) for value in (*outcome.values, *baseline.values)):
        now, before = np.array(outcome.values, dtype=bool), np.array(baseline.values, dtype=bool)
        changed = now != before
        if outcome.answers is not None and baseline.answers is not None:
            changed |= [a != b for a, b in zip(outcome.answers, baseline.answers, strict=True)]
        to_right, to_wrong = int((now & ~before).sum()), int((~now & before).sum())
        result.update(
            answers_changed=int(changed.sum()),
            to_right=to_right,
            to_wrong=to_wrong,
            mcnemar_p=mcnemar(to_right, to_wrong),
        )
    return result


def mcnemar(to_right: int, to_wrong: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test.

    The documents that changed sides are draws of a fair coin, if the cache makes neither direction likelier.
    """
    from scipy.stats import binomtest

    changed = to_right + to_wrong
    return float(binomtest(to_right, changed).pvalue) if changed else 1.0


def _is_right_or_wrong(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.bool_, np.number)) and value in (0, 1)


def _standard_error(outcome: _Outcome, baseline: _Outcome | None, seed: int) -> float | None:
    """The standard error of a value, or of its difference from the baseline's, from the spread over documents."""
    count = len(outcome.values)
    if outcome.aggregate is None or count < 2:
        return None
    if outcome.is_mean:
        numbers = np.array(outcome.values, dtype=float)
        if baseline is not None:
            numbers = numbers - np.array(baseline.values, dtype=float)
        return float(numbers.std(ddof=1) / math.sqrt(count))
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        places = generator.integers(count, size=count)
        value = outcome.aggregate([outcome.values[place] for place in places])
        if baseline is not None:
            value -= outcome.aggregate([baseline.values[place] for place in places])
        drawn.append(value)
    return float(np.std(drawn, ddof=1))


@contextmanager
def _hushed(progress: Progress | None) -> Iterator[Progress | None]:
    """Keeps lm-eval from writing, while ``progress`` and the warnings of Python still come through."""
    import sys

    outer = sys.stderr

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            with redirect_stderr(outer):
                progress(what, done, total)

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        with redirect_stderr(outer):
            was(message, category, filename, lineno)

    with warnings.catch_warnings():
        was = warnings.showwarning
        warnings.showwarning = show  # type: ignore[assignment]
        with quiet():
            yield report if progress is not None else None
