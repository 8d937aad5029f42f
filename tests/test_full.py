"""What happens when a cache is full and no other way is chosen: an error before anything is written."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from filling import FORMATS, logits, prompt, state
from transformers import (
    PreTrainedModel,
)

import qkv
from qkv.attention import attention, tiled
from qkv.storage import LayerStore
from qkv.view import KVView


def test_too_many_tokens_are_refused_before_anything_is_written(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, max_tokens=50)
    logits(tiny_model, cache, prompt(48), [40, 1])
    before = state(cache)
    with pytest.raises(ValueError, match=r"holds 48 tokens \(\d+ bytes\), 3 more were given, and max_tokens=50"):
        logits(tiny_model, cache, prompt(3), [3])
    assert state(cache) == before
    logits(tiny_model, cache, prompt(2), [2])
    cache.crop(-10)
    logits(tiny_model, cache, prompt(10), [10])


@pytest.mark.parametrize(
    "options",
    [*FORMATS, {"format": "int8", "residual_length": 70, "sink_tokens": 3}, {"format": "int4_rot", "group_size": 16}],
    ids=str,
)
def test_bytes_are_predicted_to_the_byte(wide_model: PreTrainedModel, options: dict[str, Any]) -> None:
    """With a limit of just what a cache without one takes the tokens are accepted; with one byte less they are not."""
    qkv.enable(wide_model)
    ids = prompt(600)
    for sizes in ([100, 1], [300, 7, 1, 130], [600]):
        plain, caches = qkv.QKVCache(wide_model.config, **options), {}
        at, most = 0, 0
        turn = iter(sizes)
        size = sizes[-1]
        while at < 600:
            size = next(turn, size)
            grows = logits(wide_model, plain, ids[:, at : at + size], [size]) is not None and plain.nbytes() > most
            if grows:
                most = plain.nbytes()
                for less in (0, 1):
                    cache = (
                        copy.deepcopy(caches["last"])
                        if "last" in caches
                        else qkv.QKVCache(wide_model.config, max_bytes=1 << 30, **options)
                    )
                    cache._limits.max_bytes, cache._limits._passed = most - less, None
                    before = state(cache)
                    if less:
                        with pytest.raises(ValueError, match=f"it would take {most}, and max_bytes={most - 1}"):
                            logits(wide_model, cache, ids[:, at : at + size], [size])
                        assert state(cache) == before or at == 0
                    else:
                        logits(wide_model, cache, ids[:, at : at + size], [size])
                        assert cache.nbytes() == most
            caches["last"] = copy.deepcopy(plain)
            caches["last"]._limits = qkv.QKVCache(wide_model.config, max_bytes=1 << 30, **options)._limits
            at += size
            if at > 300 and size == 1:
                break


def test_a_cache_fills_up_to_its_bytes_and_no_further(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, "int8", max_bytes=60_000)
    with pytest.raises(ValueError, match="max_bytes=60000"):
        logits(tiny_model, cache, prompt(2000), [20])
    assert 40_000 < cache.nbytes() <= 60_000
    assert len({layer.store.length for layer in cache.layers}) == 1
    # Beams take more: counted anew.
    small = qkv.QKVCache(tiny_model.config, "int8", max_bytes=200_000)
    logits(tiny_model, small, prompt(300), [300])
    small.batch_repeat_interleave(4)
    with pytest.raises(ValueError, match="max_bytes=200000"):
        logits(tiny_model, small, prompt(2000, batch=4), [1])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_full": "error"}, "needs a limit"),
        ({"on_full": "window"}, "needs a limit"),
        ({"on_full": "offload"}, "max_bytes"),
        ({"on_full": "drop", "max_tokens": 5}, "error, window, offload"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_bytes": -1}, "at least 1"),
        ({"on_full": "window", "max_tokens": 4}, "leaves nothing"),
        ({"max_tokens": 4, "offload_folder": "x"}, "offload_folder"),
        ({"on_full": "offload", "max_bytes": 100, "max_tokens": 4}, "not max_tokens"),
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(
    tiny_model: PreTrainedModel, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        qkv.QKVCache(tiny_model.config, **options)


def test_limits_are_part_of_a_configuration(tmp_path: Path, tiny_model: PreTrainedModel) -> None:
    config = qkv.CacheConfig(format="int8", max_tokens=64, on_full="window", sink_tokens=2)
    config.to_yaml(tmp_path / "a.yaml")
    cache = qkv.QKVCache(tiny_model.config, tmp_path / "a.yaml")
    assert cache.config == config
    assert cache.layers[0].window == 62


# ---- prompts in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", [None, "window"])
def test_the_peak_of_a_prompt_in_pieces_is_the_cache_and_a_bound_of_its_own(
    on_full: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkv_eval.bench.peak import TensorMemory

    model = make_tiny_model(max_position_embeddings=8192)
    qkv.enable(model)
    monkeypatch.setattr(tiled, "TILE", 256)
    above = {}
    for length in (1024, 4096):
        ids, memory = prompt(length), TensorMemory()
        options: dict[str, Any] = {"on_full": "window", "max_tokens": 260} if on_full else {}
        cache = qkv.QKVCache(model.config, "int8", equalize=False, **options)
        with torch.inference_mode():
            for start in range(0, length, 128):
                with memory.part("prompt"):
                    model(ids[:, start : start + 128], past_key_values=cache, logits_to_keep=1)
        above[length] = memory.peak - cache.nbytes()
    assert above[4096] <= above[1024] + 100_000, above


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, causal: bool, softcap: float | None, masked: bool
) -> None:
    monkeypatch.setattr(tiled, "TILE", 64)
    store = LayerStore(qkv.CacheConfig("int8", equalize=False))
    store.append(torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16))
    view, query = KVView(store), torch.randn(2, 6, 50, 16)
    mask = torch.rand(2, 1, 50, 300) > 0.5 if masked else None
    if mask is not None:
        mask[0, 0, 3] = False  # a row that sees nothing
    for sinks in (None, torch.randn(6)):
        assert tiled.serves(query, view)
        wanted = attention(query, view, mask, None, causal, softcap, sinks, "reference")
        assert (attention(query, view, mask, None, causal, softcap, sinks) - wanted).abs().max() < 2e-6


def test_a_static_window_gives_the_memory_of_a_long_prompt_back() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=300, sliding_window=200, max_position_embeddings=8192,
    )  # fmt: skip
    model = qkv.enable(MistralForCausalLM(config).eval())
    growing, static = (qkv.QKVCache(config, "int8", equalize=False, max_cache_len=n) for n in (None, 6000))
    for cache in (growing, static):
        logits(model, cache, prompt(4000), [4000])
    assert static.nbytes() <= 2.5 * growing.nbytes()
    held = static.nbytes()
    for _ in range(300):
        logits(model, static, prompt(1), [1])
        assert static.nbytes() == held
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, static, prompt(500), [500])
    assert static.nbytes() <= held
