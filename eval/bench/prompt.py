"""A prompt's pass through a whole model into a cache, as ``generate`` makes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument, named_cache
from qkv_eval.peers import attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


def random_prompt(model: PreTrainedModel, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Returns random token ids of a model's vocabulary, int64 ``[batch, tokens]``."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def read_prompt(model: PreTrainedModel, cache: Cache, prompt: torch.Tensor, chunk: int | None = None) -> None:
    """Runs a prompt, int64 ``[batch, tokens]``, through a model into an empty cache.

    Args:
        model: attends as the cache is meant to be attended to.
        cache: holds the prompt afterwards.
        prompt: token ids.
        chunk: tokens in one pass; None: all.

    Only the last token's predictions are computed where the model can leave the others out, as ``generate`` does:
    those of all tokens would outweigh every cache.
    """
    for piece in pieces(prompt, chunk):
        read_piece(model, cache, piece)


def pieces(prompt: torch.Tensor, chunk: int | None) -> Iterator[torch.Tensor]:
    """Yields the parts of a prompt that go through the model at once."""
    yield from prompt.split(chunk or prompt.shape[1], dim=1)


def read_piece(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor) -> None:
    """Runs tokens, int64 ``[batch, n]``, through a model after those that a cache holds."""
    arguments: dict[str, Any] = as_argument(cache)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    model(input_ids=tokens, use_cache=True, **arguments)


def check_caches(model: PreTrainedModel, caches: Iterable[NamedCache]) -> None:
    """Checks that each cache can be made for a model, before anything is measured.

    Raises:
        ValueError: one cannot, such as transformers' quantized caches where layers have sliding windows.
    """
    for named in caches:
        named.make(model.config)


@torch.inference_mode()
def check_positions(model: PreTrainedModel, tokens: int) -> str | None:
    """Checks that a model can compute at a context of so many tokens, trained for it or not.

    Returns:
        A note if it was not trained for that many; None otherwise.

    Raises:
        ValueError: its positions are a table with fewer rows.
    """
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if trained is None or tokens <= trained:
        return None
    attend_as_meant(model, named_cache(UNQUANTIZED))
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), position_ids=torch.tensor([[tokens - 1]]))
    except IndexError:
        raise ValueError(f"this model has a table of {trained} positions; {tokens} tokens are too many") from None
    return f"{tokens} tokens are more than the {trained} that the model was trained for: time and memory hold, text not"
