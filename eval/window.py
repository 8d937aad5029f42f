"""Perplexity of a text much longer than the cache: whether a model that forgets the middle goes on to work.

The text goes through the model once, block by block, into a cache with ``on_full="window"``, and the perplexity of
each block is given. Beside it stand the same window without its first tokens, which is what goes wrong; the whole text
in the cache, as far as the model has positions; and what a window is worth at best: for every few tokens the model
reads the last ones anew, with nothing of what was before (``recomputed``), which takes many times as long. Texts are
easier here and harder there, so whether a window holds is seen in its ratio to the last of these.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv_eval.divergence import token_losses
from qkv_eval.peers import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WAYS = ("window", "no-sinks", "recomputed", "whole")


@dataclass(frozen=True)
class WindowSettings:
    """What to measure.

    Attributes:
        text: what to score.
        ways: of :data:`WAYS`.
        format: of the cache.
        window: tokens that stay beside the first ones.
        sinks: how many of the first tokens stay.
        tokens: of the text to score.
        block: tokens that a figure is given for.
        chunk: tokens in one pass.
        stride: tokens that are scored in one pass of ``recomputed``, at most those of the window.
    """

    text: str
    ways: tuple[str, ...] = WAYS
    format: str = "int8"
    window: int = 512
    sinks: int = 4
    tokens: int = 5120
    block: int = 512
    chunk: int = 128
    stride: int = 64


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: WindowSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores a text in each way; leaves the model with qkv's attention switched off.

    Returns:
        ``rows``, one for each way: ``way, window, sinks, tokens, ppl, blocks`` (perplexity of each block),
        ``over_recomputed`` (of the second half of the blocks, over those of ``recomputed``; None where it was not
        measured), ``kv_bytes`` (None for ``recomputed``) and ``seconds``.

    Raises:
        ValueError: an unknown way, or a text that is too short.
    """
    for way in settings.ways:
        if way not in WAYS:
            raise ValueError(f"{way!r} is not known; use some of {', '.join(WAYS)}")
    ids = torch.tensor(tokenizer(settings.text)["input_ids"][: settings.tokens + 1])[None]
    if settings.tokens < 2 * settings.block:
        raise ValueError(f"tokens={settings.tokens} must be two blocks (block={settings.block}) at least")
    if ids.shape[1] <= settings.tokens:
        raise ValueError(f"the text has {ids.shape[1]} tokens; more than tokens={settings.tokens} are needed")
    limit = getattr(model.config, "max_position_embeddings", None)
    rows: list[dict[str, Any]] = []
    for done, way in enumerate(settings.ways):
        if progress is not None:
            progress(f"scoring: {way}", done, len(settings.ways))
        began = time.perf_counter()
        whole = min(settings.tokens, limit or settings.tokens)
        losses, size = _score(model, ids if way != "whole" else ids[:, : whole + 1], way, settings)
        blocks = [math.exp(part.double().mean()) for part in losses.split(settings.block)]
        rows.append(
            {
                "way": way,
                "format": settings.format,
                "window": settings.window,
                "sinks": 0 if way != "window" else settings.sinks,
                "tokens": len(losses),
                "ppl": math.exp(losses.double().mean()),
                "blocks": blocks,
                "kv_bytes": size,
                "seconds": time.perf_counter() - began,
            }
        )
    qkv.disable(model)
    best = next((row["blocks"] for row in rows if row["way"] == "recomputed"), None)
    for row in rows:
        late = range(len(row["blocks"]) // 2, len(row["blocks"]))
        logs = [math.log(row["blocks"][i] / best[i]) for i in late] if best is not None else []
        row["over_recomputed"] = math.exp(sum(logs) / len(logs)) if logs else None
    return {"rows": rows}


def _score(model: PreTrainedModel, ids: torch.Tensor, way: str, settings: WindowSettings) -> tuple[torch.Tensor, Any]:
    """Nats of each token that follows, float32 ``[tokens]``, and the bytes of the cache."""
    qkv.enable(model)
    if way == "recomputed":
        return torch.cat(list(_recomputed(model, ids, settings))), None
    options: dict[str, Any] = {}
    if way != "whole":
        sinks = settings.sinks if way == "window" else 0
        options = {"on_full": "window", "max_tokens": settings.window + sinks, "sink_tokens": sinks}
    cache = qkv.QKVCache(model.config, settings.format, **options)
    found = []
    for start in range(0, ids.shape[1] - 1, settings.chunk):
        piece = ids[:, start : start + settings.chunk + 1]
        logits = model(piece[:, :-1], past_key_values=cache).logits
        found.append(token_losses(logits, piece[:, 1:])[0])
    return torch.cat(found), cache.nbytes()


def _recomputed(model: PreTrainedModel, ids: torch.Tensor, settings: WindowSettings) -> Iterator[torch.Tensor]:
    """Losses where the model reads the last tokens anew: each has from ``window - stride`` to ``window`` before it."""
    total, stride = ids.shape[1] - 1, min(settings.stride, settings.window)
    for start in range(0, total, stride):
        end = min(start + stride, total)
        first = max(0, end - settings.window)
        logits = model(ids[:, first:end], use_cache=False, logits_to_keep=end - start).logits
        yield token_losses(logits, ids[:, start + 1 : end + 1])[0]
