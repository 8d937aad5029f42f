"""Score a text through a cache, so that every prediction is made from the values that the cache really stores.

Three ways of scoring, and each row says which it had:

- ``chunked``: windows go through the model in chunks of a few hundred tokens. That is faithful where a pass over
  several tokens attends to their stored values, as ours do with ``qkv.enable``, and where nothing is quantized.
- ``stepwise``: token by token, as in generation. It is the truth for every cache and the only faithful way for
  transformers' quantized caches, whose ``update`` returns the tokens of the current pass unquantized: scored in one
  pass they would show no drift at all.
- ``prefill-exact``: a whole window in one pass whose tokens see each other unquantized. It says nothing about a cache;
  it is there to be seen beside the others, since it is what is often reported.

Which of the first two a cache gets is found out by trying it (see ``qkv_eval.faithful``), and ``chunked`` is refused
for a cache that it would flatter.

A cache that fixes its scales by its first update (``hf-fp8``) would be treated unfairly by an update of one token,
and unlike in use; so where a cache has to be scored stepwise, each window begins with a prompt in one pass, as in
generation, and the predictions within that prompt are left out for all caches: every row is over the same positions.

All caches of a run go forward together, chunk by chunk, next to an unquantized one; so the logits of a chunk are all
that is ever held, however long the windows are. The noise floor is the unquantized cache once more, in pieces of
another size and with another number of threads: what differs there is rounding.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument, named_cache
from qkv_eval.divergence import compare_predictions, token_losses
from qkv_eval.faithful import check_cache
from qkv_eval.peers import Progress, attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

SCORINGS = ("auto", "chunked", "stepwise", "prefill-exact")
NOISE_FLOOR = "noise floor"
# Tokens that a cache gets in one pass before it is scored token by token, where it cannot be scored in chunks.
PROMPT_TOKENS = 128
# Windows that go forward together where a cache is scored token by token.
STEPWISE_ROWS = 8
# Logits held for one chunk and cache: at most this many numbers.
_MOST_LOGITS = 1 << 25
# Into how many stretches of the context figures by position are cut.
STRETCHES = 8


@dataclass(frozen=True)
class Scores:
    """What each position of each window had, next to the unquantized cache in the same run.

    Attributes:
        losses: nats of the token that follows, float32 [windows, positions].
        divergence: KL(unquantized || this) in nats, float32 [windows, positions]; zero for the unquantized cache.
        same_top: whether both have the same likeliest next token, bool [windows, positions].
        scoring: ``chunked``, ``stepwise`` or ``prefill-exact``.
        first: the position of a window that the first of these positions is.
        seconds: taken by the model's passes.
    """

    losses: torch.Tensor
    divergence: torch.Tensor
    same_top: torch.Tensor
    scoring: str
    first: int = 0
    seconds: float = 0.0

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several groups of windows as one."""
        tensors = {
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if isinstance(getattr(parts[0], field.name), torch.Tensor)
        }
        seconds = sum(part.seconds for part in parts)
        return cls(**tensors, scoring=parts[0].scoring, first=parts[0].first, seconds=seconds)


