"""Caches that fill up: tokens for them, and ways to give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
)

import qkv

SINKS, TOKENS = 4, 40
FORMATS: list[dict[str, Any]] = [
    {"format": "none"},
    {"format": "int8"},
    {"format": "int8", "equalize": False},
    {"format": "int8", "equalize": False, "residual_length": 5},
    {"format": "int4", "key_granularity": "channel", "key_group_size": 32},
]


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Feed tokens in pieces of these sizes, the last size again and again."""
    parts, at, turn = [], 0, iter(sizes)
    size = sizes[-1]
    while at < ids.shape[1]:
        size = next(turn, size)
        parts.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
    return torch.cat(parts, dim=1)


def windowed(model: PreTrainedModel, max_tokens: int = TOKENS, **options: Any) -> qkv.QKVCache:
    options.setdefault("format", "none")
    return qkv.QKVCache(model.config, max_tokens=max_tokens, on_full="window", **options)


CHANNELS: dict[str, Any] = {"format": "int4", "key_granularity": "channel", "value_granularity": "channel"}
# What decides how memory is taken, beside the formats.
BOUNDED: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in (*qkv.formats(), *qkv.presets())},
    **{f"groups of {n}": {**CHANNELS, "key_group_size": n, "value_group_size": 64} for n in (16, 32, 128)},
    "scales per head": {"format": "int8", "granularity": "head"},
    "scales per head and groups": {"format": "fp8_e4m3", "key_granularity": "channel", "value_granularity": "head"},
}


def shaped(layers: int, heads: int, dim: int, slides: bool = False) -> Any:
    """The configuration of a model whose attention takes packed tensors, so that nothing is decoded in ``update``."""
    sizes = {"hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "head_dim": dim, "vocab_size": 8}
    config: Any = LlamaConfig(**sizes)
    if slides:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
        config = Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=90, pad_token_id=0)
    config._attn_implementation = "qkv"
    return config


def grown(cache: qkv.QKVCache, shape: tuple[int, int, int], pieces: list[int], grows: float = 1.0) -> Iterator[bool]:
    """Gives a cache random tokens in pieces, ever larger ones; stops after each layer: whether it was the last one."""
    batch, heads, dim = shape
    generator, size = torch.Generator().manual_seed(0), 1.0
    for n in pieces:
        size *= grows
        x = size * torch.randn(batch, heads, n, dim, generator=generator)
        for layer in range(len(cache.layers)):
            cache.update(x, x, layer)
            yield layer == len(cache.layers) - 1


def state(cache: qkv.QKVCache) -> list[tuple[Any, ...]]:
    return [(s.length, s.version, s.changes, s.nbytes(), s.shape) for s in (layer.store for layer in cache.layers)]
