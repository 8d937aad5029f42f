"""Saved caches: what is loaded goes on as if it had never been away."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROSE
from families import FAMILIES, VOCABULARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import LLAMA, MISTRAL, go_on, made, run, store_of
from setups import SETUPS
from stores import SOME, assert_same, bits, config_of, configs, exact_tokens, joined, kv, part, sizes
from transformers import Gemma3TextConfig, PreTrainedModel

import qkv
from qkv.named_caches import as_argument
from qkv.scales import save_scales
from qkv.storage import LayerStore
from qkv.view import KVView

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


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
