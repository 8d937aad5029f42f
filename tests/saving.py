"""What tests of saved caches share: small caches, and whether two stores are alike."""

from __future__ import annotations

from typing import Any

import torch
from stores import kv, part
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

import qkv
from qkv.named_caches import as_argument
from qkv.storage import LayerStore

# As after qkv.enable(model): no update decodes what is stored.
LLAMA = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=32, attn_implementation="qkv")
MISTRAL = MistralConfig(num_hidden_layers=1, sliding_window=40, attn_implementation="qkv")


def made(config: qkv.CacheConfig, pair: tuple[torch.Tensor, torch.Tensor], model: Any = LLAMA, **more: Any) -> Any:
    cache = qkv.QKVCache(model, config, **more)
    cache.update(*pair, 0)
    return cache


def store_of(cache: qkv.QKVCache) -> LayerStore:
    return cache.layers[0].store


def go_on(cache: qkv.QKVCache, seed: int) -> None:
    """A chunk, some steps, a crop and another chunk, with tokens that make scales per head grow."""
    batch, heads, key_dim, value_dim = store_of(cache).shape
    more = kv(60, batch, heads, key_dim, value_dim, seed=seed, growing=2.0)
    cache.update(*part(more, 0, 20), 0)
    for t in range(20, 40):
        cache.update(*part(more, t, t + 1), 0)
    cache.crop(-25)
    cache.update(*part(more, 40, 60), 0)


# ---- what is loaded goes on ------------------------------------------------------------------------------------------


@torch.no_grad()
def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True).logits
