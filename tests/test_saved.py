"""Saved caches: what is loaded goes on as if it had never been away, and what is damaged or of others is refused."""

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
from conftest import PROSE, Command
from damage import damaged, put_together, split, with_another_header
from families import FAMILIES, VOCABULARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from setups import SETUPS
from stores import SOME, assert_same, bits, config_of, configs, exact_tokens, joined, kv, part, sizes
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedModel

import qkv
from qkv import stored
from qkv.named_caches import as_argument
from qkv.saved import MARK, NoSavedCacheError, weights_fingerprint
from qkv.scales import save_scales
from qkv.storage import LayerStore
from qkv.view import KVView

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

# As after qkv.enable(model): no update decodes what is stored.
LLAMA = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=32, attn_implementation="qkv")
MISTRAL = MistralConfig(num_hidden_layers=1, sliding_window=40, attn_implementation="qkv")


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


def made(config: qkv.CacheConfig, pair: tuple[torch.Tensor, torch.Tensor], model: Any = LLAMA, **more: Any) -> Any:
    cache = qkv.QKVCache(model, config, **more)
    cache.update(*pair, 0)
    return cache


def store_of(cache: qkv.QKVCache) -> LayerStore:
    return cache.layers[0].store


def structure(store: LayerStore) -> dict[str, Any]:
    """How tokens lie in segments, on which the order of sums in attention depends; and what comes of later tokens."""
    found: dict[str, Any] = {name: getattr(store, name) for name in ("length", "first", "shape", "_open", "_encoded")}
    found["packed"] = [(s.start, s.length, s.capacity) for s in store.packed]
    found["others"] = [None if s is None else (s.start, s.length, s.capacity) for s in (store.sink, store.residual)]
    for name in ("_key_head", "_value_head"):
        scale = getattr(store, name)
        held = () if scale is None else (scale.current, scale._first)
        found[name] = [None if x is None else bits(x).tolist() for x in held]
    return found


def assert_alike(a: LayerStore, b: LayerStore) -> None:
    assert structure(a) == structure(b)
    if a.shape is not None and a.length > a.first:
        assert_same(a, b)
    assert a.nbytes() == b.nbytes()


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


WINDOWED = {"residual_length": 20, "sink_tokens": 5}


@pytest.mark.parametrize(
    ("setup", "length", "window"),
    [
        *((setup, 150, window) for setup in SETUPS for window in ({}, WINDOWED)),
        *((setup, length, {}) for setup in SOME for length in (0, 30, 700)),
    ],
)
def test_a_loaded_store_is_the_saved_one_and_goes_on_as_it_would(
    setup: str, length: int, window: dict[str, int], tmp_path: Path
) -> None:
    """Warm-ups unfinished and finished, groups cut anywhere, scales per head that have grown and grow on."""
    pair = kv(length, batch=2, growing=1.0, **(sizes(setup) or {"key_dim": 32, "value_dim": 32}))
    cache = made(config_of(setup, **window), pair)
    before = structure(store_of(cache))
    cache.save(tmp_path / "a.kv")
    assert structure(store_of(cache)) == before
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, cache.config)
    assert_alike(store_of(loaded), store_of(cache))
    go_on(cache, 3)
    go_on(loaded, 3)
    assert_alike(store_of(loaded), store_of(cache))
    # From a cache that came out of a file, which goes on in its own right.
    loaded.save(tmp_path / "a.kv")
    assert_alike(store_of(qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)), store_of(cache))
    go_on(cache, 4)
    go_on(loaded, 4)
    assert_alike(store_of(loaded), store_of(cache))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configs(quantized=False),
    lengths=st.tuples(st.integers(0, 400), st.integers(0, 80), st.integers(1, 80)),
    static=st.booleans(),
    sliding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_cache_in_any_state_is_loaded_as_it_was(
    config: qkv.CacheConfig, lengths: tuple[int, int, int], static: bool, sliding: bool, seed: int, tmp_path: Path
) -> None:
    model = MISTRAL if sliding else LLAMA
    first, cropped, more = lengths
    pair = kv(first + more, batch=1, key_dim=32, value_dim=32, seed=seed, growing=1.5)
    cache = qkv.QKVCache(model, config, max_cache_len=1000 if static else None)
    cache.activate_past_recording()
    if first:
        cache.update(*part(pair, 0, first), 0)
    cache.crop(-cropped)
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", model, config)
    for _ in range(2):
        assert structure(store_of(loaded)) == structure(store_of(cache))
        for one in (cache, loaded):
            one.update(*part(pair, first, first + more), 0)
        assert structure(store_of(loaded)) == structure(store_of(cache))
        assert_same(store_of(loaded), store_of(cache))
        for one in (cache, loaded):
            one.crop(-min(more, 30))
    assert loaded.is_recording_past(0) == cache.is_recording_past(0)
    assert loaded.get_max_length() == cache.get_max_length()


