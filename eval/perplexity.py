"""Score a text through a cache, so that every prediction is made from the values that the cache really stores.

Two ways of scoring, and each row says which it had:

- ``chunked``: windows go through the model in chunks of a few hundred tokens. That is faithful where a pass over
  several tokens attends to their stored values, as ours do with ``qkv.enable``, and where nothing is quantized.
- ``stepwise``: token by token, as in generation. It is the truth for every cache and the only faithful way for
  transformers' quantized caches, whose ``update`` returns the tokens of the current pass unquantized: scored in one
  pass they would show no drift at all.

A cache that fixes its scales by its first update (``hf-fp8``) would be treated unfairly by an update of one token,
and unlike in use; so a stepwise cache first gets a prompt in one pass, as in generation. If any cache in a run is
scored stepwise, the predictions within that prompt are left out for all of them: every row is over the same
positions.

All caches of a run go forward together, chunk by chunk, next to an unquantized one; so the logits of a chunk are all
that is ever held, however long the windows are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, named_cache
from qkv_eval.divergence import compare_predictions, token_losses
from qkv_eval.peers import Progress, attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

# Tokens that a stepwise cache gets in one pass before it is scored.
PROMPT_TOKENS = 128
# Logits held for one chunk and cache: at most this many numbers.
_MOST_LOGITS = 1 << 25


@dataclass(frozen=True)
class Scores:
    """What each position of each window had, next to the unquantized cache in the same run.

    Attributes:
        losses: nats of the token that follows, float32 [windows, positions].
        divergence: KL(unquantized || this) in nats, float32 [windows, positions]; zero for the unquantized cache.
        same_top: whether both have the same likeliest next token, bool [windows, positions].
        scoring: ``chunked`` or ``stepwise``.
    """

    losses: torch.Tensor
    divergence: torch.Tensor
    same_top: torch.Tensor
    scoring: str


@torch.inference_mode()
def score_caches(
    model: PreTrainedModel,
    windows: torch.Tensor,
    caches: Sequence[NamedCache],
    *,
    chunk: int = 256,
    progress: Progress | None = None,
) -> dict[str, Scores]:
    """Scores windows of tokens through an unquantized cache and through each of ``caches``; leaves the model plain.

    Args:
        model: a causal language model.
        windows: int64 ``[windows, tokens]``; each is a text of its own, of which all tokens but the first are
            predicted.
        caches: what to score beside the unquantized cache.
        chunk: tokens of a window in one pass.
        progress: called with what is done, how many predictions so far, and how many in all.

    Returns:
        The scores by name, ``dynamic`` first.

    Raises:
        ValueError: the windows are longer than the model's limit, or have no positions left to score.
    """
    check_context(model, windows.shape[1])
    contestants = [named_cache(UNQUANTIZED), *(cache for cache in caches if cache.name != UNQUANTIZED)]
    prompt = 0 if all(cache.attends_to_stored for cache in contestants) else PROMPT_TOKENS
    if windows.shape[1] < prompt + 2:
        raise ValueError(
            f"windows of {windows.shape[1]} tokens leave nothing to score after a prompt of {prompt}; "
            f"use windows of at least {prompt + 2}"
        )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows = max(1, min(len(windows), _MOST_LOGITS // (chunk * vocabulary)))
    parts: dict[str, list[Scores]] = {cache.name: [] for cache in contestants}
    for start in range(0, len(windows), rows):
        report = _counted(progress, start * (windows.shape[1] - 1), len(windows) * (windows.shape[1] - 1))
        group = _score_group(model, windows[start : start + rows], contestants, chunk, prompt, report)
        for name, scores in group.items():
            parts[name].append(scores)
    qkv.disable(model)
    return {
        name: Scores(
            torch.cat([part.losses for part in group]),
            torch.cat([part.divergence for part in group]),
            torch.cat([part.same_top for part in group]),
            group[0].scoring,
        )
        for name, group in parts.items()
    }


def summarize(scores: Scores, baseline: Scores) -> dict[str, Any]:
    """Returns the figures of one cache, against those of ``baseline``.

    Returns:
        ``scoring``, ``tokens`` (predictions), ``ppl``, ``ppl_stderr``, ``dppl_percent``, ``dppl_percent_stderr``,
        ``kld_mean`` (nats) and ``same_top_percent``. ``ppl_stderr`` is the standard error of the perplexity from the
        spread of the losses, as if they were independent. ``dppl_percent`` is the change of the perplexity, and its
        standard error comes from the differences token by token, which are far less spread than the losses.
    """
    losses, expected = scores.losses.double().flatten(), baseline.losses.double().flatten()
    tokens = len(losses)
    ppl, ratio = _exp(losses.mean()), _exp((losses - expected).mean())
    return {
        "scoring": scores.scoring,
        "tokens": tokens,
        "ppl": ppl,
        "ppl_stderr": ppl * _standard_error(losses),
        "dppl_percent": 100 * (ratio - 1),
        "dppl_percent_stderr": 100 * ratio * _standard_error(losses - expected),
        "kld_mean": scores.divergence.double().mean().item(),
        "same_top_percent": 100 * scores.same_top.double().mean().item(),
    }


def check_context(model: PreTrainedModel, tokens: int) -> None:
    """Raises ``ValueError`` if a text of so many tokens is beyond the model's limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{tokens} tokens are more than the model's {limit} positions; use a shorter window or context"
        )


def _score_group(
    model: PreTrainedModel,
    windows: torch.Tensor,
    contestants: Sequence[NamedCache],
    chunk: int,
    prompt: int,
    report: Callable[[int], None],
) -> dict[str, Scores]:
    caches = {cache.name: cache.make(model.config) for cache in contestants}
    shape = (len(windows), windows.shape[1] - 1)
    scores = {
        cache.name: Scores(
            torch.zeros(shape),
            torch.zeros(shape),
            torch.ones(shape, dtype=torch.bool),
            "chunked" if cache.attends_to_stored else "stepwise",
        )
        for cache in contestants
    }
    edges = [0, prompt] if prompt else [0]
    edges += [*range(edges[-1] + chunk, shape[1], chunk), shape[1]]
    for begin, end in itertools.pairwise(edges):
        tokens, targets = windows[:, begin:end], windows[:, begin + 1 : end + 1]
        baseline = None
        for contestant in contestants:
            cache = caches[contestant.name]
            attend_as_meant(model, contestant)
            one_pass = contestant.attends_to_stored or begin < prompt
            logits = _forward(model, tokens, cache) if one_pass else _forward_stepwise(model, tokens, cache)
            part = scores[contestant.name]
            part.losses[:, begin:end] = token_losses(logits, targets)
            if baseline is None:
                baseline = logits
            else:
                part.divergence[:, begin:end], part.same_top[:, begin:end] = compare_predictions(baseline, logits)
        report(end * len(windows))
    return {
        name: Scores(part.losses[:, prompt:], part.divergence[:, prompt:], part.same_top[:, prompt:], part.scoring)
        for name, part in scores.items()
    }


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    return model(input_ids=tokens, past_key_values=cache, use_cache=True).logits


def _forward_stepwise(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    return torch.cat([_forward(model, tokens[:, i : i + 1], cache) for i in range(tokens.shape[1])], dim=1)


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