@torch.inference_mode()
def score_caches(
    model: PreTrainedModel,
    windows: torch.Tensor,
    caches: Sequence[NamedCache],
    *,
    chunk: int = 256,
    scoring: str | Mapping[str, str] = "auto",
    noise_floor: bool = False,
    progress: Progress | None = None,
) -> dict[str, Scores]:
    """Scores windows of tokens through an unquantized cache and through each of ``caches``; leaves the model plain.

    Args:
        model: a causal language model.
        windows: int64 ``[windows, tokens]``; each is a text of its own, of which all tokens but the first are
            predicted.
        caches: what to score beside the unquantized cache.
        chunk: tokens of a window in one pass.
        scoring: one of ``SCORINGS`` for all caches, or for each by its name (``auto`` for those not named).
        noise_floor: whether to score the unquantized cache a second time, under the name ``NOISE_FLOOR``.
        progress: called with what is done, how many predictions so far, and how many in all.

    Returns:
        The scores by name, ``dynamic`` first.

    Raises:
        ValueError: the windows are longer than the model's limit, or have no positions left to score; or ``chunked``
            was asked for a cache that hides what it stores from a pass over several tokens.
    """
    check_context(model, windows.shape[1])
    contestants = [named_cache(UNQUANTIZED), *(cache for cache in caches if cache.name != UNQUANTIZED)]
    modes, needs_prompt = _modes(model, contestants, scoring)
    if noise_floor:
        plain = contestants[0]
        contestants.insert(1, NamedCache(NOISE_FLOOR, plain.make, plain.is_ours))
        modes[NOISE_FLOOR] = modes[UNQUANTIZED]
    prompt = PROMPT_TOKENS if needs_prompt else 0
    if windows.shape[1] < prompt + 2:
        raise ValueError(
            f"windows of {windows.shape[1]} tokens leave nothing to score after a prompt of {prompt}; "
            f"use windows of at least {prompt + 2}"
        )
    if "prefill-exact" in modes.values():
        chunk = windows.shape[1]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if "stepwise" in modes.values():
        # A step costs nearly the same for several windows: many in a short chunk, not few in a long one.
        chunk = max(1, min(chunk, _MOST_LOGITS // (min(len(windows), STEPWISE_ROWS) * vocabulary)))
    rows = max(1, min(len(windows), _MOST_LOGITS // (chunk * vocabulary)))
    parts: dict[str, list[Scores]] = {cache.name: [] for cache in contestants}
    try:
        for start in range(0, len(windows), rows):
            report = _counted(progress, start * (windows.shape[1] - 1), len(windows) * (windows.shape[1] - 1))
            group = _score_group(model, windows[start : start + rows], contestants, modes, chunk, prompt, report)
            for name, scores in group.items():
                parts[name].append(scores)
    finally:
        qkv.disable(model)
    return {name: Scores.joined(group) for name, group in parts.items()}


def summarize(scores: Scores, baseline: Scores, counted: torch.Tensor | None = None) -> dict[str, Any]:
    """Returns the figures of one cache, against those of ``baseline``.

    Args:
        scores, baseline: of one run.
        counted: bool ``[windows, positions]``, the positions to look at; None: all.

    Returns:
        ``scoring``, ``tokens`` (predictions), ``ppl``, ``ppl_stderr``, ``dppl_percent``, ``dppl_percent_stderr``,
        ``kld_mean``, ``kld_median``, ``kld_p99``, ``kld_p999``, ``kld_max`` (nats), ``same_top_percent`` and
        ``seconds``. ``ppl_stderr`` is the standard error of the perplexity from the spread of the losses, as if they
        were independent. ``dppl_percent`` is the change of the perplexity, and its standard error comes from the
        differences token by token, which are far less spread than the losses.
    """
    keep = torch.ones_like(scores.same_top) if counted is None else counted
    losses, expected = scores.losses[keep].double(), baseline.losses[keep].double()
    divergence = scores.divergence[keep].double()
    ppl, ratio = _exp(losses.mean()), _exp((losses - expected).mean())
    median, p99, p999 = np.quantile(divergence.numpy(), [0.5, 0.99, 0.999]).tolist()
    return {
        "scoring": scores.scoring,
        "tokens": len(losses),
        "ppl": ppl,
        "ppl_stderr": ppl * _standard_error(losses),
        "dppl_percent": 100 * (ratio - 1),
        "dppl_percent_stderr": 100 * ratio * _standard_error(losses - expected),
        "kld_mean": divergence.mean().item(),
        "kld_median": median,
        "kld_p99": p99,
        "kld_p999": p999,
        "kld_max": divergence.max().item(),
        "same_top_percent": 100 * scores.same_top[keep].double().mean().item(),
        "seconds": scores.seconds,
    }


def by_position(scores: Scores, baseline: Scores, counted: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """Returns figures for each of up to ``STRETCHES`` stretches of the context, since errors can grow with it.

    Args:
        scores, baseline, counted: as in :func:`summarize`.

    Returns:
        For each stretch ``from`` and ``to`` (positions in the window, ``to`` not included), ``tokens``, ``kld_mean``,
        ``same_top_percent`` and ``dppl_percent``.
    """
    keep = torch.ones_like(scores.same_top) if counted is None else counted
    positions = scores.losses.shape[1]
    edges = sorted({round(positions * i / STRETCHES) for i in range(STRETCHES + 1)})
    rows = []
    for begin, end in itertools.pairwise(edges):
        here = keep[:, begin:end]
        if not bool(here.any()):
            continue
        difference = (scores.losses[:, begin:end][here].double() - baseline.losses[:, begin:end][here].double()).mean()
        rows.append(
            {
                "from": scores.first + begin,
                "to": scores.first + end,
                "tokens": int(here.sum()),
                "kld_mean": scores.divergence[:, begin:end][here].double().mean().item(),
                "same_top_percent": 100 * scores.same_top[:, begin:end][here].double().mean().item(),
                "dppl_percent": 100 * (_exp(difference) - 1),
            }
        )
    return rows


def check_context(model: PreTrainedModel, tokens: int) -> None:
    """Raises ``ValueError`` if a text of so many tokens is beyond the model's limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{tokens} tokens are more than the model's {limit} positions; use a shorter window or context"
        )


def _modes(
    model: PreTrainedModel, contestants: Sequence[NamedCache], scoring: str | Mapping[str, str]
) -> tuple[dict[str, str], bool]:
    """How each cache is scored, and whether windows must begin with a prompt."""
    modes, needs_prompt = {}, False
    for cache in contestants:
        wanted = scoring if isinstance(scoring, str) else scoring.get(cache.name, "auto")
        if wanted not in SCORINGS:
            raise ValueError(f"unknown scoring {wanted!r}; use one of {', '.join(SCORINGS)}")
        if wanted == "prefill-exact":
            modes[cache.name] = wanted
            continue
        verdict = check_cache(model, cache)
        if wanted == "chunked" and not verdict.faithful:
            raise ValueError(
                f"the cache {cache.name!r} hides what it stores from a pass over several tokens (tried out: "
                f"{verdict.difference:.0%} of its error does not show), so 'chunked' would flatter it; use 'auto' or "
                "'stepwise'"
            )
        needs_prompt |= not verdict.faithful
        faithful = "chunked" if verdict.faithful else "stepwise"
        modes[cache.name] = faithful if wanted == "auto" else wanted
    if "prefill-exact" in modes.values() and needs_prompt:
        raise ValueError("'prefill-exact' scores whole windows: it does not go with a cache that needs a prompt first")
    return modes, needs_prompt


def _score_group(
    model: PreTrainedModel,
    windows: torch.Tensor,
    contestants: Sequence[NamedCache],
    modes: Mapping[str, str],
    chunk: int,
    prompt: int,
    report: Callable[[int], None],
) -> dict[str, Scores]:
    caches = {cache.name: _make(model, cache, modes[cache.name]) for cache in contestants}
    shape = (len(windows), windows.shape[1] - 1)
    losses = {name: torch.zeros(shape) for name in caches}
    divergence = {name: torch.zeros(shape) for name in caches}
    same_top = {name: torch.ones(shape, dtype=torch.bool) for name in caches}
    seconds = dict.fromkeys(caches, 0.0)
    edges = [0, prompt] if prompt else [0]
    edges += [*range(edges[-1] + chunk, shape[1], chunk), shape[1]]
    for begin, end in itertools.pairwise(edges):
        tokens, targets = windows[:, begin:end], windows[:, begin + 1 : end + 1]
        baseline = None
        for contestant in contestants:
            name = contestant.name
            attend_as_meant(model, contestant)
            singly = modes[name] == "stepwise" and begin >= prompt
            # A third of a chunk: edges fall elsewhere than those of the chunks.
            piece = 1 if singly else -(-tokens.shape[1] // 3) if name == NOISE_FLOOR else tokens.shape[1]
            started = time.perf_counter()
            with _other_threads() if name == NOISE_FLOOR else _same_threads():
                logits = _forward(model, tokens, caches[name], piece)
            seconds[name] += time.perf_counter() - started
            losses[name][:, begin:end] = token_losses(logits, targets)
            if baseline is None:
                baseline = logits
            else:
                drift = compare_predictions(baseline, logits)
                divergence[name][:, begin:end], same_top[name][:, begin:end] = drift
        report(end * len(windows))
    return {
        name: Scores(
            losses[name][:, prompt:],
            divergence[name][:, prompt:],
            same_top[name][:, prompt:],
            modes[name],
            prompt,
            seconds[name],
        )
        for name in caches
    }


def _make(model: PreTrainedModel, cache: NamedCache, mode: str) -> Cache:
    made = cache.make(model.config)
    if mode == "prefill-exact" and isinstance(made, qkv.QKVCache):
        return qkv.QKVCache(model.config, made.config, prefill="exact")
    return made


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, piece: int) -> torch.Tensor:
    """Logits of the tokens, ``piece`` of them in one pass."""
    parts = [
        model(input_ids=tokens[:, i : i + piece], **as_argument(cache), use_cache=True).logits
        for i in range(0, tokens.shape[1], piece)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@contextmanager
def _other_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _same_threads() -> Iterator[None]:
    yield


def _counted(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress is not None:
            progress("scoring the text", before + done, total)

    report(0)
    return report


def _standard_error(values: torch.Tensor) -> float:
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def _exp(value: torch.Tensor) -> float:
    try:
        return math.exp(value.item())
    except OverflowError:
        return math.inf
