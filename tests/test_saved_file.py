"""The file of a saved cache: what it holds, how it is used, and that what is damaged or of others is refused."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damaged, put_together, split, with_another_header
from safetensors import safe_open
from saving import LLAMA, MISTRAL, go_on, made, run, store_of
from stores import assert_same, kv
from transformers import LlamaConfig, PreTrainedModel

import qkv
from qkv import stored
from qkv.saved import MARK, NoSavedCacheError, weights_fingerprint
from qkv.scales import save_scales
from qkv.view import KVView

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_safetensors_and_says_what_it_holds(tmp_path: Path) -> None:
    cache = made(qkv.CacheConfig("int4_rot", residual_length=4), kv(300, key_dim=32, value_dim=32))
    cache.save(tmp_path / "a.kv", token_ids=torch.arange(600).view(2, 300))
    with safe_open(str(tmp_path / "a.kv"), framework="pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("token_ids").shape == (2, 300)
        codes = file.get_tensor("layers.0.packed.0.key.codes")
    plane = store_of(cache).packed[0].key
    assert torch.equal(codes[: plane.codes.numel()], plane.codes.flatten())
    assert json.loads(metadata["config"]) == cache.config.to_dict()
    assert json.loads(metadata["model"])["model_type"] == "llama"
    assert metadata["qkv"] == qkv.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]


def test_the_same_cache_gives_the_same_file_and_nothing_of_what_was_taken_back(tmp_path: Path) -> None:
    pair = kv(150, key_dim=32, value_dim=32)
    for name in ("a", "b"):
        cache = made(qkv.CacheConfig("int8", equalize=False), pair)
        if name == "b":
            cache.update(*kv(90, key_dim=32, value_dim=32, seed=9), 0)
            cache.crop(-90)
        cache.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(qkv.CacheConfig("int8"), kv(300))
    cache.save(tmp_path / "a.kv")
    old = (tmp_path / "a.kv").read_bytes()

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qkv.saved.os.fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        cache.save(tmp_path / "a.kv")
    assert (tmp_path / "a.kv").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]
    with pytest.raises(ValueError, match="cannot write"):
        cache.save(tmp_path / "nowhere" / "a.kv")


@pytest.mark.parametrize("way", [{"format": "none"}, {"format": "int8"}, {"format": "fp8_e4m3", "granularity": "head"}])
def test_nothing_is_written_to_the_file_that_is_mapped(way: dict[str, Any], tmp_path: Path) -> None:
    cache = made(qkv.CacheConfig(**way), kv(600, key_dim=32, value_dim=32))
    cache.save(tmp_path / "a.kv")
    before = (tmp_path / "a.kv").read_bytes()
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    go_on(loaded, 1)
    for one in (cache, loaded):
        one.crop(-(one.get_seq_length() - 100))  # into the middle of what is mapped
        one.update(*kv(400, key_dim=32, value_dim=32, seed=7), 0)
        one.reorder_cache(torch.tensor([1, 0]))
        one.crop(-450)
        one.update(*kv(40, key_dim=32, value_dim=32, seed=8), 0)
    assert (tmp_path / "a.kv").read_bytes() == before
    twin = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    assert_same(store_of(twin), store_of(made(cache.config, kv(600, key_dim=32, value_dim=32))))
    # The file goes; what is mapped stays.
    (tmp_path / "a.kv").unlink()
    go_on(twin, 1)


def test_full_segments_are_used_where_they_lie_in_the_file_and_nbytes_counts_them(tmp_path: Path) -> None:
    cache = made(qkv.CacheConfig("int8", residual_length=4), kv(930, key_dim=32, value_dim=32))
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    store = store_of(loaded)
    assert store.packed[-1].room
    assert [segment.shared for segment in store.packed] == [True] * (len(store.packed) - 1) + [False]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux says there what is mapped")
    line = next(line for line in maps.read_text().splitlines() if line.endswith(str(tmp_path / "a.kv")))
    start, end = (int(x, 16) for x in line.split()[0].split("-"))
    for segment in store.packed:
        for plane in segment.planes():
            assert (start <= plane.codes.data_ptr() < end) == segment.shared
    assert loaded.nbytes() == cache.nbytes() == qkv.nbytes([loaded])
    twin = copy.deepcopy(loaded)
    assert not any(start <= s.key.codes.data_ptr() < end for s in store_of(twin).packed)
    assert_same(store_of(twin), store)


def test_a_prefix_of_4096_tokens_is_ready_in_milliseconds(tmp_path: Path) -> None:
    """The shape of SmolLM2-135M at 8 bits: 49 MB."""
    config = LlamaConfig(num_hidden_layers=30, num_key_value_heads=3, head_dim=64, attn_implementation="qkv")
    cache = qkv.QKVCache(config, "int8", equalize=False)
    pair = kv(4096, batch=1, heads=3, key_dim=64, value_dim=64)
    for layer in range(30):
        cache.update(*pair, layer)
    cache.save(tmp_path / "a.kv")
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(7):
        for verify, times in took.items():
            began = time.perf_counter()
            qkv.QKVCache.load(tmp_path / "a.kv", config, verify=verify)
            times.append(time.perf_counter() - began)
    # The quickest of some: what else the machine does is not meant. Usual are 30 and 55 ms.
    assert min(took[True]) < 0.1
    assert min(took[False]) < 0.07


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a.kv"
    made(qkv.CacheConfig("int4_rot", residual_length=4), kv(300, key_dim=32, value_dim=32)).save(path)
    return path


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (LlamaConfig(num_hidden_layers=1, num_key_value_heads=4, head_dim=32), "num_key_value_heads"),
        (LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, head_dim=32), "num_hidden_layers"),
        (MISTRAL, "model_type"),
        (LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=32, rope_theta=7.0), "rope"),
    ],
)
def test_another_model_is_refused(saved: Path, other: Any, word: str) -> None:
    with pytest.raises(ValueError, match=f"another model: .*{word}"):
        qkv.QKVCache.load(saved, other)


def test_something_else_than_a_configuration_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.config"):
        qkv.QKVCache.load(saved, "int8")


@pytest.mark.parametrize(
    ("expected", "word"),
    [
        ("int8", "format is 'int4_rot' there and 'int8'"),
        ("int4", "format is 'int4_rot' there and 'int4'"),
        ("int4_rot", "residual_length is 4 there"),
        (qkv.CacheConfig("int4_rot", residual_length=4, value_format="int4"), "value_format is None there"),
        (qkv.CacheConfig("int4_rot", residual_length=4, key_granularity="token"), "key_granularity"),
        (qkv.CacheConfig("int4_rot", residual_length=4, equalize=False), "equalize"),
    ],
)
def test_a_cache_of_another_kind_than_expected_is_refused(saved: Path, expected: Any, word: str) -> None:
    """Case 18."""
    with pytest.raises(ValueError, match=word):
        qkv.QKVCache.load(saved, LLAMA, expected)


def test_what_computes_is_no_part_of_what_is_expected(saved: Path) -> None:
    expected = qkv.CacheConfig("int4_rot", residual_length=4, backend="reference")
    assert qkv.QKVCache.load(saved, LLAMA, expected).config.backend == "reference"
    assert qkv.QKVCache.load(saved, LLAMA).config.backend == "auto"


def test_another_rotation_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 18: codes that were rotated with other signs are noise."""
    from qkv import storage

    right = storage.rotation_signs
    monkeypatch.setattr(storage, "rotation_signs", lambda dim, device=None: right(dim, device).flip(0))
    with pytest.raises(ValueError, match="rotated in another way"):
        qkv.QKVCache.load(saved, LLAMA)


