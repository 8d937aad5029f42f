"""Saved caches with a limit: a window that goes on from a file as it was, and a file that serves where it lies."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from damage import damaged, put_together, split, with_another_header
from families import FAMILIES, VOCABULARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import configs, kv, part
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

import qkv
from qkv import saved
from qkv.named_caches import as_argument

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

LLAMA = LlamaConfig(
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, attn_implementation="qkv"
)
SINKS, TOKENS = 4, 40
SHAPE = {"key_dim": 32, "value_dim": 32}


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sliding_model() -> PreTrainedModel:
    """Layers that slide by themselves beside one that forgets because it is told to."""
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=260, sliding_window=24, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    return qkv.enable(Gemma3ForCausalLM(config).eval())


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True).logits


def windowed(model: PreTrainedModel, **options: Any) -> qkv.QKVCache:
    options.setdefault("max_tokens", TOKENS)
    return qkv.QKVCache(model.config, on_full="window", **options)


def bookkeeping(cache: qkv.QKVCache) -> list[Any]:
    """What later tokens are stored and forgotten by, of every layer."""
    found = []
    for layer in cache.layers:
        store = layer.store
        places = [(s.start, s.length, s.capacity) for s in store.segments()]
        row = [type(layer), store.length, store.first, store._open, store._encoded, places, layer.record_past]
        window = hasattr(layer, "sinks")
        row += [layer._window, layer.sinks.length, layer.sinks.count] if window else []
        found.append([*row, layer.nbytes(), layer.get_mask_sizes(3) if store.length else None])
    return found


# ---- a window --------------------------------------------------------------------------------------------------------

FORMATS = ["int8", "fp8_e4m3", "k5v4", "none", "int4"]


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("residual_length", [0, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_window_goes_on_from_a_file_bit_for_bit(
    format: str,
    residual_length: int,
    sliding: bool,
    wide_model: PreTrainedModel,
    sliding_model: PreTrainedModel,
    tmp_path: Path,
) -> None:
    """Two sequences: among the first tokens, before it is full, just full, one beyond, and past the warm-ups."""
    model = sliding_model if sliding else qkv.enable(wide_model)
    pieces = (25, 1, 1, 30, *(1,) * 6)
    for length in (3, 20, TOKENS, TOKENS + 1, 300):
        ids = prompt(length + sum(pieces), batch=2)
        untouched, cache = (windowed(model, format=format, residual_length=residual_length) for _ in range(2))
        for one in (untouched, cache):
            for start in range(0, length, 90):
                run(model, one, ids[:, start : min(length, start + 90)])
        cache.save(tmp_path / "a.kv", ids[:, :length], model=model)
        loaded = qkv.QKVCache.load(tmp_path / "a.kv", model.config, cache.config, model=model)
        assert torch.equal(loaded.loaded_token_ids, ids[:, :length])
        assert bookkeeping(loaded) == bookkeeping(untouched) == bookkeeping(cache)
        at = length
        for size in pieces:
            wanted = run(model, untouched, ids[:, at : at + size])
            assert torch.equal(run(model, loaded, ids[:, at : at + size]), wanted)
            assert torch.equal(run(model, cache, ids[:, at : at + size]), wanted)
            at += size
        assert bookkeeping(loaded) == bookkeeping(untouched)
        assert qkv.nbytes([loaded]) == loaded.nbytes() == untouched.nbytes()
        assert loaded.get_seq_length() == at
        # What was loaded is saved as it is.
        loaded.save(tmp_path / "b.kv")
        again = qkv.QKVCache.load(tmp_path / "b.kv", model.config)
        assert torch.equal(run(model, again, ids[:, :9]), run(model, untouched, ids[:, :9]))


@pytest.mark.parametrize("length", [20, TOKENS, 200])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_generation_from_a_saved_window_is_generation_without_it(
    format: str, fused: bool, length: int, wide_model: PreTrainedModel, tmp_path: Path
) -> None:
    model = qkv.enable(wide_model) if fused else wide_model
    ids, texts = prompt(length), []
    for load in (False, True):
        cache = windowed(model, format=format)
        run(model, cache, ids[:, :-1])
        if load:
            cache.save(tmp_path / "a.kv")
            cache = qkv.QKVCache.load(tmp_path / "a.kv", model.config)
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(ids, **options, **as_argument(cache), max_new_tokens=50, do_sample=False))
    assert texts[0].shape[1] == length + 50
    assert torch.equal(*texts)


def test_saving_turns_nothing_and_the_first_keys_are_written_as_they_came(
    wide_model: PreTrainedModel, tmp_path: Path
) -> None:
    from safetensors import safe_open

    qkv.enable(wide_model)
    ids = prompt(150, batch=2)
    cache = windowed(wide_model, format="none")
    run(wide_model, cache, ids[:, :SINKS])
    came = [tuple(x.clone() for x in layer.sinks.segment.rows(SINKS)) for layer in cache.layers]
    for start, end in ((SINKS, 90), (90, 149), (149, 150)):
        run(wide_model, cache, ids[:, start:end])
    sinks = [layer.sinks for layer in cache.layers]
    turned = [held.segment.rows(SINKS)[0].clone() for held in sinks]
    assert not any(torch.equal(keys, now) for (keys, _), now in zip(came, turned, strict=True))
    by = [held._by for held in sinks]
    cache.save(tmp_path / "a.kv")
    assert [held._by for held in sinks] == by
    assert all(torch.equal(held.segment.rows(SINKS)[0], now) for held, now in zip(sinks, turned, strict=True))
    with safe_open(str(tmp_path / "a.kv"), framework="pt") as file:
        for index, (keys, values) in enumerate(came):
            assert torch.equal(file.get_tensor(f"layers.{index}.sinks.key"), keys)
            assert torch.equal(file.get_tensor(f"layers.{index}.sinks.value"), values)


def test_a_window_of_another_type_goes_on_too(wide_model: PreTrainedModel, tmp_path: Path) -> None:
    model = qkv.enable(copy.deepcopy(wide_model).bfloat16())
    ids = prompt(200, batch=2)
    cache = windowed(model, format="int8", residual_length=3)
    for start in range(0, 180, 60):
        run(model, cache, ids[:, start : start + 60])
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", model.config)
    for t in range(180, 200):
        assert torch.equal(*(run(model, one, ids[:, t : t + 1]) for one in (cache, loaded)))


def test_what_is_recorded_beyond_the_window_comes_out_of_the_file(wide_model: PreTrainedModel, tmp_path: Path) -> None:
    qkv.enable(wide_model)
    ids = prompt(120)
    for record in (True, False):
        cache = windowed(wide_model, format="int8", equalize=False)
        if record:
            cache.activate_past_recording()
        run(wide_model, cache, ids[:, :70])
        cache.save(tmp_path / "a.kv")
        loaded = qkv.QKVCache.load(tmp_path / "a.kv", wide_model.config)
        assert loaded.is_recording_past(0) == record
        for one in (cache, loaded):
            if record:
                one.crop(-25)
            else:
                with pytest.raises(RuntimeError, match="activate_past_recording"):
                    one.crop(-25)
        for start, end in ((70, 71), (71, 110), (110, 120)):
            assert torch.equal(*(run(wide_model, one, ids[:, start:end]) for one in (cache, loaded)))


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 30}])
def test_a_window_that_bytes_have_set_is_the_same_after_a_load(
    limits: dict[str, int], wide_model: PreTrainedModel, tmp_path: Path
) -> None:
    qkv.enable(wide_model)
    ids = prompt(400)
    options = {"format": "int8", "equalize": False, "on_full": "window", "max_bytes": 80_000, **limits}
    for length in (0, 10, 300):
        untouched, cache = (qkv.QKVCache(wide_model.config, **options) for _ in range(2))
        if length:
            for one in (untouched, cache):
                run(wide_model, one, ids[:, :length])
        cache.save(tmp_path / "a.kv")
        loaded = qkv.QKVCache.load(tmp_path / "a.kv", wide_model.config, cache.config)
        assert [layer._window for layer in loaded.layers] == [layer._window for layer in untouched.layers]
        assert (loaded.layers[0]._window is None) == (length == 0)
        for start, end in ((300, 350), *((t, t + 1) for t in range(350, 400))):
            assert torch.equal(*(run(wide_model, one, ids[:, start:end]) for one in (untouched, loaded)))
            assert loaded.nbytes() == untouched.nbytes() <= 80_000


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=configs(quantized=False),
    sinks=st.sampled_from([1, 4, 9]),
    record=st.booleans(),
    lengths=st.tuples(st.integers(0, 350), st.integers(0, 60), st.integers(1, 80)),
    rows=st.lists(st.integers(0, 1), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_any_window_in_any_state_is_loaded_as_it_was(
    config: qkv.CacheConfig,
    sinks: int,
    record: bool,
    lengths: tuple[int, int, int],
    rows: list[int],
    seed: int,
    tmp_path: Path,
) -> None:
    first, cropped, more = lengths
    pair = kv(first + more, **SHAPE, seed=seed, growing=1.0)
    cache = qkv.QKVCache(LLAMA, config, on_full="window", max_tokens=TOKENS, sink_tokens=sinks)
    if record:
        cache.activate_past_recording()
    if first:
        cache.update(*part(pair, 0, first), 0)
        if record or first <= TOKENS:
            cache.crop(-cropped)
        cache.reorder_cache(torch.tensor(rows))
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, cache.config)
    for size in (more, 1, 1):
        assert bookkeeping(loaded) == bookkeeping(cache)
        decoded = []
        for one in (cache, loaded):
            one.update(*part(pair, first, first + size), 0)
            decoded.append(one.view(0).decode())
        assert all(torch.equal(*both) for both in zip(*decoded, strict=True))
    assert bookkeeping(loaded) == bookkeeping(cache)


FORGETFUL = ["Mistral", "Gemma 2", "Gemma 4", "gpt-oss", "Qwen3-Next", "LFM2", "GPT-2", "Cohere 2", "DeepSeek-V3"]


@pytest.mark.parametrize("name", FORGETFUL)
def test_families_go_on_past_their_window_from_a_file_and_on_forks(name: str, tmp_path: Path) -> None:
    model = qkv.enable(FAMILIES[name]())
    ids = torch.randint(3, VOCABULARY, (2, 90), generator=torch.Generator().manual_seed(5))
    cache = qkv.QKVCache(model.config, "int8", equalize=False, on_full="window", max_tokens=TOKENS)
    for start, end in ((0, 30), (30, 70)):
        run(model, cache, ids[:, start:end])
    cache.save(tmp_path / "a.kv", model=model)
    others = [qkv.QKVCache.load(tmp_path / "a.kv", model.config, cache.config, model=model), *cache.fork(2)]
    for start, end in ((70, 71), (71, 85), (85, 90)):
        wanted = run(model, cache, ids[:, start:end])
        assert all(torch.equal(run(model, other, ids[:, start:end]), wanted) for other in others)


# ---- what is refused -------------------------------------------------------------------------------------------------


def made(length: int, batch: int = 2, **options: Any) -> qkv.QKVCache:
    cache = qkv.QKVCache(LLAMA, **{"format": "int8", "equalize": False, **options})
    cache.update(*kv(length, batch=batch, **SHAPE), 0)
    return cache


WINDOW = {"on_full": "window", "max_tokens": TOKENS, "sink_tokens": SINKS}


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        (WINDOW, {**WINDOW, "max_tokens": 50}, "holds a window with max_tokens=40, and max_tokens=50 is wanted"),
        (WINDOW, {**WINDOW, "max_bytes": 9999}, "holds a window with max_bytes=None, and max_bytes=9999 is wanted"),
        (WINDOW, {"sink_tokens": SINKS}, "(on_full='window'), and on_full=None is wanted"),
        (WINDOW, {"sink_tokens": SINKS, "max_tokens": TOKENS}, "(on_full='window'), and on_full=None is wanted"),
        (WINDOW, {"on_full": "offload", "max_bytes": 9999}, "(on_full='window'), and on_full='offload' is wanted"),
        (WINDOW, {"on_full": "error", "max_tokens": 40}, "(on_full='window'), and on_full='error' is wanted"),
        (WINDOW, {**WINDOW, "sink_tokens": 3}, "sink_tokens is 4 there and 3 is wanted"),
        ({}, WINDOW, "holds all its tokens, and on_full='window' is wanted"),
        ({"on_full": "error", "max_bytes": 99999}, WINDOW, "holds all its tokens, and on_full='window' is wanted"),
    ],
    ids=str,
)
def test_another_window_than_the_saved_one_is_refused_in_a_sentence(
    there: dict[str, Any], here: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.kv"
    made(60, **there).save(path)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        qkv.QKVCache.load(path, LLAMA, qkv.CacheConfig("int8", equalize=False, **here))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("compute the cache anew")


def test_sink_tokens_that_a_window_has_by_itself_need_not_be_said(tmp_path: Path) -> None:
    described = qkv.CacheConfig("int8", equalize=False, on_full="window", max_tokens=TOKENS)
    for options, count in (({}, 4), ({"sink_tokens": 0}, 0)):
        cache = qkv.QKVCache(LLAMA, described, **options)
        cache.update(*kv(60, **SHAPE), 0)
        cache.save(tmp_path / "a.kv")
        for expected in (described, cache.config, None):
            loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, expected)
            assert loaded.config == cache.config
            assert loaded.config.sink_tokens == loaded.layers[0].sinks.count == count


@pytest.fixture(params=[{"max_tokens": TOKENS}, {"max_bytes": 200_000}], ids=str)
def window_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.kv"
    made(170, on_full="window", residual_length=3, **request.param).save(path)
    return path


def test_damaged_windows_are_each_refused(window_file: Path) -> None:
    data, chance, refused = window_file.read_bytes(), random.Random(1), 0
    while refused < 120:
        bad = damaged(data, chance)
        if bad == data:
            continue
        window_file.write_bytes(bad)
        with pytest.raises(ValueError, match=str(window_file)):
            qkv.QKVCache.load(window_file, LLAMA)
        refused += 1
    window_file.write_bytes(data)
    assert qkv.QKVCache.load(window_file, LLAMA).get_seq_length() == 170


def test_headers_of_windows_that_say_something_else_are_refused_or_harmless(window_file: Path) -> None:
    data, chance, refused = window_file.read_bytes(), random.Random(2), 0
    for _ in range(150):
        window_file.write_bytes(with_another_header(data, chance))
        try:
            loaded = qkv.QKVCache.load(window_file, LLAMA)
        except ValueError:
            refused += 1
            continue
        assert loaded.nbytes() < 10 * len(data)
        if loaded.layers[0].store.shape is not None:
            loaded.view(0).decode()
            loaded.update(*kv(3, *loaded.layers[0].store.shape), 0)
            loaded.view(0).decode()
    assert refused > 60


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ('"sinks": 4', '"sinks": 3', "3 first tokens do not go with"),
        ('"sinks": 4', '"sinks": 5', "5 first tokens do not go with"),
        ('"sinks": 4', '"sinks": -1', "is no whole number"),
        ('"sinks": 4', '"sinks": 0', "0 first tokens do not go with"),
        ('"window": 36', '"window": 35', "the window is 35 tokens there and 36 here"),
        ('"window": 36', '"window": null', "the window is None tokens there and 36 here"),
        ('"window": 36, ', "", "does not describe a cache"),
    ],
)
def test_a_window_whose_parts_do_not_go_together_is_refused(found: str, put: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    made(60, **WINDOW).save(path)
    header, rest = split(path.read_bytes())
    text = header["__metadata__"]["layers"]
    assert found in text
    header["__metadata__"]["layers"] = text.replace(found, put)
    path.write_bytes(put_together(header, rest))
    with pytest.raises(ValueError, match=message):
        qkv.QKVCache.load(path, LLAMA)


# ---- a file that the cache went to -----------------------------------------------------------------------------------


def offload(folder: Path, max_bytes: int, **options: Any) -> dict[str, Any]:
    return {"on_full": "offload", "max_bytes": max_bytes, "offload_folder": str(folder), **options}


@pytest.mark.parametrize("way", ["int8", "none", "k5v4", "fp8_e4m3"])
def test_an_offloaded_cache_is_saved_and_loaded_under_any_limit(
    way: str, wide_model: PreTrainedModel, tmp_path: Path
) -> None:
    """Each combination of a limit there and a limit here, with the bits of a cache that never had one."""
    qkv.enable(wide_model)
    folder, path = tmp_path / "spilled", tmp_path / "a.kv"
    folder.mkdir()
    ids = prompt(1100, batch=2)
    plain = qkv.QKVCache(wide_model.config, way)
    for start in range(0, 900, 300):
        run(wide_model, plain, ids[:, start : start + 300])
    whole = plain.nbytes()
    limits: list[dict[str, Any]] = [{}, offload(folder, int(0.85 * whole)), offload(folder, int(0.9 * whole))]
    twins = {}
    for there, here in itertools.product(limits, limits):
        cache = qkv.QKVCache(wide_model.config, way, **there)
        for start in range(0, 900, 300):
            run(wide_model, cache, ids[:, start : start + 300])
        assert (cache.offloaded_bytes() > 0) == bool(there)
        cache.save(path)
        expected = qkv.QKVCache(wide_model.config, way, **here).config
        loaded = qkv.QKVCache.load(path, wide_model.config, expected)
        assert loaded.config == expected
        assert loaded.nbytes() == whole
        if here:
            # All that is full lies in the file, and none of it is copied to another.
            assert 0.2 * whole < loaded.offloaded_bytes() < whole
            assert loaded._limits.spill._end == 0
        twin = copy.deepcopy(plain)
        at = 900
        for size in (90, 1, 1, 100, 1, 1):
            key = (at, size)
            if key not in twins:
                twins[key] = run(wide_model, twin, ids[:, at : at + size])
            assert torch.equal(run(wide_model, loaded, ids[:, at : at + size]), twins[key])
            assert torch.equal(run(wide_model, cache, ids[:, at : at + size]), twins[key])
            at += size
        for one in (loaded, cache):
            one.crop(-700)  # into what lies in the file
        assert torch.equal(run(wide_model, loaded, ids[:, :300]), run(wide_model, cache, ids[:, :300]))
    assert not list(folder.iterdir())


def test_limits_of_the_file_hold_where_nothing_else_is_said(tmp_path: Path) -> None:
    cache = made(700, **offload(tmp_path, 300_000))
    cache.save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    assert loaded.config == cache.config
    assert qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, qkv.CacheConfig("int8", equalize=False)).config.max_bytes is None
    made(30, max_tokens=50).save(tmp_path / "a.kv")
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    with pytest.raises(ValueError, match=r"holds 30 tokens .*, 21 more were given, and max_tokens=50"):
        loaded.update(*kv(21, **SHAPE), 0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tokens": 699}, "it holds 700 tokens, and max_tokens=699"),
        ({"max_bytes": 100_000}, r"its 700 tokens take \d+ bytes, and max_bytes=100000"),
        (
            {"max_bytes": 20_000, "on_full": "offload"},
            r"its 700 tokens take \d+ bytes in memory, .*, and max_bytes=20000",
        ),
    ],
    ids=str,
)
def test_a_file_that_holds_more_than_may_be_is_refused_as_it_is_loaded(
    limits: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made(700).save(tmp_path / "a.kv")
    with pytest.raises(ValueError, match=f"a.kv cannot be loaded within the limits: {message}"):
        qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, qkv.CacheConfig("int8", equalize=False, **limits))
    qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, qkv.CacheConfig("int8", equalize=False, max_tokens=700))


def test_a_folder_that_is_gone_is_said_and_another_one_serves(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    made(700, **offload(folder, 300_000)).save(tmp_path / "a.kv")
    folder.rmdir()
    with pytest.raises(ValueError, match="offload_folder"):
        qkv.QKVCache.load(tmp_path / "a.kv", LLAMA)
    other = qkv.CacheConfig("int8", equalize=False, **offload(tmp_path, 300_000))
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", LLAMA, other)
    assert loaded.config.offload_folder == str(tmp_path)


def resident(folder: Path) -> int:
    """Bytes of files below a folder, removed ones too, that are in this process's memory."""
    total, of_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_ours = str(folder) in line
        elif of_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_loaded_cache_stays_within_its_bytes_and_saving_does_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: what is loaded is read where it lies, a layer at a time."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("only Linux says there what is in memory")
    layers, limit = 8, 14 << 20
    config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, head_dim=128, attn_implementation="qkv")
    pair = kv(2600, batch=1, key_dim=128, value_dim=128)
    plain = qkv.QKVCache(config, "none")
    for layer in range(layers):
        plain.update(*part(pair, 0, 2100), layer)
    plain.save(tmp_path / "a.kv")
    assert plain.nbytes() > 2 * limit
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", config, qkv.CacheConfig("none", **offload(tmp_path, limit)))
    around = 1 << 20  # the system brings in whole pages, and their neighbours
    for start, end in ((2100, 2101), (2101, 2400), *((t, t + 1) for t in range(2400, 2410))):
        for layer in range(layers):
            plain.update(*part(pair, start, end), layer)
            loaded.update(*part(pair, start, end), layer)
            both = [one.view(layer).decode() for one in (plain, loaded)]
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
            now = resident(tmp_path)
            assert now > loaded.layers[layer].nbytes() // 2  # the measure sees the layer that was read
            assert now + loaded.nbytes() - loaded.offloaded_bytes() <= limit + around
    assert loaded._limits.spill._end < loaded.nbytes() // 3  # what came later, and nothing of what was loaded
    seen, rest = [], loaded._limits.spill.rest_all

    def watched() -> None:
        seen.append(resident(tmp_path))
        rest()

    monkeypatch.setattr(loaded._limits.spill, "rest_all", watched)
    loaded.save(tmp_path / "b.kv")
    largest = max(x.nbytes for layer in loaded.layers for x in layer.store.tensors())
    widest = max(layer.nbytes() for layer in loaded.layers)  # the one read last was still there at the beginning
    assert len(seen) > 4
    assert max(seen) <= widest + saved._READ_AT_ONCE + largest + around
    assert resident(tmp_path) <= around
    again = qkv.QKVCache.load(tmp_path / "b.kv", config)
    for layer in range(layers):
        assert torch.equal(again.view(layer).decode()[0], plain.view(layer).decode()[0])


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", ["window", "offload"])
def test_generate_answers_with_a_limit_from_the_saved_prefix(
    on_full: str, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    limit = {"max_tokens": 60} if on_full == "window" else {"max_bytes": 100_000}
    config = qkv.CacheConfig("int8", equalize=False, on_full=on_full, sink_tokens=SINKS, **limit)
    config.to_yaml(tmp_path / "a.yaml")
    prefix = "the quick brown fox jumps over the lazy dog; " * (4 if on_full == "window" else 18)
    more = ["-n", 12, "--model", tiny_folder, "--format", tmp_path / "a.yaml", "--json", "-"]
    rows = []
    for said in ("saved it to", "tokens from"):
        options = ["-p", prefix + "what?", "-p", prefix + "where is it?", "--prefix-cache", tmp_path / "p.kv"]
        done = command("generate", *options, *more)
        assert done.status == 0, done.err
        assert said in done.err
        rows.append(json.loads(done.out)["rows"])
    assert [row["text"] for row in rows[0]] == [row["text"] for row in rows[1]]
    assert all(row["loaded_tokens"] >= len(prefix) for row in rows[1])