HYBRIDS = ["Llama", "Mistral", "Gemma 3", "Llama 4", "gpt-oss", "DeepSeek-V3"]
HYBRIDS += ["Qwen3-Next", "Falcon-H1", "Bamba", "LFM2", "Jamba", "Inkling"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_families_go_on_after_a_load_bit_for_bit(name: str, static: bool, tmp_path: Path) -> None:
    """Windows, chunks and the states of linear attention among them."""
    model = FAMILIES[name]()
    qkv.enable(model)
    ids = torch.randint(3, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(5))
    cache = qkv.QKVCache(model.config, format="int8", residual_length=8, max_cache_len=100 if static else None)
    run(model, cache, ids[:, :30])
    cache.save(tmp_path / "a.kv", model=model)
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", model.config, model=model)
    assert loaded.nbytes() == cache.nbytes() or static
    for start, end in ((30, 45), *((t, t + 1) for t in range(45, 60))):
        assert torch.equal(run(model, cache, ids[:, start:end]), run(model, loaded, ids[:, start:end]))


@torch.no_grad()
def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True).logits


WAYS: list[dict[str, Any]] = [
    {"format": "none"},
    {"format": "int8"},
    {"format": "fp8_e4m3", "granularity": "head", "sink_tokens": 4},
    {"format": "int4_rot", "key_granularity": "channel", "key_group_size": 32},
    {"format": "int4", "residual_length": 32, "prefill": "exact"},
]


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_generation_after_a_load_is_generation_without_it(
    way: dict[str, Any], options: dict[str, Any], wide_model: PreTrainedModel, tmp_path: Path
) -> None:
    qkv.enable(wide_model)
    ids = torch.randint(0, 250, (1, 150), generator=torch.Generator().manual_seed(2))
    texts = []
    for load in (False, True):
        cache = qkv.QKVCache(wide_model.config, **way)
        run(wide_model, cache, ids[:, :-1])
        if load:
            cache.save(tmp_path / "a.kv", ids[:, :-1])
            cache = qkv.QKVCache.load(tmp_path / "a.kv", wide_model.config)
            assert torch.equal(cache.loaded_token_ids, ids[:, :-1])
        everything = {"attention_mask": torch.ones_like(ids), **as_argument(cache), **options}
        texts.append(wide_model.generate(ids, **everything, max_new_tokens=24, do_sample=False))
    assert torch.equal(*texts)


def test_beams_go_on_after_a_load(wide_model: PreTrainedModel, tmp_path: Path) -> None:
    """In the middle of a beam search: rows are rearranged before and after."""
    qkv.enable(wide_model)
    ids = torch.randint(0, 250, (3, 90), generator=torch.Generator().manual_seed(2))
    cache = qkv.QKVCache(wide_model.config, "int8", residual_length=4)
    run(wide_model, cache, ids[:, :70])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", wide_model.config)
    for one in (cache, loaded):
        one.reorder_cache(torch.tensor([1, 1, 0]))
    for t in range(70, 90):
        assert torch.equal(*(run(wide_model, one, ids[:, t : t + 1]) for one in (cache, loaded)))


