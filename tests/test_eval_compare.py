"""`qkv compare`: one table with everything, and the sample texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Command
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qkv.named_caches import NamedCache, named_cache
from qkv_eval import compare
from qkv_eval.sample import write_samples

pytestmark = pytest.mark.usefixtures("plain_int8")

KEYS = {
    "format",
    "bits_per_value",
    "kv_bytes",
    "ppl",
    "dppl_percent",
    "kld_mean",
    "same_top_percent",
    "ms_per_step",
    "ratio_to_dynamic",
}
SMALL = compare.CompareSettings(window=160, limit=1, context=64, batch=1, rounds=2, sample_tokens=12)


def test_rows_begin_with_dynamic_and_none_equals_it(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    results = compare.run(tiny_model, tiny_tokenizer, SMALL)
    dynamic, none, int8, fp8 = results["rows"]
    assert [row["format"] for row in results["rows"]] == ["dynamic", "none", "int8", "fp8_e4m3"]
    assert all(set(row) >= KEYS for row in results["rows"])
    assert dynamic["ratio_to_dynamic"] == 1
    assert dynamic["dppl_percent"] == dynamic["kld_mean"] == 0
    assert none["ppl"] == pytest.approx(dynamic["ppl"], rel=1e-4)
    assert none["bits_per_value"] == dynamic["bits_per_value"] == 32
    assert int8["bits_per_value"] == fp8["bits_per_value"] < 10
    assert 0 < int8["kld_mean"] < fp8["kld_mean"]


def test_samples_say_how_far_they_agree_with_the_first(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    caches = [named_cache(name) for name in ("dynamic", "none", "fp8_e5m2")]
    dynamic, none, fp8 = write_samples(tiny_model, tiny_tokenizer, caches, "a prompt", tokens=40)
    assert dynamic.tokens == none.tokens == none.same == 40
    assert none.text == dynamic.text
    assert fp8.same < 40
    assert fp8.text.startswith(fp8.same_text)
    assert dynamic.text.startswith(fp8.same_text)
    assert fp8.text != dynamic.text


def test_a_cache_of_others_that_fails_is_a_finding_and_ours_is_an_error(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("an odd number of groups")

    dynamic, theirs = named_cache("dynamic"), NamedCache("hf-x", fail, is_ours=False)
    samples = write_samples(tiny_model, tiny_tokenizer, [dynamic, theirs], "a prompt", tokens=4)
    assert samples[1].text == "failed on this prompt: an odd number of groups"
    ours = NamedCache("x", fail, is_ours=True)
    with pytest.raises(RuntimeError, match="odd number"):
        write_samples(tiny_model, tiny_tokenizer, [dynamic, ours], "a prompt", tokens=4)


def test_fewer_windows_than_asked_for_are_noted(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("word " * 50)
    settings = compare.CompareSettings(("none",), str(file), 100, 4, context=16, batch=1, rounds=1, sample_tokens=0)
    results = compare.run(tiny_model, tiny_tokenizer, settings)
    assert results["text"]["windows"] == 2
    assert "gives 2 windows of 100 tokens, not 4" in results["notes"][0]
    assert results["samples"] == []


def test_the_command_prints_a_table_and_samples_and_writes_the_rows_of_the_contract(
    command: Command,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "compare.json"
    sizes = ["--window", 160, "--limit", 1, "--context", 64, "--batch", 2, "--rounds", 2, "--sample-tokens", 8]
    done = command("compare", "--formats", "int8,hf-fp8", *sizes, "--model", tiny_folder, "--json", file)
    assert done.status == 0, done.err
    results = json.loads(file.read_text())
    assert [row["format"] for row in results["rows"]] == ["dynamic", "int8", "hf-fp8"]
    assert all(set(row) >= KEYS for row in results["rows"])
    assert [row["scoring"] for row in results["rows"]] == ["chunked", "chunked", "stepwise"]
    assert len(results["samples"]) == 3
    assert len(results["meta"]["text"]["sha256"]) == 64
    assert "token by token: hf-fp8" in done.out
    assert "Prompt" in done.out
    assert "scoring the text" in done.err


def test_a_text_shorter_than_a_window_is_refused_before_any_timing(
    command: Command,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("too short")
    done = command("compare", "--text", file, "--window", 100, "--model", tiny_folder)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("qkv: error: the text 'short.txt' has 9 tokens")
    assert "decoding" not in done.err