def test_a_format_that_means_something_else_now_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 18: the same name, and other codes."""
    monkeypatch.setattr(type(qkv.formats.__globals__["get_format"]("int4_rot")), "clip", 0.5)
    with pytest.raises(ValueError, match="key format is"):
        qkv.QKVCache.load(saved, LLAMA)


def test_codes_in_the_order_of_another_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(qkv.CacheConfig("int8"), kv(300)).save(tmp_path / "a.kv")
    right = stored.layout_for
    monkeypatch.setattr(stored, "layout_for", lambda device, *rest: right(torch.device("cuda"), *rest))
    with pytest.raises(ValueError, match="the order of another device"):
        qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)


def test_other_weights_are_refused(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8")
    run(tiny_model, cache, torch.arange(20)[None])
    cache.save(tmp_path / "a.kv", model=tiny_model)
    tuned = copy.deepcopy(tiny_model)
    assert weights_fingerprint(tuned) == weights_fingerprint(tiny_model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    assert qkv.QKVCache.load(tmp_path / "a.kv", tiny_model.config, model=tiny_model).get_seq_length() == 20
    for other in (tuned, copy.deepcopy(tiny_model).bfloat16()):
        with pytest.raises(ValueError, match="other weights"):
            qkv.QKVCache.load(tmp_path / "a.kv", tiny_model.config, model=other)
    cache.save(tmp_path / "a.kv")
    with pytest.raises(ValueError, match="save it with model="):
        qkv.QKVCache.load(tmp_path / "a.kv", tiny_model.config, model=tiny_model)


@pytest.mark.parametrize("ids", [torch.arange(299), torch.zeros(300), torch.zeros(1, 1, 300, dtype=torch.long)])
def test_token_ids_that_are_not_those_of_the_cache_are_refused(ids: torch.Tensor, tmp_path: Path) -> None:
    cache = made(qkv.CacheConfig("int8"), kv(300))
    with pytest.raises(ValueError, match="token_ids must be whole numbers"):
        cache.save(tmp_path / "a.kv", ids)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    from transformers.cache_utils import DynamicIndexedLayer

    cache = made(qkv.CacheConfig("int8"), kv(30))
    cache.layers.append(DynamicIndexedLayer())
    with pytest.raises(ValueError, match="layer 1 is a DynamicIndexedLayer"):
        cache.save(tmp_path / "a.kv")


def test_what_is_no_saved_cache_is_refused(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("text", b"hello, world, this is a text" * 9), ("zeros", bytes(999))):
        (tmp_path / name).write_bytes(content)
    save_scales(tmp_path / "scales", {"layers.0.key_scale": torch.ones(2)}, LLAMA, "int8")
    for name in ("empty", "text", "zeros", "scales", "nothing", "."):
        with pytest.raises(NoSavedCacheError, match=r"no cache that qkv saved|cannot read"):
            qkv.QKVCache.load(tmp_path / name, LLAMA)


def test_another_version_is_refused_by_its_name(saved: Path) -> None:
    header, data = split(saved.read_bytes())
    header["__metadata__"] |= {MARK: "7", "qkv": "9.9"}
    saved.write_bytes(put_together(header, data))
    with pytest.raises(ValueError, match=r"saved by qkv 9\.9 in version '7'"):
        qkv.QKVCache.load(saved, LLAMA)


def test_five_hundred_damaged_files_are_each_refused(saved: Path) -> None:
    data, chance, refused = saved.read_bytes(), random.Random(1), 0
    while refused < 500:
        bad = damaged(data, chance)
        if bad == data:
            continue
        saved.write_bytes(bad)
        with pytest.raises(ValueError, match=str(saved)):
            qkv.QKVCache.load(saved, LLAMA)
        refused += 1
    saved.write_bytes(data)
    qkv.QKVCache.load(saved, LLAMA)


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    """Of the header every third."""
    path = tmp_path / "a.kv"
    made(qkv.CacheConfig("int8", equalize=False), kv(2, batch=1, heads=1, key_dim=2, value_dim=2)).save(path)
    data = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for at in (*range(0, header_end, 3), *range(header_end, len(data))):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(ValueError, match=str(path)):
            qkv.QKVCache.load(path, LLAMA)


def test_without_verifying_the_header_and_the_size_are_checked_all_the_same(saved: Path) -> None:
    data = saved.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for bad in (data[:-1], data + b"x", data[:300] + bytes([data[300] ^ 4]) + data[301:]):
        saved.write_bytes(bad)
        with pytest.raises(ValueError, match=str(saved)):
            qkv.QKVCache.load(saved, LLAMA, verify=False)
    assert end > 301
    saved.write_bytes(data[:-100] + bytes([data[-100] ^ 4]) + data[-99:])
    qkv.QKVCache.load(saved, LLAMA, verify=False)


def test_headers_whose_checksum_holds_but_that_describe_no_cache_are_refused_or_harmless(saved: Path) -> None:
    """As another library might write them: nothing reads or writes outside of the memory that there is."""
    data, chance = saved.read_bytes(), random.Random(2)
    refused = 0
    for _ in range(300):
        saved.write_bytes(with_another_header(data, chance))
        try:
            loaded = qkv.QKVCache.load(saved, LLAMA)
        except ValueError:
            refused += 1
            continue
        assert loaded.nbytes() < 10 * len(data)
        if store_of(loaded).shape is not None:
            KVView(store_of(loaded)).decode()
            store_of(loaded).append(*kv(30, *store_of(loaded).shape))
    assert refused > 150