def test_given_scales_come_out_of_the_file(tmp_path: Path) -> None:
    """The file of scales need not be there any more."""
    given = {"layers.0.key_scale": torch.tensor([0.1, 0.2]), "layers.0.value_scale": torch.tensor([0.3, 0.1])}
    save_scales(tmp_path / "scales.safetensors", given, LLAMA, "fp8_e4m3")
    config = qkv.CacheConfig("fp8_e4m3", granularity="head", scales=str(tmp_path / "scales.safetensors"))
    cache = made(config, kv(50, key_dim=32, value_dim=32))
    cache.save(tmp_path / "a.kv")
    (tmp_path / "scales.safetensors").unlink()
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    assert loaded.config == config
    go_on(cache, 1)
    go_on(loaded, 1)
    assert_alike(store_of(loaded), store_of(cache))


def test_a_cache_made_without_a_configuration_is_loaded_without_one(tmp_path: Path) -> None:
    cache = made(qkv.CacheConfig("int8"), kv(200, key_dim=32, value_dim=32), model=None)
    cache.save(tmp_path / "a.kv")
    assert_alike(store_of(qkv.QKVCache.load(tmp_path / "a.kv")), store_of(cache))
    with pytest.raises(ValueError, match="without a model's configuration"):
        qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    made(qkv.CacheConfig("int8"), kv(200)).save(tmp_path / "a.kv")
    with pytest.raises(ValueError, match="load it with one"):
        qkv.QKVCache.load(tmp_path / "a.kv")


def test_it_is_loaded_in_inference_mode_and_used_outside(tmp_path: Path) -> None:
    made(qkv.CacheConfig("int8", residual_length=3), kv(300, key_dim=32, value_dim=32)).save(tmp_path / "a.kv")
    with torch.inference_mode():
        loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    go_on(loaded, 1)


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


# ---- the cases -------------------------------------------------------------------------------------------------------


def test_a_loaded_prefix_equals_a_fresh_one_and_a_deep_copy_and_shares_no_memory_with_another(tmp_path: Path) -> None:
    """Case 12."""
    pair, more = kv(300, key_dim=32, value_dim=32), kv(50, key_dim=32, value_dim=32, seed=1)
    config = qkv.CacheConfig("int8", residual_length=10)
    cache = made(config, pair)
    cache.save(tmp_path / "a.kv")
    first, second = (qkv.QKVCache.load(tmp_path / "a.kv", LLAMA) for _ in range(2))
    twin = copy.deepcopy(first)
    first.update(*more, 0)
    first.crop(-200)
    first.update(*more, 0)
    for one in (second, twin):
        one.update(*more, 0)
        assert_same(store_of(one), store_of(made(config, joined(pair, more))))
    held = [{x.untyped_storage().data_ptr() for x in store_of(one).tensors()} for one in (first, second, twin)]
    assert not held[0] & held[1]
    assert not held[1] & held[2]


def test_the_file_is_as_large_as_what_is_stored_and_counts_everything(tmp_path: Path) -> None:
    """Case 17: scales, residual window and header too; spare room is not written."""
    cache = made(qkv.CacheConfig("int4", residual_length=32), kv(1000, batch=1, key_dim=64, value_dim=64))
    cache.save(tmp_path / "a.kv")
    stored_bytes = store_of(cache).stored_bits() / 8
    assert stored_bytes <= (tmp_path / "a.kv").stat().st_size <= stored_bytes + 12_000
    static = made(
        qkv.CacheConfig("int4", residual_length=32),
        kv(1000, batch=1, key_dim=64, value_dim=64),
        max_cache_len=50_000,
    )
    static.save(tmp_path / "b.kv")
    assert (tmp_path / "b.kv").stat().st_size <= stored_bytes + 12_000


def test_saving_takes_no_memory_that_grows_with_what_is_full(tmp_path: Path) -> None:
    """Case 14: tensors are written from where they are."""
    cache = made(qkv.CacheConfig("none"), kv(8000, key_dim=32, value_dim=32))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cache.save(tmp_path / "a.kv")
    taken = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert taken <= 300 * 2 * 2 * 2 * 32 * 4 < cache.nbytes() / 20


