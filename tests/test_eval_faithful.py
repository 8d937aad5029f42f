"""The check that tells whether one pass through a cache sees what it stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from transformers import DynamicCache, PreTrainedModel

import qkv
from qkv.named_caches import NamedCache, named_cache
from qkv_eval.faithful import check_cache

pytestmark = pytest.mark.usefixtures("plain_int8")


class HidesNothing(DynamicCache):
    """Rounds keys and values, and hands out what it keeps."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(keys), rounded(values), *args, **kwargs)


class HidesThePass(DynamicCache):
    """Rounds keys and values, and hands out those of the current pass as they came."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = super().update(rounded(keys), rounded(values), *args, **kwargs)
        n = keys.shape[2]
        return tuple(torch.cat([old[:, :, :-n], new], dim=2) for old, new in zip(kept, (keys, values), strict=True))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return (x * 4).round() / 4


def of(kind: type) -> NamedCache:
    return NamedCache("theirs", lambda config: kind(config=config), is_ours=False)


@pytest.mark.parametrize("name", ["none", "int8", "fp8_e4m3", "fp8_e5m2", "dynamic"])
def test_caches_whose_pass_sees_what_they_store_are_faithful(tiny_model: PreTrainedModel, name: str) -> None:
    verdict = check_cache(tiny_model, named_cache(name))
    assert verdict.faithful
    assert verdict.quantizes == (name not in ("none", "dynamic"))
    assert verdict.difference < 0.05


@pytest.mark.parametrize("options", [{"residual_length": 40}, {"granularity": "head"}, {"sink_tokens": 9}], ids=str)
def test_windows_sinks_and_warm_up_do_not_make_a_cache_unfaithful(
    tiny_model: PreTrainedModel, options: dict[str, Any]
) -> None:
    cache = NamedCache("x", lambda config: qkv.QKVCache(config, "fp8_e5m2", **options), True)
    assert check_cache(tiny_model, cache).faithful


def test_a_cache_that_hides_its_stored_values_in_a_pass_is_found_out(tiny_model: PreTrainedModel) -> None:
    """Case 16, by what the cache does, whatever it is called."""
    exact = NamedCache("x", lambda config: qkv.QKVCache(config, "int8", prefill="exact"), True)
    for cache in (of(HidesThePass), exact, named_cache("hf-fp8")):
        verdict = check_cache(tiny_model, cache)
        assert verdict.quantizes
        assert not verdict.faithful
        assert verdict.difference > 0.3
    assert check_cache(tiny_model, of(HidesNothing)).faithful


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "LFM2", "Falcon-H1", "DeepSeek-V3"])
def test_every_kind_of_layer_is_tried(name: str) -> None:
    model = FAMILIES[name]()
    assert check_cache(model, named_cache("int8")).faithful
    assert model.config._attn_implementation != "qkv"
    if name in ("Mistral", "DeepSeek-V3"):
        assert not check_cache(model, of(HidesThePass)).faithful
