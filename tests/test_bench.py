"""The benchmarks: turns, medians, rows, and that every contestant does the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from transformers import LlamaConfig, PreTrainedModel

import qkv
from qkv.named_caches import NamedCache, named_cache
from qkv_eval.bench import bandwidth, decode, kernel, timing
from qkv_eval.bench.fit import fit_line, fit_steps
from qkv_eval.bench.peak import TensorMemory
from qkv_eval.bench.prompt import random_prompt, read_prompt
from qkv_eval.bench.timing import Contestant, Timing, noise_warning, time_in_turn

PEERS = ("", " (nearly empty)", " (after steps)")
DECODE_KEYS = {"cache", "batch", "context", "ms_per_step", "ratio_to_dynamic", "kv_bytes", "tokens_per_s"}
KERNEL_KEYS = {
    "format",
    "backend",
    "batch",
    "kv_heads",
    "q_per_kv",
    "head_dim",
    "kv_len",
    "ms",
    "sdpa_ms",
    "speedup",
    "gb_per_s",
    "read_gb_per_s",
    "fraction_of_read_bandwidth",
}


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmarks take the last-level cache for a small one, so that they need little data."""
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 1 << 18)
    monkeypatch.setattr(kernel, "last_level_cache", lambda: 1 << 18)


def test_peers_take_turns_and_each_round_starts_with_another() -> None:
    order: list[str] = []
    peers = [Contestant(name, lambda name=name: order.append(name)) for name in "abc"]
    timings = time_in_turn(peers, rounds=3, warmup=1)
    assert order[3:] == list("abcbcacab")
    assert {name: len(part.seconds) for name, part in timings.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_prepares_a_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}

    def pass_time(seconds: float) -> None:
        clock["now"] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["now"])
    peer = Contestant("a", lambda: pass_time(2.0), prepare=lambda: pass_time(50.0))
    assert time_in_turn([peer], rounds=2)["a"].seconds == (2.0, 2.0)


def test_median_and_spread() -> None:
    timed = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timed.median == 3.0
    assert timed.spread == pytest.approx(2 / 3)


def test_only_a_noisy_machine_is_warned_of() -> None:
    assert noise_warning({"a": Timing((1.0, 1.01, 1.02, 1.03, 9.0))}) is None
    warning = noise_warning({"a": Timing((1.0, 1.0, 1.0, 1.0)), "b": Timing((1.0, 1.5, 2.0, 2.5))})
    assert warning is not None
    assert " b " in warning


def test_equal_names_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        time_in_turn([Contestant("a", int), Contestant("a", int)], rounds=1)


