"""Set-ups by name: what they hold, that a file of each lies in configs/, and that the README shows what each costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import qkv
from qkv.named_caches import cache_names, named_cache

ROOT = Path(__file__).parent.parent
each_preset = pytest.mark.parametrize("name", qkv.presets())


@each_preset
def test_a_preset_is_what_its_name_says(name: str) -> None:
    config = qkv.CacheConfig.of(name)
    keys, values = name[1:].split("v")
    assert config.format.startswith(f"int{keys}")
    assert config.value_format is not None
    assert config.value_format.startswith(f"int{values}")


@each_preset
def test_a_file_of_each_preset_lies_in_configs_and_is_equal_to_it(name: str) -> None:
    assert qkv.CacheConfig.from_yaml(ROOT / "configs" / f"{name}.yaml") == qkv.CacheConfig.of(name)


@each_preset
def test_a_preset_is_a_cache_by_name_everywhere(name: str, tiny_model: PreTrainedModel) -> None:
    assert name in cache_names()
    named = named_cache(name)
    assert named.name == name
    assert named.is_ours
    cache = named.make(tiny_model.config)
    assert isinstance(cache, qkv.QKVCache)
    assert cache.config == qkv.CacheConfig.of(name)
    changed = qkv.QKVCache(tiny_model.config, name, residual_length=7)
    assert (changed.config.residual_length, changed.config.value_format) == (7, cache.config.value_format)


@each_preset
def test_bits_per_value_of_a_preset_are_its_codes_scales_zero_points_and_sinks(name: str) -> None:
    tokens, dim = 4096, 64
    cache = qkv.QKVCache(None, name)
    cache.update(torch.randn(1, 2, tokens, dim), torch.randn(1, 2, tokens, dim), 0)
    keys, values = (int(bits) for bits in name[1:].split("v"))
    sinks = qkv.CacheConfig.of(name).sink_tokens
    # A byte of scale and a byte of zero point for 64 numbers; of int8 a bfloat16 for 64. One group of keys is shorter.
    packed = (keys + values) / 2 + 16 / 64
    expected = packed + sinks / tokens * (32 - packed)
    assert cache.stats()["bits_per_value"] == pytest.approx(expected, abs=16 / tokens)


def test_no_format_has_the_name_of_a_preset() -> None:
    assert not set(qkv.presets()) & set(qkv.formats())
    with pytest.raises(ValueError, match="k5v4"):
        qkv.QKVCache(None, "k5v5v5")


def test_the_readme_shows_what_each_preset_costs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Evaluate") : text.index("## How it works")]
    missing = [name for name in qkv.presets() if f"\n {name} " not in table]
    assert missing == []
