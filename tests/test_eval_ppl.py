"""``qkv eval ppl``: rows, overlapping windows, data sets, and what is said of caches that hide their values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qkv_eval.perplexity import NOISE_FLOOR
from qkv_eval.ppl import PplSettings, run
from qkv_eval.text import Text, cut_windows, load_dataset_text

pytestmark = pytest.mark.usefixtures("plain_int8")

KEYS = {
    "format",
    "scoring",
    "tokens",
    "ppl",
    "ppl_stderr",
    "dppl_percent",
    "kld_mean",
    "kld_median",
    "kld_p99",
    "kld_p999",
    "kld_max",
    "same_top_percent",
    "bits_per_value",
    "by_position",
}


def test_rows_begin_with_the_baseline_and_the_noise_floor(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    results = run(tiny_model, tiny_tokenizer, PplSettings(("none", "int8"), window=64, limit=3))
    rows = results["rows"]
    assert [row["format"] for row in rows] == ["dynamic", NOISE_FLOOR, "none", "int8"]
    assert all(set(row) >= KEYS for row in rows)
    assert {row["tokens"] for row in rows} == {3 * 63}
    assert rows[0]["kld_mean"] == 0
    assert abs(rows[1]["kld_mean"]) < 1e-6 < rows[3]["kld_mean"]
    assert rows[1]["bits_per_value"] == rows[0]["bits_per_value"] == 32
    assert rows[3]["bits_per_value"] == 8 + 16 / 16
    assert results["notes"] == []
    assert len(rows[3]["by_position"]) == 8


@pytest.mark.parametrize("stride", [7, 20, 64])
def test_overlapping_windows_count_every_token_once(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, stride: int
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + (i * i + i // 3) % 26) for i in range(300)))
    settings = PplSettings((), str(file), window=64, stride=stride, limit=None, noise_floor=False)
    row = run(tiny_model, tiny_tokenizer, settings)["rows"][0]
    tokens = tiny_tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
    losses = []
    covered = 1
    for start in range(0, len(tokens) - 63, stride):  # slow and obvious: each window alone, what is new in it
        window = torch.tensor([tokens[start : start + 64]])
        with torch.no_grad():
            logits = tiny_model(window).logits[0, :-1].double()
        loss = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
        losses += loss[max(0, covered - start - 1) :].tolist()
        covered = start + 64
    assert row["tokens"] == len(losses)
    assert row["ppl"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize("stride", [0, 65, -3])
def test_a_stride_that_skips_text_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride={stride} must be from 1 to 64"):
        cut_windows(tiny_tokenizer, Text("letters", "a" * 200), 64, stride=stride)


def test_a_cache_that_hides_its_values_is_reported(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Cases 16 and 11, for caches of others."""
    results = run(tiny_model, tiny_tokenizer, PplSettings(("hf-fp8",), window=180, limit=1))
    (note,) = results["notes"]
    assert note.startswith("hf-fp8: a pass over several tokens does not see what this cache stores")
    assert {row["format"]: row["scoring"] for row in results["rows"]}["hf-fp8"] == "stepwise"


def test_exact_prefill_is_labelled_as_what_it_is(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = PplSettings(("int8", "hf-fp8"), window=180, limit=1, scoring="prefill-exact")
    results = run(tiny_model, tiny_tokenizer, settings)
    assert {row["scoring"] for row in results["rows"]} == {"prefill-exact"}
    assert all(abs(row["kld_mean"]) < 1e-6 for row in results["rows"])
    assert "say nothing about the caches" in results["notes"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "quick"}, "unknown scoring 'quick'"),
        ({"text": "a", "dataset": "b"}, "a text file or a data set"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PplSettings(**options)


def test_a_text_shorter_than_a_window_and_windows_beyond_the_model_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("abc")
    with pytest.raises(ValueError, match="3 tokens, less than one window of 64"):
        run(tiny_model, tiny_tokenizer, PplSettings((), str(file), window=64))
    with pytest.raises(ValueError, match="more than the model's 1024 positions"):
        run(tiny_model, tiny_tokenizer, PplSettings((), window=2000))


def test_a_data_set_is_read_by_name(tmp_path: Path) -> None:
    """A folder in the form of a data set, in the place of one of the hub."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"text": "one"}, {"text": "  "}, {"text": "two"}]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert load_dataset_text(str(tmp_path)).content == "one\n\ntwo"
    with pytest.raises(ValueError, match="no column 'prose'; it has text"):
        load_dataset_text(f"{tmp_path}:::prose")
    with pytest.raises(ValueError, match="cannot load the data set"):
        load_dataset_text(f"{tmp_path}::nothing")
