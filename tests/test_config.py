"""The description of a cache: what it refuses, and that it stays what it is."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import CacheConfig
from qkv.formats import get_format
from qkv.presets import PRESETS
from qkv.storage import LayerStore

FULL: dict[str, Any] = {
    "format": "int8",
    "key_format": "fp8_e4m3",
    "value_format": "none",
    "granularity": "head",
    "key_granularity": "channel",
    "value_granularity": "group",
    "group_size": 32,
    "key_group_size": 64,
    "value_group_size": 16,
    "equalize": False,
    "residual_length": 16,
    "sink_tokens": 4,
    "scales": "scales.safetensors",
    "prefill": "exact",
    "backend": "reference",
    "layers": {
        0: {"format": "none"},
        3: {"residual_length": 128, "granularity": "token"},
        5: {"equalize": True, "key_granularity": "group", "value_group_size": 128},
    },
}


def configs() -> st.SearchStrategy[CacheConfig]:
    """Any configuration that is allowed."""
    names = st.sampled_from(["none", "int8", "fp8_e4m3", "int4_rot"])
    granularities = st.none() | st.sampled_from(["token", "head", "group", "channel"])
    sizes = st.none() | st.integers(1, 128)
    changes = st.fixed_dictionaries(
        {},
        optional={
            "format": names,
            "sink_tokens": st.integers(0, 9),
            "granularity": st.sampled_from(["token", None]),
            "value_granularity": granularities,
            "key_group_size": sizes,
            "equalize": st.booleans(),
        },
    )
    return st.builds(
        CacheConfig,
        format=names,
        key_format=st.none() | names,
        granularity=granularities,
        key_granularity=granularities,
        group_size=sizes,
        value_group_size=sizes,
        equalize=st.none() | st.booleans(),
        residual_length=st.integers(0, 300),
        sink_tokens=st.integers(0, 300),
        prefill=st.sampled_from(["stored", "exact"]),
        backend=st.sampled_from(["auto", "cpu", "reference"]),
        layers=st.dictionaries(st.integers(0, 40), changes, max_size=3),
    )


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "format must be the name of a format, not None"),
        ({"format": 8}, "format must be the name of a format, not 8"),
        ({"key_format": 8}, "key_format must be the name"),
        ({"value_format": ["int8"]}, "value_format must be the name"),
        ({"granularity": "row"}, "granularity='row' is not known; use one of token, head, group, channel, tensor"),
        ({"granularity": ["token"]}, "granularity=.* is not known"),
        ({"group_size": 0}, "group_size must be a whole number of at least 1"),
        ({"group_size": 2.5}, "group_size must be a whole number"),
        ({"key_group_size": 0}, "key_group_size must be a whole number of at least 1"),
        ({"value_group_size": "32"}, "value_group_size must be a whole number"),
        ({"key_granularity": "row"}, "key_granularity='row' is not known; use one of token, head, group, channel"),
        ({"value_granularity": 3}, "value_granularity=3 is not known"),
        ({"equalize": "yes"}, "equalize must be true, false or None, not 'yes'"),
        ({"equalize": 1}, "equalize must be true, false or None, not 1"),
        ({"residual_length": -1}, "residual_length must be a whole number of at least 0, not -1"),
        ({"residual_length": "128"}, "residual_length must be a whole number"),
        ({"residual_length": None}, "residual_length must be a whole number"),
        ({"sink_tokens": True}, "sink_tokens must be a whole number of at least 0, not True"),
        ({"sink_tokens": 1.0}, "sink_tokens must be a whole number"),
        ({"prefill": "fast"}, "prefill='fast' is not known; use one of stored, exact"),
        ({"backend": "gpu"}, "backend='gpu' is not known; use one of auto, cpu, triton, reference"),
        ({"layers": [0]}, "layers must map layer indices to changes"),
        ({"layers": {0: "int8"}}, r"layers\[0\] must map names to values"),
        ({"layers": {-1: {}}}, "a layer index must be a whole number of at least 0, not -1"),
        ({"layers": {"0": {}}}, "a layer index must be a whole number"),
        ({"layers": {0: {"prefill": "exact"}}}, r"layers\[0\]: unknown key 'prefill'; known keys: format, key_format"),
        ({"layers": {0: {1: 2, "x": 3}}}, r"layers\[0\]: unknown key"),
        ({"layers": {0: {"residual_length": -1}}}, r"layers\[0\]: residual_length must be a whole number"),
        ({"layers": {7: {"granularity": "row"}}}, r"layers\[7\]: granularity='row' is not known"),
        ({"layers": {7: {"equalize": 0}}}, r"layers\[7\]: equalize must be true, false or None"),
        ({"layers": {7: {"key_group_size": 0}}}, r"layers\[7\]: key_group_size must be a whole number of at least 1"),
    ],
    ids=str,
)
def test_a_value_that_is_not_allowed_is_refused_and_the_message_says_what_is(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**changes)


def test_an_unknown_key_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown key 'formt' in a cache configuration; known keys: format, key_"):
        CacheConfig.from_dict({"formt": "int8"})


@pytest.mark.parametrize("values", [None, [], "int8", 3])
def test_what_is_no_mapping_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="a cache configuration maps names to values"):
        CacheConfig.from_dict(values)


# ---- it stays what it is -------------------------------------------------------------------------------------------


def test_a_configuration_cannot_be_changed() -> None:
    config = CacheConfig.from_dict(FULL)
    with pytest.raises(FrozenInstanceError):
        config.format = "none"
    with pytest.raises(TypeError):
        config.layers[0] = {}
    with pytest.raises(TypeError):
        config.layers[0]["format"] = "int8"


def test_what_the_caller_passed_in_is_neither_changed_nor_kept() -> None:
    given_values = copy.deepcopy(FULL)
    config = CacheConfig.from_dict(given_values)
    assert given_values == FULL
    given_values["layers"][0]["format"] = "fp8_e5m2"
    given_values["layers"][1] = {}
    assert config == CacheConfig.from_dict(FULL)
    config.to_dict()["layers"][0]["format"] = "fp8_e5m2"
    assert config == CacheConfig.from_dict(FULL)


@settings(max_examples=50, deadline=None)
@given(config=configs())
def test_copies_through_dict_pickle_and_deepcopy_are_equal(config: CacheConfig) -> None:
    copies = [
        CacheConfig.from_dict(config.to_dict()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        copy.copy(config),
        replace(config),
    ]
    for other in copies:
        assert other == config
        assert hash(other) == hash(config)


def test_equal_configurations_hash_alike_whatever_the_order_of_layers() -> None:
    one = CacheConfig(layers={0: {"format": "none", "sink_tokens": 4}, 1: {}})
    other = CacheConfig(layers={1: {}, 0: {"sink_tokens": 4, "format": "none"}})
    assert one == other
    assert hash(one) == hash(other)


# ---- files ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_yaml_keeps_everything(config: CacheConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    config.to_yaml(path)
    assert CacheConfig.from_yaml(path) == config
    assert CacheConfig.from_yaml(str(path)) == config


def test_every_key_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    path.write_text(yaml.safe_dump(FULL))
    config = CacheConfig.from_yaml(path)
    assert config.to_dict() == FULL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: int8\nformt: int8\n", "unknown key 'formt'"),
        ("format: [int8\n", "not valid YAML"),
        ("residual_length: many\n", "residual_length must be a whole number"),
        ("", "maps names to values; found NoneType"),
        ("- int8\n", "maps names to values; found list"),
        ("layers:\n  '0': {format: none}\n", "a layer index must be a whole number"),
        ("1: 2\n", "unknown key 1"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_refused_with_the_name_of_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        CacheConfig.from_yaml(path)
    assert "wrong.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the cache configuration .*gone\.yaml: No such file"):
        CacheConfig.from_yaml(tmp_path / "gone.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"binary\.yaml is not valid YAML"):
        CacheConfig.from_yaml(binary)


def test_every_preset_lies_in_configs_under_its_name() -> None:
    folder = Path(__file__).parent.parent / "configs"
    for name in PRESETS:
        assert CacheConfig.from_yaml(folder / f"{name}.yaml") == CacheConfig.of(name)


def test_every_yaml_in_configs_is_valid() -> None:
    found = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.yaml"))
    assert found
    for path in found:
        config = CacheConfig.from_yaml(path)
        LayerStore(replace(config, layers={}))  # format and granularity go together


# ---- what users pass -----------------------------------------------------------------------------------------------


def test_a_configuration_is_made_from_a_name_a_path_or_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "some.yml"
    CacheConfig("fp8_e4m3", sink_tokens=4).to_yaml(path)
    assert CacheConfig.of("int8") == CacheConfig("int8")
    assert CacheConfig.of(path) == CacheConfig.of(str(path)) == CacheConfig("fp8_e4m3", sink_tokens=4)
    config = CacheConfig("none")
    assert CacheConfig.of(config) is config


@pytest.mark.parametrize("name", PRESETS)
def test_the_name_of_a_preset_is_what_it_stands_for(name: str) -> None:
    config = CacheConfig.of(name)
    assert config == CacheConfig.from_dict(PRESETS[name])
    keys, values = (int(part) for part in name[1:].split("v"))
    formats = [get_format(side) for side in (config.key_format or config.format, config.value_format or config.format)]
    assert [format.bits for format in formats] == [keys, values]
    assert CacheConfig.from_dict(config.to_dict()) == config


def test_a_preset_cannot_be_changed() -> None:
    """Case 19."""
    with pytest.raises(TypeError):
        PRESETS["k5v4"]["format"] = "int8"


@pytest.mark.parametrize("what", [None, 8, {"format": "int8"}])
def test_anything_else_is_refused(what: Any) -> None:
    with pytest.raises(ValueError, match="the name of a format or preset, a YAML path or a CacheConfig"):
        CacheConfig.of(what)


def test_changes_for_a_layer_apply_to_that_layer_alone() -> None:
    config = CacheConfig("int8", sink_tokens=4, layers={1: {"format": "none", "residual_length": 8}})
    assert config.for_layer(0) == config
    changed = config.for_layer(1)
    assert (changed.format, changed.residual_length, changed.sink_tokens) == ("none", 8, 4)
