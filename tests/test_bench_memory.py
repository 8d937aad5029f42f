"""Memory in the benchmarks: what is followed, the prompt's pass, and what caches hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Command, make_tiny_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import qkv
from qkv.named_caches import NamedCache, named_cache
from qkv_eval.bench import decode, memory, peak, prefill
from qkv_eval.bench.peak import TensorMemory
from qkv_eval.bench.prompt import check_positions, random_prompt, read_prompt

PREFILL_KEYS = {"cache", "batch", "context", "seconds", "ratio_to_dynamic", "peak_bytes"}
MEMORY_KEYS = {"cache", "batch", "context", "kv_bytes", "bytes_per_token", "peak_bytes", "ratio_to_fp16"}
MIB = 1 << 20


def mebibytes(count: int) -> torch.Tensor:
    return torch.ones(count * MIB // 4)


# ---- what is followed ----------------------------------------------------------------------------------------------


def test_the_peak_is_what_tensors_held_at_once_and_not_the_sum() -> None:
    followed = TensorMemory()
    with followed.part("all"):
        for _ in range(3):
            mebibytes(4)
        kept = mebibytes(1)
    assert followed.peak == 4 * MIB
    assert followed.held == kept.nbytes == MIB


def test_both_halves_of_a_concatenation_and_its_result_count() -> None:
    followed = TensorMemory()
    with followed.part("all"):
        whole = torch.cat([mebibytes(2), mebibytes(3)])
    assert followed.peak == 10 * MIB
    assert followed.held == whole.nbytes == 5 * MIB


def test_buffers_inside_of_an_operator_count() -> None:
    query = torch.randn(1, 4, 512, 64)
    followed = TensorMemory()
    with torch.inference_mode(), followed.part("all"):
        output = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert followed.held < output.nbytes + 4096
    assert followed.peak > output.nbytes + 32 * 512 * 4  # scores, at least of a block of queries


def test_what_was_there_before_does_not_count_even_when_it_goes() -> None:
    before = mebibytes(8)
    followed = TensorMemory()
    with followed.part("all"):
        del before
        mebibytes(2)
    assert followed.peak == 2 * MIB
    assert followed.held == 0


def test_parts_are_followed_as_one() -> None:
    followed = TensorMemory()
    with followed.part("first"):
        kept = mebibytes(4)
    with followed.part("second"):
        mebibytes(1)
        del kept
    with followed.part("second"):
        mebibytes(2)
    assert followed.peaks == {"first": 4 * MIB, "second": 5 * MIB}
    assert followed.held == 0


def test_the_growth_of_the_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = peak.peak_resident(lambda: mebibytes(64).sum())
    if grown is None:
        pytest.skip("this system does not tell the highest resident size")
    assert 60 * MIB < grown < 100 * MIB
    monkeypatch.setattr(peak, "_status_bytes", lambda key: None)
    assert peak.peak_resident(lambda: None) is None


@pytest.mark.parametrize("name", ["dynamic", "none", "int8", "k5v4", "hf-fp8"])
def test_what_is_held_after_a_pass_is_the_cache(name: str, wide_model: PreTrainedModel) -> None:
    row = memory.measure_memory(wide_model, [named_cache("dynamic"), *others(name)], 1, 300, steps=3)[-1]
    assert row["cache"] == name
    followed = TensorMemory()
    named = named_cache(name)
    if named.is_ours:
        qkv.enable(wide_model)
    cache = named.make(wide_model.config)
    with torch.inference_mode(), followed.part("all"):
        read_prompt(wide_model, cache, random_prompt(wide_model, 1, 300, 0))
        for _ in range(3):
            read_prompt(wide_model, cache, random_prompt(wide_model, 1, 1, 0))
    # Beside the tensors of the cache there are a few numbers of the model's own.
    assert row["kv_bytes"] <= followed.held <= row["kv_bytes"] + 4096
    assert row["peak_bytes"] == pytest.approx(followed.peak, rel=0.02)


def others(name: str) -> list[NamedCache]:
    return [] if name == "dynamic" else [named_cache(name)]


def test_a_decoded_layer_shows_in_the_peak_of_a_prompt() -> None:
    """Of one model with wide heads, keys and values outweigh everything else that a pass needs."""
    model = make_tiny_model(head_dim=256, num_attention_heads=1, num_hidden_layers=3)
    caches = [named_cache(name) for name in ("dynamic", "int8")]
    dynamic, int8 = memory.measure_memory(model, caches, 1, 1000, steps=2)
    layer = 1000 * 2 * 256 * 4
    assert int8["peak_bytes"] >= int8["kv_bytes"] + layer
    # In a step DynamicCache has one side of one layer twice; our kernel decodes nothing.
    assert dynamic["peak_step_bytes"] >= dynamic["kv_bytes"] + layer // 2
    assert int8["peak_step_bytes"] < int8["kv_bytes"] + layer // 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the size of the process be, which takes longer to ask for than these models take for a prompt."""
    monkeypatch.setattr(prefill, "peak_resident", lambda call: call())


