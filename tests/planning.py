"""Caches as the tests of plans fill and count them."""

from __future__ import annotations

from typing import Any

import torch
from setups import SETUPS
from transformers import (
    EncoderDecoderCache,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
)

import qkv
from qkv.layers import QKVLayer
from qkv.model_shape import ModelShape
from qkv.plan import CachePlan, Places

HEADS, DIM, ROWS = 2, 32, 2
INT8 = {"format": "int8", "equalize": False}
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 16}
# What decides how memory is taken, beside the formats.
WAYS: dict[str, dict[str, Any]] = {
    "sinks": {**INT8, "sink_tokens": 5},
    "a long residual window": {**INT8, "residual_length": 70, "sink_tokens": 3},
    "a residual window and groups": {**CHANNELS, "residual_length": 7, "sink_tokens": 3},
    "groups of other sizes": {
        **CHANNELS,
        "key_group_size": 64,
        "value_granularity": "channel",
        "value_group_size": 128,
    },
    "scales per head": {**INT8, "granularity": "head", "sink_tokens": 2},
    "scales per head and groups": {"format": "fp8_e4m3", "key_granularity": "channel", "value_granularity": "head"},
    "groups of channels": {"format": "nf4", "granularity": "group", "group_size": 16},
    "exact prompts": {"format": "k5v4", "prefill": "exact"},
    "unlike layers": {"format": "int8", "layers": {0: {"format": "none"}, 1: {"sink_tokens": 9, "format": "int4"}}},
}
EVERY = {**SETUPS, **{name: {"format": name} for name in qkv.presets()}, **WAYS}


def bounded(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows ``[ROWS, HEADS, tokens, dim]`` that repeat after 64 tokens: no later one exceeds the first of them."""
    x = torch.randn(ROWS, HEADS, 64, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.repeat(1, 1, -(-tokens // 64), 1)[:, :, :tokens]


def small_config(kind: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 50}
    if kind == "full":
        config = LlamaConfig(**sizes)
    else:
        config = Gemma3TextConfig(
            **sizes, layer_types=["sliding_attention", "full_attention"], sliding_window=150, pad_token_id=0
        )
    config._attn_implementation = "qkv"  # what is stored is handed out packed, so nothing is decoded here
    return config


def filled(shape: ModelShape, tokens: int, steps: int = 0, **options: Any) -> qkv.QKVCache:
    """A cache that was given so many tokens in one pass, and then one by one."""
    cache = qkv.QKVCache(shape.config, **options)
    for n in [tokens - steps] * (steps < tokens) + [1] * steps:
        for layer in range(len(cache.layers)):
            cache.update(bounded(n, DIM), bounded(n, DIM), layer)
    return cache


def settled(cache: qkv.QKVCache) -> Places:
    """Where the bytes of a real cache are: full segments that lie in the file are found by their addresses."""
    assert cache._limits is not None
    assert cache._limits.spill is not None
    file, filed = cache._limits.spill, []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, QKVLayer):
            continue
        mapped = {id(m.segment) for m in file._mapped.get(index, ()) if m.live}
        lying = [s for s in layer.store.packed if id(s) in mapped]
        tensors = [t for segment in lying for plane in segment.planes() for t in plane.tensors()]
        filed.append(sum(t.untyped_storage().nbytes() for t in tensors))
    memory = cache.nbytes() - sum(filed)
    return Places(memory, cache.offloaded_bytes(), memory + max(filed))


def planned(shape: ModelShape, **options: Any) -> CachePlan:
    options = {**options}
    return CachePlan(shape, options.pop("format"), **options)


def held(cache: Any) -> int:
    """``nbytes()``, and the states of linear attention if it does not count them."""
    if isinstance(cache, EncoderDecoderCache):
        return held(cache.self_attention_cache) + held(cache.cross_attention_cache)
    total: int = cache.nbytes()
    for layer in cache.layers:
        alone = qkv.QKVCache()
        alone.layers = [layer]
        states = [x for name in ("conv_states", "recurrent_states") for x in getattr(layer, name, {}).values()]
        store = layer.store.nbytes() if hasattr(layer, "store") else 0
        if alone.nbytes() == store:
            total += sum(x.nbytes for x in states if x is not None)
    return total
