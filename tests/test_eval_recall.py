"""`qkv eval recall`: keys hidden in prose and copied sequences, read back from what a cache stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv.named_caches import named_cache
from qkv_eval import recall
from qkv_eval.divergence import token_losses
from qkv_eval.recall import RecallSettings, make_groups
from qkv_eval.text import Text, embedded_text, load_text

pytestmark = pytest.mark.usefixtures("plain_int8")

KEYS = {"task", "format", "context", "depth", "n", "exact_match", "loss", "baseline", "drift", "loss_drift", "scoring"}
SHORT = Text("short", embedded_text().content[:20_000])
SMALL = RecallSettings(("none", "int8"), context=(400,), depths=(0.2, 0.8), n=3, keys=4, batch=2)


class Garbled(DynamicCache):
    """A cache that stores each number as one of five: too coarse for any model."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        coarse = []
        for x in (key_states, value_states):
            step = x.abs().amax(-1, keepdim=True) / 2
            coarse.append((x / step).round() * step)
        return super().update(*coarse, *args, **kwargs)


def make_garbled(config: PreTrainedConfig) -> DynamicCache:
    return Garbled(config=config)


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the embedded text be short: the tiny tokenizer makes a token of each byte."""
    monkeypatch.setattr(recall, "load_text", lambda path=None: SHORT if path is None else load_text(path))


GARBLED = f"{__name__}:make_garbled"


@pytest.mark.parametrize("task", recall.TASKS)
def test_document_question_and_answer_are_exactly_the_context(
    tiny_tokenizer: PreTrainedTokenizerFast, task: str
) -> None:
    groups = list(make_groups(tiny_tokenizer, SHORT, replace(SMALL, tasks=(task,))))
    assert sum(len(group.documents) for group in groups) == 3 * (2 if task == "passkey" else 1)
    for group in groups:
        for question in group.questions:
            assert group.documents.shape[1] + question.tokens.shape[1] == 400
            assert len(question.tokens) == len(group.documents)


def test_a_fact_is_at_its_depth_and_answers_its_question(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    settings = replace(SMALL, tasks=("passkey",), context=(1000,), depths=(0.0, 0.25, 1.0), n=1)
    for group, place in zip(make_groups(tiny_tokenizer, SHORT, settings), (0.05, 0.28, 0.97), strict=True):
        question = group.questions[0]
        document = tiny_tokenizer.decode(group.documents[0])
        key = tiny_tokenizer.decode(question.tokens[0, -question.answer :]).strip()
        assert key.isdigit()
        assert len(key) == 5
        assert f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n" in document
        assert document.index(key) / len(document) == pytest.approx(place, abs=0.06)
        assert document.startswith("A pass key is hidden")


def test_each_of_many_keys_has_a_secret_of_its_own(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (group,) = make_groups(tiny_tokenizer, SHORT, replace(SMALL, tasks=("many_keys",), context=(700,), n=1))
    document = tiny_tokenizer.decode(group.documents[0])
    assert document.count("The secret word of the ") == 4
    places = []
    for question in group.questions:
        asked = tiny_tokenizer.decode(question.tokens[0])
        assert document.count(asked + ".") == 1
        places.append(document.index(asked) / len(document))
    assert places == pytest.approx([0.2, 0.8], abs=0.12)


def test_documents_depend_on_the_seed_and_not_on_the_batch(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    def documents(settings: RecallSettings) -> list[torch.Tensor]:
        groups = make_groups(tiny_tokenizer, SHORT, settings)
        return sorted((row for group in groups for row in group.documents.tolist()), key=str)

    assert documents(SMALL) == documents(replace(SMALL, batch=3))
    assert documents(SMALL) == documents(replace(SMALL, batch=1))
    assert documents(SMALL) != documents(replace(SMALL, seed=1))


def test_the_token_before_a_text_comes_first() -> None:
    from conftest import make_tiny_tokenizer

    for group in make_groups(make_tiny_tokenizer(begins_with_bos=True), SHORT, SMALL):
        assert (group.documents[:, 0] == 256).all()
        assert group.documents.shape[1] + group.questions[0].tokens.shape[1] in (399, 400)


def test_figures_are_those_of_one_plain_pass(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = replace(SMALL, formats=())
    rows = recall.run(tiny_model, tiny_tokenizer, settings)["rows"]
    found: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for group in make_groups(tiny_tokenizer, SHORT, settings):
        for question in group.questions:
            whole = torch.cat([group.documents, question.tokens], dim=1)
            with torch.inference_mode():
                logits = tiny_model(whole).logits[:, -question.answer - 1 : -1]
            targets = whole[:, -question.answer :]
            hits = logits.argmax(-1) == targets
            hits = hits.all(1) if group.task != "copy" else hits.flatten()
            found.setdefault((group.task, question.depth), []).append((hits, token_losses(logits, targets).flatten()))
    assert len(rows) == len(found) == 5
    for row in rows:
        parts = found[row["task"], row["depth"]]
        assert row["exact_match"] == pytest.approx(torch.cat([hits for hits, _ in parts]).float().mean().item())
        assert row["loss"] == pytest.approx(torch.cat([losses for _, losses in parts]).mean().item(), rel=1e-4)
        assert row["n"] == 3


def test_unquantized_equals_dynamic_and_coarser_formats_drift_more(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = recall.run(tiny_model, tiny_tokenizer, replace(SMALL, formats=("none", "int8", "fp8_e5m2")))["rows"]
    assert all(set(row) >= KEYS for row in rows)
    assert [row["format"] for row in rows[:4]] == ["dynamic", "none", "int8", "fp8_e5m2"]
    drift = {
        name: sum(abs(row["loss_drift"]) for row in rows if row["format"] == name) / 5
        for name in ("dynamic", "none", "int8", "fp8_e5m2")
    }
    assert drift["dynamic"] == 0
    assert drift["none"] < 1e-4
    assert 2e-4 < drift["int8"] < drift["fp8_e5m2"]


@pytest.mark.parametrize("task", recall.TASKS)
def test_reading_in_chunks_equals_reading_token_by_token(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "_CHUNK", 48)
    settings = replace(SMALL, tasks=(task,), context=(300,), n=2, keys=2)
    cache = named_cache("int8")
    with torch.inference_mode():
        for group in make_groups(tiny_tokenizer, SHORT, settings):
            both = [list(recall._ask(tiny_model, group, cache, way, lambda _: None)) for way in (True, False)]
            for (_, hits, chunked), (_, same_hits, stepwise) in zip(*both, strict=True):
                assert hits.shape == same_hits.shape == chunked.shape
                assert (chunked - stepwise).abs().max() < 0.01
                assert (chunked - stepwise).abs().mean() < 0.001


def test_a_cache_that_hides_its_values_is_read_token_by_token_and_drifts(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = recall.run(tiny_model, tiny_tokenizer, replace(SMALL, formats=("hf-fp8",), n=1))["rows"]
    theirs = [row for row in rows if row["format"] == "hf-fp8"]
    assert {row["scoring"] for row in theirs} == {"stepwise"}
    assert all(abs(row["loss_drift"]) > 1e-4 for row in theirs)


def test_a_garbling_cache_is_found_out_on_a_real_model(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    """And without quantization the model is right, as it is when it writes by itself: the figures mean something."""
    model, tokenizer = smollm2
    settings = RecallSettings(("int8", GARBLED), ("passkey", "copy"), (144,), (0.4,), n=1, seed=1)
    results = recall.run(model, tokenizer, settings)
    rows = {(row["task"], row["format"]): row for row in results["rows"]}
    name = next(row["format"] for row in results["rows"] if "garbled" in row["format"])
    for task, least in (("passkey", 1.0), ("copy", 0.5)):
        assert rows[task, "dynamic"]["exact_match"] >= least
        assert abs(rows[task, "int8"]["drift"]) < 0.06
        assert abs(rows[task, "int8"]["loss_drift"]) < 0.2
        assert rows[task, name]["scoring"] == "chunked"
        assert rows[task, name]["drift"] < -0.3
        assert rows[task, name]["loss_drift"] > 0.5
    assert results["notes"] == []
    group = next(make_groups(tokenizer, SHORT, settings))
    question = group.questions[0]
    whole = torch.cat([group.documents, question.tokens], dim=1)
    prompt = whole[:, : -question.answer]
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=question.answer, do_sample=False
    )
    assert torch.equal(written, whole)


def test_the_model_is_left_plain_even_after_a_failure(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tiny_model.config._attn_implementation

    def fail(*_: object) -> None:
        assert tiny_model.config._attn_implementation == "qkv"
        raise KeyError("stop")

    settings = replace(SMALL, formats=("int8",), tasks=("copy",), n=1)
    recall.run(tiny_model, tiny_tokenizer, settings)
    assert tiny_model.config._attn_implementation == before
    qkv.enable(tiny_model)
    monkeypatch.setattr(recall, "check_cache", fail)
    with pytest.raises(KeyError):
        recall.run(tiny_model, tiny_tokenizer, settings)
    assert tiny_model.config._attn_implementation == before


def test_progress_ends_at_its_total(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    calls: list[tuple[int, int]] = []
    recall.run(tiny_model, tiny_tokenizer, SMALL, lambda _, done, total: calls.append((done, total)))
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ("int9",)}, "unknown cache 'int9'"),
        ({"tasks": ("needle",)}, "unknown task 'needle'; use one of passkey, many_keys, copy"),
        ({"tasks": ()}, r"tasks=\(\) will not do; give one or several"),
        ({"depths": (0.5, 0.5)}, r"depths=\(0.5, 0.5\) will not do"),
        ({"depths": (0.5, 1.5)}, r"depth=1.5 is not a place in a text; use shares from 0"),
        ({"depths": (float("nan"),)}, "depth=nan"),
        ({"n": 0}, "n=0 is too few; use 1 or more"),
        ({"batch": 0}, "batch=0"),
        ({"keys": 40}, "keys=40 at 2 depths are too many"),
        ({"context": (512, 2000)}, "2000 tokens are more than the model's 1024 positions"),
        ({"context": (60,)}, "context=60 is too short"),
        ({"context": (3,), "tasks": ("copy",)}, "context=3 is too short"),
    ],
)
def test_bad_settings_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        recall.run(tiny_model, tiny_tokenizer, replace(SMALL, **changes))


def test_a_text_shorter_than_the_context_is_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a short text " * 10)
    with pytest.raises(ValueError, match=r"'short.txt' has 130 tokens, and a context of 400 needs \d+"):
        recall.run(tiny_model, tiny_tokenizer, replace(SMALL, text=str(file)))


def test_a_text_without_words_has_nothing_to_copy(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("1234 5678 " * 10)
    with pytest.raises(ValueError, match="has no words"):
        recall.run(tiny_model, tiny_tokenizer, replace(SMALL, text=str(file), tasks=("copy",)))


def run_command(*arguments: object) -> None:
    from qkv_eval.cli_recall import recall as command

    app = typer.Typer()
    app.command()(command)
    app(args=[str(argument) for argument in arguments], standalone_mode=False)


def test_the_command_prints_a_table_and_writes_the_rows_of_the_contract(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keep_threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "recall.json"
    sizes = ["--context", "300,400", "--depths", "0.1,0.9", "--limit", 2, "--keys", 3]
    run_command("--formats", "int8,hf-fp8", *sizes, "--model", tiny_folder, "--threads", 1, "--json", file)
    results = json.loads(file.read_text())
    rows = results["rows"]
    assert len(rows) == 2 * (2 + 2 + 1) * 3
    assert all(set(row) >= KEYS for row in rows)
    assert {row["n"] for row in rows} == {2}
    assert {(row["task"], row["depth"]) for row in rows} >= {("passkey", 0.1), ("many_keys", 0.9), ("copy", None)}
    assert len(results["meta"]["text"]["sha256"]) == 64
    assert results["meta"]["seed"] == 0
    captured = capsys.readouterr()
    assert "token by token: hf-fp8" in captured.out
    assert "right less than half of the time" in captured.err


def test_the_command_refuses_a_bad_depth_before_loading_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--depths: 'middle' will not do"):
        run_command("--depths", "middle")
    with pytest.raises(ValueError, match="depth=2"):
        run_command("--depths", "0.1,2")
    assert "loading" not in capsys.readouterr().err