# ---- bench prefill -------------------------------------------------------------------------------------------------


def test_prefill_rows_compare_with_dynamic(quick: None, tiny_model: PreTrainedModel) -> None:
    settings = prefill.PrefillSettings(("int8", "hf-fp8"), batch=(1, 2), context=(200, 400), rounds=2)
    rows = prefill.run(tiny_model, settings)["rows"]
    assert [row["cache"] for row in rows[:3]] == ["dynamic", "int8", "hf-fp8"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert set(row) >= PREFILL_KEYS
        assert row["seconds"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["context"] / row["seconds"])
        assert row["peak_bytes"] > row["kv_bytes"]
        baseline = next(r for r in rows if (r["batch"], r["context"]) == (row["batch"], row["context"]))
        assert row["ratio_to_dynamic"] == pytest.approx(baseline["seconds"] / row["seconds"])
    assert tiny_model.config._attn_implementation == "sdpa"
    by_size = {(row["batch"], row["context"]): row for row in rows if row["cache"] == "dynamic"}
    assert by_size[1, 200]["kv_bytes"] == 2 * 200 * 16 * 2 * 4  # layers, tokens, channels, keys and values, fp32
    assert by_size[1, 400]["peak_bytes"] > 1.5 * by_size[1, 200]["peak_bytes"]


def test_every_pass_of_a_prompt_goes_into_a_new_cache(quick: None, tiny_model: PreTrainedModel) -> None:
    made: list[qkv.QKVCache] = []

    def make(config: object) -> qkv.QKVCache:
        made.append(qkv.QKVCache(config, "int8"))
        return made[-1]

    caches = [named_cache("dynamic"), NamedCache("int8", make, is_ours=True)]  # type: ignore[arg-type]
    rows, timings = prefill.measure_prefill(tiny_model, caches, 1, 100, chunk=40, rounds=2, warmup=1)
    assert len(timings["int8"].seconds) == 2
    assert len(made) == 3 + 2  # timed and warm, then the two that are followed
    assert [cache.get_seq_length() for cache in made] == [100] * 5
    assert {layer["backend"] for layer in made[-1].stats()["layers"]} == {"dense"}
    assert rows[1]["chunk"] == 40


def test_a_prompt_in_pieces_fills_the_same_cache_with_less_memory(quick: None, tiny_model: PreTrainedModel) -> None:
    caches = [named_cache("dynamic")]
    (whole,), _ = prefill.measure_prefill(tiny_model, caches, 2, 512, rounds=1, warmup=0)
    (pieces,), _ = prefill.measure_prefill(tiny_model, caches, 2, 512, chunk=64, rounds=1, warmup=0)
    assert pieces["kv_bytes"] == whole["kv_bytes"]
    assert pieces["peak_bytes"] < whole["peak_bytes"]


def test_only_the_last_predictions_are_computed(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    head: Callable[[torch.Tensor], torch.Tensor] = tiny_model.lm_head.forward  # type: ignore[assignment]
    monkeypatch.setattr(tiny_model.lm_head, "forward", lambda hidden: (seen.append(hidden.shape), head(hidden))[1])
    read_prompt(tiny_model, named_cache("dynamic").make(tiny_model.config), random_prompt(tiny_model, 1, 90, 0), 50)
    assert [shape[1] for shape in seen] == [1, 1]


def test_contexts_beyond_the_trained_length_are_noted_or_refused(tiny_model: PreTrainedModel) -> None:
    assert check_positions(tiny_model, 1024) is None
    note = check_positions(tiny_model, 65_536)
    assert note is not None
    assert "trained" in note
    table = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="a table of 32 positions; 33 tokens are too many"):
        check_positions(table, 33)


# ---- bench memory --------------------------------------------------------------------------------------------------


def test_memory_rows_say_what_caches_hold(wide_model: PreTrainedModel) -> None:
    settings = memory.MemorySettings(("int8", "k5v4", "hf-fp8"), batch=(2,), context=(1020,), steps=4)
    rows = memory.run(wide_model, settings)["rows"]
    assert [row["cache"] for row in rows] == ["dynamic", "int8", "k5v4", "hf-fp8"]
    values = 2 * 2 * 1024 * 32 * 2  # layers, batch, tokens, channels, keys and values
    for row in rows:
        assert set(row) >= MEMORY_KEYS
        assert row["bytes_per_token"] == row["kv_bytes"] / (2 * 1024)
        assert row["ratio_to_fp16"] == pytest.approx(2 * values / row["kv_bytes"])
        assert row["peak_bytes"] >= row["peak_step_bytes"] >= row["kv_bytes"]
    by_name = {row["cache"]: row for row in rows}
    assert by_name["dynamic"]["ratio_to_fp16"] == 0.5  # it is fp32 here
    assert 1 < by_name["int8"]["ratio_to_fp16"] < 2
    assert 1 < by_name["k5v4"]["ratio_to_fp16"] < 16 / 4.5  # of so few tokens, much is spare room
    assert by_name["k5v4"]["bits_per_value"] < by_name["int8"]["bits_per_value"] < 9
    assert wide_model.config._attn_implementation == "sdpa"


def test_without_steps_there_is_no_peak_in_steps(tiny_model: PreTrainedModel) -> None:
    (row,) = memory.measure_memory(tiny_model, [named_cache("dynamic")], 1, 64, steps=0)
    assert row["peak_step_bytes"] is None
    assert row["kv_bytes"] == 2 * 64 * 16 * 2 * 4
    with pytest.raises(ValueError, match="first cache must be 'dynamic'"):
        memory.measure_memory(tiny_model, [named_cache("int8")], 1, 64)


def test_a_layer_with_a_window_is_counted_by_what_it_keeps() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Gemma3TextConfig(
        **sizes, vocab_size=50, head_dim=32, num_hidden_layers=2, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    row = memory.run(model, memory.MemorySettings((), context=(296,), steps=4))["rows"][0]
    kept = (63 + 300) * 32 * 2 * 4  # tokens of both layers, channels, keys and values, fp32
    assert row["kv_bytes"] >= kept
    assert row["ratio_to_fp16"] == pytest.approx(kept / 2 / row["kv_bytes"])
    assert row["ratio_to_fp16"] == pytest.approx(16 / row["bits_per_value"])
    with pytest.raises(ValueError, match="sliding_attention"):
        memory.run(model, memory.MemorySettings(("int8", "hf-fp8")))
    with pytest.raises(ValueError, match="sliding_attention"):
        prefill.run(model, prefill.PrefillSettings(("int8", "hf-fp8")))


def test_caches_beyond_the_memory_are_refused(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_free_memory", lambda: MIB)
    with pytest.raises(ValueError, match=r"may need .* GiB"):
        prefill.run(tiny_model, prefill.PrefillSettings(context=(100_000,)))
    with pytest.raises(ValueError, match=r"may need .* GiB"):
        memory.run(tiny_model, memory.MemorySettings(context=(100_000,)))


# ---- the commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "more"),
    [("prefill", PREFILL_KEYS, ["--rounds", 2]), ("memory", MEMORY_KEYS, ["--steps", 2])],
    ids=["prefill", "memory"],
)
def test_the_commands_write_the_rows_of_the_contract(
    name: str, keys: set[str], more: list[object], quick: None, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    arguments = ["--batch", "1,2", "--context", "48,96", "--caches", "none,hf-fp8", "--chunk", 32, *more]
    done = command("bench", name, *arguments, "--model", tiny_folder, "--json", file)
    assert done.status == 0, done.err
    results = json.loads(file.read_text())
    assert results["meta"]["command"] == f"bench {name}"
    places = [(row["batch"], row["context"], row["cache"]) for row in results["rows"]]
    assert places == [(b, c, n) for b in (1, 2) for c in (48, 96) for n in ("dynamic", "none", "hf-fp8")]
    assert all(set(row) >= keys for row in results["rows"])
    assert "hf-fp8" in done.out
    assert "following memory" in done.err


@pytest.mark.parametrize("name", ["prefill", "memory"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--caches", "int9"], "unknown cache 'int9'"),
        (["--context", "0"], "--context: '0' will not do"),
        (["--batch", "two"], "--batch: 'two' will not do"),
        (["--chunk", "0"], "--chunk"),
        (["--caches", "x.yaml"], "there is no set-up file 'x.yaml'"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_arguments_get_one_line(name: str, arguments: list[str], words: str, command: Command) -> None:
    done = command("bench", name, *arguments)
    assert done.status == 2
    assert words in done.err
    assert done.err.count("\n") == 1
