"""The bytes that caches really hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

import qkv
from qkv.named_caches import named_cache
from qkv_eval.held import bits_per_value, kv_bytes, tensor_bytes

pytestmark = pytest.mark.usefixtures("plain_int8")

LAYERS, BATCH, HEADS, TOKENS, DIM = 2, 2, 3, 512, 64
VALUES = 2 * LAYERS * BATCH * HEADS * TOKENS * DIM


def filled(cache: qkv.QKVCache | DynamicCache) -> qkv.QKVCache | DynamicCache:
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, BATCH, HEADS, TOKENS, DIM), layer)
    return cache


def test_a_dynamic_cache_holds_its_keys_and_values() -> None:
    cache = filled(DynamicCache())
    assert kv_bytes(cache) == 4 * VALUES
    assert bits_per_value(cache, VALUES) == 32


def test_storages_count_once_and_whole() -> None:
    base = torch.zeros(1000)
    assert tensor_bytes([base[:10], base[5:20], {"again": base}]) == 4000


def test_tensors_are_found_in_attributes_slots_and_containers() -> None:
    class Slotted:
        __slots__ = ("empty", "inside")

    @dataclass
    class Holder:
        slotted: Slotted
        table: dict[str, tuple[torch.Tensor, ...]]

    slotted = Slotted()
    slotted.inside = torch.zeros(3)
    holder = Holder(slotted, {"x": (torch.zeros(5), torch.zeros(7))})
    holder.itself = holder  # type: ignore[attr-defined]
    assert tensor_bytes(holder) == 4 * (3 + 5 + 7)


@pytest.mark.parametrize(
    "setup",
    [
        {"format": "none"},
        {"format": "int8"},
        {"format": "fp8_e4m3", "granularity": "head"},
        {"format": "int8", "sink_tokens": 4, "residual_length": 32},
    ],
    ids=str,
)
def test_our_own_count_leaves_nothing_out(setup: dict[str, object]) -> None:
    """Savings that count codes only are how "five times smaller" comes about."""
    cache = filled(qkv.QKVCache(None, **setup))
    held = tensor_bytes(cache)
    assert cache.nbytes() <= held <= 1.01 * cache.nbytes() + 4096


def test_int8_takes_at_most_1_04_bytes_for_a_value() -> None:
    cache = filled(qkv.QKVCache(None, "int8"))
    assert 8 < bits_per_value(cache, VALUES) <= 8 * 1.04
    assert bits_per_value(cache, VALUES) <= 8 * kv_bytes(cache) / VALUES


@pytest.mark.parametrize(
    ("name", "least", "most"), [("hf-fp8", 8, 8.01), ("hf-hqq8", 8, 9.01), ("hf-quanto4", 4, 5.01)]
)
def test_the_quantized_parts_of_transformers_caches_are_found(name: str, least: float, most: float) -> None:
    if name != "hf-fp8":
        pytest.importorskip("hqq" if "hqq" in name else "optimum.quanto", reason="needs the extra `peers`")
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=HEADS * DIM)
    assert least <= bits_per_value(filled(named_cache(name).make(config)), VALUES) <= most