def test_decode_rows_compare_with_dynamic(tiny_model: PreTrainedModel) -> None:
    settings = decode.DecodeSettings(("int8", "none"), batch=(1, 2), context=(16, 300), rounds=3, warmup=1)
    rows = decode.run(tiny_model, settings)["rows"]
    assert len(rows) == 2 * 2 * 3
    assert [row["cache"] for row in rows[:3]] == ["dynamic", "int8", "none"]
    for row in rows:
        assert set(row) >= DECODE_KEYS
        assert row["ms_per_step"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_step"])
        baseline = next(r for r in rows if (r["batch"], r["context"]) == (row["batch"], row["context"]))
        assert row["ratio_to_dynamic"] == pytest.approx(baseline["ms_per_step"] / row["ms_per_step"])
    assert tiny_model.config._attn_implementation == "sdpa"


def test_decode_counts_what_caches_hold(tiny_model: PreTrainedModel) -> None:
    caches = [named_cache(name) for name in ("dynamic", "int8")]
    rows, _ = decode.measure_decode(tiny_model, caches, batch=2, context=1024, rounds=1, warmup=0)
    dynamic, int8 = rows
    assert dynamic["kv_bytes"] == 2 * 2 * 1024 * 16 * 2 * 4  # layers, batch, tokens, channels, keys and values, fp32
    assert dynamic["bits_per_value"] == 32
    assert 8 < int8["bits_per_value"] < 10
    assert int8["kv_bytes"] < dynamic["kv_bytes"] / 2


@pytest.mark.parametrize("name", ["int8", "k5v4"])
def test_each_step_of_a_decode_benchmark_is_served_by_the_codes(name: str, tiny_model: PreTrainedModel) -> None:
    made: list[qkv.QKVCache] = []
    named = named_cache(name)

    def make(config: LlamaConfig) -> qkv.QKVCache:
        made.append(qkv.QKVCache(config, name))
        return made[-1]

    caches = [named_cache("dynamic"), type(named)(name, make, is_ours=True)]
    decode.measure_decode(tiny_model, caches, batch=1, context=200, rounds=2, warmup=1)
    (cache,) = made
    assert cache.get_seq_length() == 200 + 3
    assert all(layer.store.packed for layer in cache.layers)
    assert {row["backend"] for row in cache.stats()["layers"]} == {"cpu"}


def test_caches_in_a_run_hold_the_same_tokens(tiny_model: PreTrainedModel) -> None:
    caches = [named_cache(name) for name in ("dynamic", "none")]
    layers = decode.probe_layers(tiny_model)
    dynamic, none = decode.fill_caches(tiny_model, caches, layers, batch=2, context=50, seed=3)
    for ours, theirs in zip(none.layers, dynamic.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert dynamic.layers[0].keys.std().item() == pytest.approx(layers[0].key_spread, rel=0.1)


def test_caches_beyond_the_memory_are_refused(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_free_memory", lambda: 1 << 20)
    with pytest.raises(ValueError, match=r"may need .* GiB"):
        decode.run(tiny_model, decode.DecodeSettings(context=(100_000,)))


def test_the_own_share_of_a_cache_is_what_a_step_takes_above_a_nearly_empty_one(tiny_model: PreTrainedModel) -> None:
    settings = decode.DecodeSettings(("int8",), batch=(2,), context=(16, 300), rounds=4, warmup=1, base=16)
    rows = decode.run(tiny_model, settings)["rows"]
    for row in rows:
        assert row["base_context"] == 16
        if row["context"] == 16:
            assert row["cache_ms"] is None
        else:
            assert row["cache_ms"] == pytest.approx(row["ms_per_step"] - row["base_ms"])
            assert row["cache_ms_iqr"] >= 0
    assert "cache_ms" not in decode.run(tiny_model, decode.DecodeSettings((), context=(20,), rounds=1))["rows"][0]


def test_the_share_is_out_of_pairs_of_one_round() -> None:
    share = decode._own_share(Timing((5.0, 15.0, 25.0, 35.0)), Timing((1.0, 11.0, 21.0, 31.0)), base=16)
    assert share == {"base_context": 16, "base_ms": 16e3, "cache_ms": 4e3, "cache_ms_iqr": 0.0}


def test_caches_after_many_steps_take_turns_with_those_filled_at_once(tiny_model: PreTrainedModel) -> None:
    made: list[qkv.QKVCache] = []

    def make(config: LlamaConfig) -> qkv.QKVCache:
        made.append(qkv.QKVCache(config, "int8"))
        return made[-1]

    caches = [named_cache("dynamic"), NamedCache("int8", make, is_ours=True)]
    rows, timings = decode.measure_decode(tiny_model, caches, 1, 200, rounds=3, warmup=1, base=16, steps=30)
    assert [cache.get_seq_length() for cache in made] == [204, 20, 204]
    assert set(timings) == {f"{name}{what}" for name in ("dynamic", "int8") for what in PEERS}
    for row in rows:
        assert row["steps"] == 30
        assert row["ratio_after_steps"] == pytest.approx(row["ms_per_step"] / row["ms_after_steps"])
    with pytest.raises(ValueError, match="40 steps do not fit in a context of 40 tokens"):
        decode.run(tiny_model, decode.DecodeSettings(context=(300, 40), steps=40))


def test_a_step_allocates_no_more_after_many_steps(tiny_model: PreTrainedModel) -> None:
    """Counted, not timed: the memory that a step of our cache takes for itself does not grow with steps done."""
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, "int8")
    grown = []
    with torch.inference_mode():
        read_prompt(tiny_model, cache, random_prompt(tiny_model, 1, 300, 0))
        for _ in range(4):
            for _ in range(40):
                read_prompt(tiny_model, cache, random_prompt(tiny_model, 1, 1, 0))
            followed = TensorMemory()
            with followed.part("step"):
                read_prompt(tiny_model, cache, random_prompt(tiny_model, 1, 1, 0))
            grown.append(followed.peak)
    assert max(grown) - min(grown) <= 4096, grown


def test_contexts_beyond_the_trained_length_are_decoded_and_noted(tiny_model: PreTrainedModel) -> None:
    results = decode.run(tiny_model, decode.DecodeSettings(("int8",), context=(2000,), rounds=1, warmup=0))
    assert [row["context"] for row in results["rows"]] == [2000, 2000]
    assert "trained" in results["notes"][0]


# ---- a line over the context ---------------------------------------------------------------------------------------


def test_a_straight_line_is_found() -> None:
    line = fit_line([0, 10, 20, 40], [5, 6, 7, 9])
    assert line["slope"] == pytest.approx(0.1)
    assert line["intercept"] == pytest.approx(5)
    assert line["r2"] == pytest.approx(1)
    assert line["max_deviation"] == pytest.approx(0, abs=1e-9)


def test_what_is_no_line_deviates() -> None:
    line = fit_line([1, 2, 3, 4], [1, 4, 9, 16])
    assert line["slope"] == pytest.approx(5)
    assert line["intercept"] == pytest.approx(-5)
    assert line["max_deviation"] == pytest.approx(1)
    assert line["max_deviation_percent"] == pytest.approx(100)
    assert line["at"] == 1
    assert line["r2"] == pytest.approx(1 - 4 / 129)


def test_level_times_have_no_share_to_explain() -> None:
    line = fit_line([1, 2, 3], [7, 7, 7])
    assert line["r2"] is None
    assert line["slope"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("xs", "ys"), [([1, 1], [1, 2]), ([1], [1]), ([1, 2], [1])], ids=str)
def test_there_is_no_line_through_one_place(xs: list[float], ys: list[float]) -> None:
    with pytest.raises(ValueError, match="two different x"):
        fit_line(xs, ys)


def test_steps_are_fitted_by_cache_and_batch_over_three_contexts_or_more() -> None:
    rows = [
        {"cache": cache, "batch": batch, "context": context, "ms_per_step": 50 + batch * slope * context / 1000}
        for cache, slope in (("dynamic", 8.0), ("int8", 1.0))
        for batch, contexts in ((1, (1024, 4096)), (4, (1024, 4096, 16384)))
        for context in contexts
    ]
    dynamic, int8 = fit_steps(rows)
    assert (dynamic["cache"], dynamic["batch"], dynamic["contexts"]) == ("dynamic", 4, 3)
    assert (int8["first_context"], int8["last_context"]) == (1024, 16384)
    assert dynamic["us_per_1000_tokens"] == pytest.approx(8000)
    assert int8["us_per_1000_tokens"] == pytest.approx(1000)
    assert int8["intercept_ms"] == pytest.approx(50)
    assert int8["max_deviation_ms"] < 1e-9


# ---- attention alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 3, 64), (2, 1, 80), (1, 8, 128)], ids=str)
def test_torch_computes_the_same_attention_in_every_way(small_memory: None, shape: tuple[int, int, int]) -> None:
    query = torch.randn(2, shape[0] * shape[1], 1, shape[2])
    outputs = {
        way: call().reshape(2, shape[0] * shape[1], shape[2])
        for way, (call, _) in kernel.torch_ways(query, shape, kv_len=100, seed=0).items()
    }
    assert len(outputs) == (4 if shape[1] > 1 else 3)
    first = outputs.pop("grouped sdpa")
    for way, output in outputs.items():
        torch.testing.assert_close(output, first, rtol=1e-4, atol=1e-5, msg=way)


@pytest.mark.parametrize(("name", "error"), [("none", 1e-5), ("int8", 0.02), ("k5v4", 0.2)])
def test_our_attention_in_the_kernel_benchmark_is_that_of_torch(name: str, error: float, small_memory: None) -> None:
    shape = (3, 3, 64)
    torch.manual_seed(1)  # of some queries a single token is nearly all: the error of one key then shows in full
    query = torch.randn(2, 9, 1, 64)
    cache, _ = kernel._filled_cache(named_cache(name), shape, kv_len=200, batch=2, seed=0)
    ours = kernel._attend_to_all(query, [cache.view(0)])()
    torchs = kernel.torch_ways(query, shape, kv_len=200, seed=0)["grouped sdpa"][0]()
    torch.testing.assert_close(ours.reshape(2, 9, 64), torchs.reshape(2, 9, 64), rtol=0, atol=error)


def test_kernel_rows_add_up(small_memory: None) -> None:
    settings = kernel.KernelSettings(("none", "int8"), ((2, 2, 64),), (160, 300), (1, 2), rounds=3, warmup=1)
    rows = kernel.run(settings)["rows"]
    assert [(row["format"], row["kv_len"], row["batch"]) for row in rows[:4]] == [
        ("none", 160, 1),
        ("int8", 160, 1),
        ("none", 160, 2),
        ("int8", 160, 2),
    ]
    for row in rows:
        assert set(row) >= KERNEL_KEYS
        assert row["speedup"] == pytest.approx(row["sdpa_ms"] / row["ms"])
        assert row["fraction_of_read_bandwidth"] == pytest.approx(row["gb_per_s"] / row["read_gb_per_s"])
        values = 2 * row["batch"] * 2 * row["kv_len"] * 64
        bytes_of_value = row["gb_per_s"] * 1e9 * row["ms"] / 1e3 / values
        assert bytes_of_value == pytest.approx(4 if row["format"] == "none" else 1, rel=0.05)


def test_kernel_rows_in_bf16_beside_torchs_best_in_bf16(small_memory: None) -> None:
    settings = kernel.KernelSettings(("int8",), ((2, 2, 64),), (300,), rounds=2, dtype=("fp32", "bf16", "float32"))
    rows = kernel.run(settings)["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert len({row["sdpa_ms"] for row in rows}) == len({row["sdpa_bf16_ms"] for row in rows}) == 1
    for row in rows:
        assert row["backend"] == "cpu"
        assert row["speedup"] == pytest.approx(row["sdpa_ms"] / row["ms"])
        assert row["speedup_bf16"] == pytest.approx(row["sdpa_bf16_ms"] / row["ms"])


def test_torch_gets_its_tensors_in_the_type_of_the_query(small_memory: None) -> None:
    query = torch.randn(1, 4, 1, 64)
    half = {way: call() for way, (call, _) in kernel.torch_ways(query.bfloat16(), (2, 2, 64), 100, 0).items()}
    full = {way: call() for way, (call, _) in kernel.torch_ways(query, (2, 2, 64), 100, 0).items()}
    for way, output in half.items():
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), full[way], rtol=0.05, atol=0.02)


def test_the_kernel_is_timed_over_every_cache_of_ours(small_memory: None, tmp_path: Path) -> None:
    setup = tmp_path / "mine.yaml"
    setup.write_text("format: int4\nsink_tokens: 4\n")
    names = (*qkv.formats(), *qkv.presets(), str(setup))
    rows = kernel.run(kernel.KernelSettings(names, ((1, 2, 64),), (200,), rounds=1, warmup=0))["rows"]
    assert [row["format"] for row in rows] == [*qkv.formats(), *qkv.presets(), "mine"]
    for row in rows:
        assert row["turn_bytes"] >= 2 * kernel.last_level_cache(), row["format"]
        assert row["bits_per_value"] <= 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--formats", "int9"], "unknown cache 'int9'"),
        (["--formats", "dynamic"], "'dynamic' holds no codes for a kernel"),
        (["--dtype", "fp8"], "a query is fp32 or bf16, not 'fp8'"),
        (["--shape", "3x3"], "--shape: '3x3' will not do"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_arguments_of_bench_kernel_get_one_line(arguments: list[str], words: str, command: Command) -> None:
    done = command("bench", "kernel", *arguments)
    assert done.status == 2
    assert words in done.err
    assert done.err.count("\n") == 1


def describe_caches(root: Path, sizes: dict[str, list[tuple[int, str, str]]]) -> None:
    for processor, caches in sizes.items():
        for index, (level, size, shared) in enumerate(caches):
            folder = root / processor / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")


def test_last_level_caches_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.os, "sched_getaffinity", lambda _: {0, 1, 2})
    l2 = (2, "1024K", "0")
    sizes = {"cpu0": [l2, (3, "32768K", "0-1")], "cpu1": [l2, (3, "32768K", "0-1")], "cpu2": [(3, "16M", "2-3")]}
    describe_caches(tmp_path, {**sizes, "cpu3": [(3, "16M", "2-3")], "cpu4": [(3, "99M", "4")]})
    assert bandwidth.last_level_cache(tmp_path) == 48 << 20
    assert bandwidth.last_level_cache(tmp_path / "nothing") == 32 << 20


def test_there_are_layers_enough_to_be_out_of_cache() -> None:
    count = kernel._layers_to_fill_memory(1000)
    assert count * 1000 >= 2 * bandwidth.last_level_cache()
    assert kernel._layers_to_fill_memory(1 << 40) == 2


def test_bench_decode_writes_the_rows_of_the_contract(
    command: Command,
    tiny_folder: Path,
) -> None:
    arguments = ["--batch", "1,2", "--context", "32", "--caches", "none,hf-fp8", "--rounds", 2, "--model", tiny_folder]
    done = command("bench", "decode", *arguments, "--json", "-")
    assert done.status == 0
    rows = json.loads(done.out)["rows"]
    assert [(row["cache"], row["batch"]) for row in rows] == [
        ("dynamic", 1),
        ("none", 1),
        ("hf-fp8", 1),
        ("dynamic", 2),
        ("none", 2),
        ("hf-fp8", 2),
    ]
    assert all(set(row) >= DECODE_KEYS for row in rows)
    assert "hf-fp8" in done.err


def test_bench_decode_prints_shares_and_fits(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    arguments = ["--context", "40,80,160", "--caches", "int8", "--share", "--steps", 8, "--rounds", 2]
    done = command("bench", "decode", *arguments, "--model", tiny_folder, "--json", file)
    assert done.status == 0, done.err
    results = json.loads(file.read_text())
    assert [(fit["cache"], fit["contexts"]) for fit in results["fits"]] == [("dynamic", 3), ("int8", 3)]
    assert all(row["cache_ms"] is not None and row["ratio_after_steps"] > 0 for row in results["rows"])
    assert "as a line over the context" in done.out
    assert "40 to 160" in done.out
    done = command("bench", "decode", "--context", "8,128", "--steps", 8)
    assert done.status == 2
    assert "--steps 8 must be less than every context; the smallest is 8" in done.err


def test_bench_kernel_writes_the_rows_of_the_contract(
    command: Command,
    small_memory: None,
    tmp_path: Path,
) -> None:
    file = tmp_path / "kernel.json"
    done = command("bench", "kernel", "--shape", "1x2x64,2x2x32", "--kv-len", 64, "--rounds", 2, "--json", file)
    assert done.status == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["format"], row["kv_heads"]) for row in rows] == [
        ("int8", 1),
        ("fp8_e4m3", 1),
        ("int8", 2),
        ("fp8_e4m3", 2),
    ]
    assert all(set(row) >= KERNEL_KEYS for row in rows)
    assert "1x2x64" in done.out
