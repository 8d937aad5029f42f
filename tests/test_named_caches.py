"""Caches by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache

import qkv
from qkv import named_caches
from qkv.named_caches import as_argument, cache_names, named_cache
from qkv_eval.peers import with_baseline


@pytest.mark.parametrize("name", ["dynamic", *qkv.formats(), *qkv.presets(), "hf-fp8"])
def test_a_named_cache_works_in_a_model(wide_model: PreTrainedModel, name: str) -> None:
    named = named_cache(name)
    cache = named.make(wide_model.config)
    if named.is_ours:
        qkv.enable(wide_model)
    with torch.inference_mode():
        wide_model(torch.arange(200)[None], **as_argument(cache))
    assert cache.get_seq_length() == 200
    assert name in cache_names()


@pytest.mark.parametrize("name", ["hf-hqq8", "hf-hqq4", "hf-quanto4", "hf-quanto2"])
def test_transformers_caches_have_the_bits_of_their_name(tiny_model: PreTrainedModel, name: str) -> None:
    pytest.importorskip("hqq" if "hqq" in name else "optimum.quanto", reason="needs the extra `peers`")
    cache = named_cache(name).make(tiny_model.config)
    assert isinstance(cache, QuantizedCache)
    assert {layer.nbits for layer in cache.layers} == {int(name[-1])}


def test_which_caches_are_ours() -> None:
    assert isinstance(named_cache("dynamic").make(None), DynamicCache)
    names = ("dynamic", "int8", "k5v4", "hf-fp8")
    assert [named_cache(name).is_ours for name in names] == [False, True, True, False]


def test_a_yaml_file_is_a_cache_under_its_own_name(tmp_path: Path, tiny_model: PreTrainedModel) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("format: fp8_e5m2\nresidual_length: 16\n")
    named = named_cache(str(file))
    cache = named.make(tiny_model.config)
    assert isinstance(cache, qkv.QKVCache)
    assert (named.name, named.is_ours) == ("mine", True)
    assert cache.stats()["layers"][0]["key_format"] == "fp8_e5m2"


def test_a_bad_yaml_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("formatt: int8\n")
    with pytest.raises(ValueError, match="formatt"):
        named_cache(str(file))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown cache 'int9'") as error:
        named_cache("int9")
    for name in cache_names():
        assert name in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_caches, "_is_installed", lambda package: False)
    with pytest.raises(ValueError, match="pip install optimum-quanto"):
        named_cache("hf-quanto4")
    assert named_cache("hf-fp8").name == "hf-fp8"


def test_a_run_begins_with_the_unquantized_cache_and_has_each_once() -> None:
    assert [cache.name for cache in with_baseline(["int8", "dynamic", "none", "int8"])] == ["dynamic", "int8", "none"]


def test_two_caches_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "int8.yaml"
    file.write_text("format: int8\nsink_tokens: 4\n")
    with pytest.raises(ValueError, match="'int8'"):
        with_baseline(["int8", str(file)])


def make_of_mine(config: object) -> DynamicCache:
    return DynamicCache()


def make_nonsense(config: object) -> list[int]:
    return [1]


def test_a_function_of_the_user_makes_a_cache_too() -> None:
    named = named_cache(f"{__name__}:make_of_mine")
    assert (named.name, named.is_ours) == (f"{__name__}:make_of_mine", False)
    assert isinstance(named.make(None), DynamicCache)
    with pytest.raises(ValueError, match="made a list, not a cache"):
        named_cache(f"{__name__}:make_nonsense").make(None)
    with pytest.raises(ValueError, match="cannot be imported"):
        named_cache(f"{__name__}:not_there")
    with pytest.raises(ValueError, match="cannot be imported"):
        named_cache("no_such_package:make")