def test_without_verifying_a_load_reads_nothing_but_the_header_and_what_takes_tokens(tmp_path: Path) -> None:
    """Case 14: a page of the file comes into memory when it is attended to."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("only Linux says there what is in memory")
    cache = made(qkv.CacheConfig("none"), kv(8000, key_dim=32, value_dim=32))
    cache.save(tmp_path / "a.kv")

    def in_memory() -> int:
        lines = iter(smaps.read_text().splitlines())
        found = next(line for line in lines if line.endswith(str(tmp_path / "a.kv")))
        assert "rw-p" in found
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024

    for verify in (False, True):
        loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, verify=verify)
        assert in_memory() < cache.nbytes() / 4
        KVView(store_of(loaded)).decode()
        assert in_memory() > cache.nbytes() * 0.9
        del loaded


def test_sliding_layers_hold_their_window_after_a_load(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=48,
        attn_implementation="qkv",
    )
    cache = qkv.QKVCache(config, "int8", residual_length=8)
    pair = kv(400, key_dim=16, value_dim=16)
    for layer in (0, 1):
        cache.update(*part(pair, 0, 300), layer)
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", config)
    for t in range(300, 400):
        for one in (cache, loaded):
            for layer in (0, 1):
                one.update(*part(pair, t, t + 1), layer)
    for layer in (0, 1):
        stores = [one.layers[layer].store for one in (cache, loaded)]
        assert structure(stores[0]) == structure(stores[1])
        assert_same(*stores)
        assert exact_tokens(stores[0]) == exact_tokens(stores[1])


# ---- the command line ------------------------------------------------------------------------------------------------


def answer(command: Command, folder: Path, prompt: str, *more: object) -> tuple[dict[str, Any], str]:
    """The row of results, and what stands on standard error."""
    options = ("-n", 12, "--model", folder, "--json", "-", *more)
    done = command("generate", "-p", prompt, *options)
    assert done.status == 0, done.err
    return json.loads(done.out)["rows"][0], done.err


@pytest.mark.parametrize("format", ["none", "int8", "k5v4"])
def test_generate_goes_on_from_the_cache_of_the_prompts_first_tokens(
    format: str, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    prefix, file = "the quick brown fox jumps over the lazy dog; " * 5, tmp_path / "p.kv"
    more = ("--format", format, "--prefix-cache", file)
    first, said = answer(command, tiny_folder, prefix, *more)
    assert f"saved it to {file}" in said
    assert first["loaded_tokens"] == 0
    content = file.read_bytes()
    again, said = answer(command, tiny_folder, prefix, *more)
    assert f"{first['prompt_tokens'] - 1} tokens from {file}" in said
    assert again["loaded_tokens"] == again["prompt_tokens"] - 1
    assert again["text"] == first["text"]
    longer, said = answer(command, tiny_folder, prefix + "and then", *more)
    assert f"{first['prompt_tokens'] - 1} tokens from {file}" in said
    assert file.read_bytes() == content
    alone, _ = answer(command, tiny_folder, prefix + "and then", "--format", format)
    assert alone["prompt_tokens"] == longer["prompt_tokens"] == longer["loaded_tokens"] + 9
    if format == "none":
        assert longer["text"] == alone["text"]


@pytest.mark.parametrize("format", ["none", "int8", "dynamic"])
def test_several_prompts_are_answered_on_forks_of_what_they_begin_with(
    format: str, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    prefix = "a long text about which there are questions. " * 6
    questions = [prefix + "what?", prefix + "where is it?", prefix + "w"]
    ours = format != "dynamic"
    more = ["--format", format, "-n", 8, "--model", tiny_folder, "--json", "-"]
    more += ["--prefix-cache", tmp_path / "p.kv"] if ours else []
    options = [word for question in questions for word in ("-p", question)]
    rows = []
    for said in ("saved it to", "tokens from"):
        done = command("generate", *options, *more)
        assert done.status == 0
        assert said in done.err or not ours
        rows.append(json.loads(done.out)["rows"])
    first, again = rows
    assert [row["text"] for row in first] == [row["text"] for row in again]
    assert [row["prompt_tokens"] - len(question) for row, question in zip(first, questions, strict=True)] == [
        first[0]["prompt_tokens"] - len(questions[0])
    ] * 3
    assert all(row["loaded_tokens"] >= len(prefix) - 1 for row in again) == ours
    if format in ("none", "dynamic"):
        alone = [json.loads(command("generate", "-p", text, *more[:8]).out)["rows"][0]["text"] for text in questions]
        assert [row["text"] for row in first] == alone
    if ours:
        # The file of one prompt holds less than what these three begin with.
        (tmp_path / "p.kv").unlink()
        command("generate", "-p", prefix[:90], *more)
        done = command("generate", *options, *more)
        assert "loaded the cache of" in done.err
        rows = json.loads(done.out)["rows"]
        assert 0 < rows[0]["loaded_tokens"] <= 100
        assert [row["text"] for row in rows] == [row["text"] for row in first] or format != "none"


def test_generate_computes_anew_what_does_not_match_and_says_why(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.kv"
    prompt = "hello, world; " * 9
    for changes, word in (
        ((prompt, "--prefix-cache", file), "saved it to"),
        (("goodbye " + prompt, "--prefix-cache", file), "other tokens"),
        ((prompt, "--prefix-cache", file), "other tokens"),
        ((prompt, "--prefix-cache", file, "--format", "int4"), "format is 'int8' there"),
        ((prompt, "--prefix-cache", file, "--format", "int4", "--dtype", "bfloat16"), "of another dtype"),
        ((prompt[:40], "--prefix-cache", file, "--format", "int4", "--dtype", "bfloat16"), "other tokens"),
    ):
        row, said = answer(command, tiny_folder, *changes)
        assert word in said
        assert "saved it to" in said
        assert row["loaded_tokens"] == 0
    data = file.read_bytes()
    file.write_bytes(data[:-7])
    _, said = answer(command, tiny_folder, prompt[:40], "--prefix-cache", file)
    assert "is damaged" in said


def test_generate_writes_over_no_other_file(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("do not lose this")
    for more, word in (
        (("--prefix-cache", mine), "no cache that qkv saved"),
        (("--prefix-cache", tmp_path), "is a folder"),
        (("--prefix-cache", tmp_path / "no" / "x"), "there is no folder"),
        (("--prefix-cache", tmp_path / "x", "--format", "dynamic"), "caches of qkv"),
    ):
        done = command("generate", "-p", "hello", "--model", tiny_folder, *more)
        assert done.status == 2
        assert word in done.err.splitlines()[-1]
    assert mine.read_text() == "do not lose this"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# ---- a real model ---------------------------------------------------------------------------------------------------


def test_smollm2_answers_on_a_loaded_prefix_and_on_its_forks_as_on_the_one_it_read(
    smollm2: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    """Case 12, 14 and 17: the same words, and the prefix in memory once."""
    model, tokenizer = smollm2
    qkv.enable(model)
    ids = tokenizer(PROSE, return_tensors="pt")["input_ids"][:, :400]
    cache = qkv.QKVCache(model.config, "int8")
    run(model, cache, ids)
    cache.save(tmp_path / "a.kv", ids, model=model)
    assert (tmp_path / "a.kv").stat().st_size < 1.03 * cache.nbytes()
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", model.config, "int8", model=model)
    questions = [tokenizer(text, return_tensors="pt")["input_ids"] for text in (" In short,", " And then she")]
    for question, fork in zip(questions, loaded.fork(2), strict=True):
        whole = torch.cat([ids, question], dim=1)
        answers = [
            model.generate(
                whole, attention_mask=torch.ones_like(whole), **as_argument(one), max_new_tokens=6, do_sample=False
            )
            for one in (copy.deepcopy(cache), fork)
        ]
        assert torch.equal(*answers)
    forks = loaded.fork(8)
    assert qkv.nbytes([loaded, *forks]) < 6 * loaded.nbytes()  # of 400 tokens, 144 are in segments that grow
