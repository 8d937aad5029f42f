"""The benchmarks: turns, medians, rows, and that every contestant does the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from transformers import LlamaConfig, PreTrainedModel

import qkv
from qkv.named_caches import named_cache
from qkv_eval.bench import bandwidth, decode, kernel, timing
from qkv_eval.bench.timing import Contestant, Timing, noise_warning, time_in_turn

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
    cache, _ = kernel._filled_cache(name, shape, kv_len=200, batch=2, seed=0)
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
