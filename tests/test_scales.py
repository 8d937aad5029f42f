"""Files of static scales: what is taken, what is refused and why, and for which model and format they are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from families import FAMILIES
from safetensors.torch import save_file
from transformers import AutoConfig, MistralConfig, PreTrainedModel

import qkv
from qkv.scales import Scales, load_scales, model_fingerprint, save_scales

Tensors = dict[str, torch.Tensor]


def some_scales(layers: int = 2, heads: int = 1, dim: int | None = None) -> Tensors:
    """A scale for keys and values of each layer, and equalizing vectors if a `dim` is given."""
    scales = {}
    for i in range(layers):
        for number, kind in enumerate(("key", "value")):
            scales[f"layers.{i}.{kind}_scale"] = 0.01 * (1 + torch.arange(heads) + 2 * i + number)
        if dim is not None:
            scales[f"layers.{i}.key_centre"] = torch.linspace(-1, 1, heads * dim).view(heads, dim)
            scales[f"layers.{i}.key_multiplier"] = torch.linspace(0.5, 2, heads * dim).view(heads, dim)
    return scales


@pytest.fixture
def made(tiny_model: PreTrainedModel, tmp_path: Path) -> Path:
    """A file of int8 scales for the tiny model, with metadata."""
    path = tmp_path / "scales.safetensors"
    save_scales(path, some_scales(), tiny_model.config, "int8", {"method": "maximum"})
    return path


# ---- reading and writing ---------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_with_what_it_is_for(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    given = some_scales(dim=16)
    given["layers.0.key_scale"] = given["layers.0.key_scale"].to(torch.bfloat16)
    save_scales(path, given, tiny_model.config, "fp8_e4m3", {"text": "a book", "tokens": "7"})
    assert list(tmp_path.iterdir()) == [path]
    found = load_scales(path)
    assert set(found) == set(given)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, given[name].float())
    assert found.source == str(path)
    assert found.metadata["text"] == "a book"
    assert found.metadata["tokens"] == "7"
    assert found.metadata["cache_format"] == "fp8_e4m3"
    assert json.loads(found.metadata["model"])["num_hidden_layers"] == 2


def test_given_tensors_are_copied_and_have_no_purpose_to_check(tiny_model: PreTrainedModel) -> None:
    given = some_scales()
    scales = load_scales(given)
    given["layers.0.key_scale"].fill_(9.0)
    assert float(scales["layers.0.key_scale"]) == pytest.approx(0.01)
    assert scales.source is None
    scales.check_purpose(tiny_model.config, qkv.CacheConfig("fp8_e4m3"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.key": torch.ones(1)}, "'layers.0.key' is no name of a scale; use layers.<i>.key_scale"),
        ({"layers.x.key_scale": torch.ones(1)}, "no name of a scale"),
        ({"layers.0.value_centre": torch.ones(1, 4)}, "no name of a scale"),
        ({"layers.0.key_scale": torch.ones(1, 1)}, r"layers.0.key_scale must be \[kv_heads\], not \[1, 1\]"),
        ({"layers.0.key_centre": torch.ones(4)}, r"layers.0.key_centre must be \[kv_heads, key_dim\], not \[4\]"),
        ({"layers.0.key_scale": torch.zeros(1)}, "layers.0.key_scale must be positive and finite"),
        ({"layers.0.value_scale": torch.tensor([torch.nan])}, "layers.0.value_scale must be positive and finite"),
        ({"layers.0.value_scale": torch.tensor([torch.inf])}, "must be positive and finite"),
        ({"layers.0.key_centre": torch.full((1, 4), torch.inf)}, "layers.0.key_centre must be finite"),
        ({"layers.0.key_multiplier": torch.zeros(1, 4)}, "layers.0.key_multiplier must be positive and finite"),
        ({"layers.1.key_scale": torch.ones(3)}, "layer 1 differ in kv_heads: 3 in key_scale, 1 in value_scale"),
        (
            {"layers.0.key_centre": torch.ones(1, 4), "layers.0.key_multiplier": torch.ones(1, 5)},
            "layer 0 differ in key_dim: 4 in key_centre, 5 in key_multiplier",
        ),
    ],
)
def test_tensors_that_are_no_scales_are_refused(
    tiny_model: PreTrainedModel, tmp_path: Path, changes: Tensors, message: str
) -> None:
    path = tmp_path / "scales.safetensors"
    bad = {**some_scales(), **changes}
    save_file(bad, path)
    for source in (bad, path):
        with pytest.raises(ValueError, match=message):
            load_scales(source)
        with pytest.raises(ValueError, match=message):
            qkv.QKVCache(tiny_model.config, "int8", scales=source)
    with pytest.raises(ValueError, match=message):
        save_scales(tmp_path / "other.safetensors", bad, tiny_model.config, "int8")
    assert list(tmp_path.iterdir()) == [path]


def test_centres_may_be_negative_and_zero(tiny_model: PreTrainedModel) -> None:
    centre = torch.tensor([[-3.0, 0.0, 2.0]])
    assert torch.equal(load_scales({"layers.0.key_centre": centre})["layers.0.key_centre"], centre)


@pytest.mark.parametrize("damage", ["missing", "empty", "a folder", "text", "truncated", "half a header"])
def test_a_file_that_cannot_be_read_is_refused(
    tiny_model: PreTrainedModel, made: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "bad.safetensors"
    content = {
        "empty": b"",
        "text": b"these are no tensors, but words",
        "truncated": made.read_bytes()[:-3],
        "half a header": made.read_bytes()[:40],
    }
    if damage == "a folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(content[damage])
    for read in (load_scales, lambda source: qkv.QKVCache(tiny_model.config, "int8", scales=source)):
        with pytest.raises(ValueError, match=r"cannot read scales from .*bad\.safetensors"):
            read(path)


@pytest.mark.parametrize("place", ["no/such/folder/x.safetensors", "folder"])
def test_a_place_that_cannot_be_written_is_refused(tiny_model: PreTrainedModel, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="cannot write scales to"):
        save_scales(tmp_path / place, some_scales(), tiny_model.config, "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_names_of_layers_that_the_model_does_not_have_are_refused(tiny_model: PreTrainedModel) -> None:
    for kind, tensor in (("key_scale", torch.ones(1)), ("key_centre", torch.ones(1, 16))):
        with pytest.raises(ValueError, match=rf"'layers.2.{kind}' belongs to no layer of this model, which has 2"):
            qkv.QKVCache(tiny_model.config, "int8", scales={f"layers.2.{kind}": tensor})


# ---- for which model -------------------------------------------------------------------------------------------------


def refusal(config: Any, path: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match="were made for") as caught:
        qkv.QKVCache(config, options.pop("format", "int8"), scales=path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is 2 there and 1 here"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 2 there and 3 here"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 1 there and 3 here"),
        ({"num_attention_heads": 6}, "num_attention_heads is 3 there and 6 here"),
        ({"head_dim": 32}, "head_dim is 16 there and 32 here"),
        # The same shapes of keys and values, and yet another model.
        ({"hidden_size": 96}, "hidden_size is 48 there and 96 here"),
        ({"intermediate_size": 65}, "intermediate_size is 64 there and 65 here"),
        ({"vocab_size": 300}, "vocab_size is 260 there and 300 here"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters.rope_theta is 10000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type is default there and linear here",
        ),
    ],
)
def test_scales_of_another_model_are_refused_and_it_is_said_what_to_do(
    made: Path, changes: dict[str, Any], words: str
) -> None:
    message = refusal(make_tiny_model(**changes).config, made)
    assert words in message
    assert "qkv calibrate" in message
    assert str(made) in message


def test_scales_of_another_family_with_the_same_shapes_are_refused(tiny_model: PreTrainedModel, made: Path) -> None:
    theirs = {name: value for name, value in tiny_model.config.to_dict().items() if name != "model_type"}
    assert "model_type is llama there and mistral here" in refusal(MistralConfig(**theirs), made)


def test_kinds_of_layers_are_part_of_what_a_model_is(tmp_path: Path) -> None:
    model, path = FAMILIES["Gemma 2"](), tmp_path / "scales.safetensors"
    save_scales(path, some_scales(heads=2), model.config, "int8")
    config = copy.deepcopy(model.config)
    config.layer_types = config.layer_types[::-1]
    assert "layer_types is not the same" in refusal(config, path)


def test_one_model_is_one_model_however_it_is_loaded_and_used(
    tiny_model: PreTrainedModel, tiny_folder: Path, made: Path
) -> None:
    config = tiny_model.config
    configs = [config, copy.deepcopy(config), AutoConfig.from_pretrained(tiny_folder)]
    for changes in (
        {"dtype": "bfloat16"},
        {"max_position_embeddings": 4096},
        {"vocab_size": 262},
        {"use_cache": False, "pad_token_id": 3, "architectures": ["Another"], "name_or_path": "elsewhere"},
        {"attention_dropout": 0.1, "initializer_range": 0.5},
    ):
        changed = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(changed, name, value)
        configs.append(changed)
    qkv.enable(tiny_model)
    for same in configs:
        assert float(qkv.QKVCache(same, "int8", scales=made).layers[1].store._given[1]) == pytest.approx(0.04)


def test_what_one_side_does_not_know_is_no_difference(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    """Files of another transformers, or a configuration out of a GGUF file, may spell out more or less."""
    config = copy.deepcopy(tiny_model.config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    config.new_head_dim = 3
    path = tmp_path / "scales.safetensors"
    save_scales(path, some_scales(), config, "int8")
    qkv.QKVCache(tiny_model.config, "int8", scales=path)
    known = model_fingerprint(config)
    assert known["new_head_dim"] == 3
    del config.head_dim
    assert "head_dim" not in model_fingerprint(config)


@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", "MPT", "Falcon", "Jamba", "Gemma 3", "Gemma 4", "Llama 4", "DeepSeek-V3", "Llava", "T5"]
)
def test_every_family_has_a_fingerprint_that_tells_its_sizes(name: str) -> None:
    config = FAMILIES[name]().config.get_text_config(decoder=True)
    before = copy.deepcopy(config.to_dict())
    found = model_fingerprint(config)
    assert config.to_dict() == before
    assert found == json.loads(json.dumps(found)) == model_fingerprint(copy.deepcopy(config))
    assert found["num_hidden_layers"] in (2, 4)
    assert found["hidden_size"] == 64
    assert found["vocab_size"] == 99
    assert found["num_attention_heads"] == 4
    assert found["model_type"] == config.model_type


def test_without_a_model_or_without_metadata_there_is_nothing_to_compare(
    tiny_model: PreTrainedModel, made: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(hidden_size=96).config
    assert qkv.QKVCache(None, "int8", scales=made).config.scales == str(made)
    for number, metadata in enumerate((None, {"format": "pt"})):  # what other programs write beside tensors
        path = tmp_path / f"plain{number}.safetensors"
        save_file(some_scales(), path, metadata=metadata)
        for config in (tiny_model.config, other):
            qkv.QKVCache(config, "fp8_e4m3", scales=path)
    qkv.QKVCache(other, "fp8_e4m3", scales=load_scales(made))  # the way out: tensors are taken as they are


def test_shapes_are_checked_with_or_without_metadata(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    states = torch.randn(1, 1, 3, 16)
    for scales, message in (
        (some_scales(heads=2), r"key scales must be \[kv_heads\] = \[1\], not \[2\]"),
        (some_scales(dim=8), r"key_centre must be .* = \[1, 16\], not \[1, 8\]"),
    ):
        save_scales(path, scales, tiny_model.config, "int8")
        for source in (path, scales):
            cache = qkv.QKVCache(tiny_model.config, "int8", scales=source)
            with pytest.raises(ValueError, match=message):
                cache.update(states, states, 0)
            assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "metadata",
    [
        {"qkv": "0.1.0"},
        {"qkv": "0.1.0", "model": "{", "cache_format": "int8"},
        {"qkv": "0.1.0", "model": "[]", "cache_format": "int8"},
        {"qkv": "0.1.0", "model": "{}"},
    ],
)
def test_damaged_metadata_are_refused(tiny_model: PreTrainedModel, tmp_path: Path, metadata: dict[str, str]) -> None:
    path = tmp_path / "scales.safetensors"
    save_file(some_scales(), path, metadata=metadata)
    with pytest.raises(ValueError, match=r"metadata of the scales in .* are damaged"):
        qkv.QKVCache(tiny_model.config, "int8", scales=path)


# ---- for which format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "fp8_e4m3"}, "made for int8, but layer 0 stores its keys as fp8_e4m3"),
        ({"value_format": "fp8_e5m2"}, "made for int8, but layer 0 stores its values as fp8_e5m2"),
        ({"layers": {1: {"format": "fp8_e4m3"}}}, "made for int8, but layer 1 stores its keys as fp8_e4m3"),
        ({"format": "fp8_e4m3", "key_format": "int8"}, "made for int8, but layer 0 stores its values as fp8_e4m3"),
    ],
)
def test_scales_of_another_format_are_refused(
    tiny_model: PreTrainedModel, made: Path, options: dict[str, Any], words: str
) -> None:
    message = refusal(tiny_model.config, made, **options)
    assert words in message
    assert "qkv calibrate --format fp8_e" in message
    assert "made for int8" in refusal(None, made, **options)


def test_only_the_side_that_a_file_is_about_needs_its_format(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "keys.safetensors"
    keys = {name: tensor for name, tensor in some_scales(dim=16).items() if "key" in name}
    save_scales(path, keys, tiny_model.config, "int8")
    cache = qkv.QKVCache(tiny_model.config, "fp8_e4m3", key_format="int8", scales=path)
    rows = cache.stats()["layers"]
    assert [(row["key_format"], row["granularity"]) for row in rows] == [("int8", "head/token")] * 2


def test_a_set_up_in_yaml_is_checked_too(made: Path, tmp_path: Path) -> None:
    setup = tmp_path / "mine.yaml"
    qkv.CacheConfig("int8", scales=str(made)).to_yaml(setup)
    assert qkv.QKVCache(make_tiny_model().config, setup).stats()["layers"][0]["granularity"] == "head"
    with pytest.raises(ValueError, match="were made for another model"):
        qkv.QKVCache(make_tiny_model(num_hidden_layers=3).config, setup)


def test_a_copy_of_a_cache_keeps_its_scales(tiny_model: PreTrainedModel, made: Path) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8", scales=made)
    twin = copy.deepcopy(cache)
    assert isinstance(twin._scales, Scales)
    assert twin._scales.metadata == cache._scales.metadata
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        for one, other in zip(ours.store._given, theirs.store._given, strict=True):
            assert torch.equal(one, other)
