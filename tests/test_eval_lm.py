"""`qkv eval lm`: scores and texts through the stored cache, equal to lm-eval's own model where nothing is quantized."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command, make_tiny_model
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv.cli import app
from qkv.named_caches import NamedCache, named_cache

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qkv_eval import lm_compare, lm_tasks
from qkv_eval.cli_lm import lm as lm_command
from qkv_eval.lm import QKVLM, _batches, _Request

pytestmark = pytest.mark.usefixtures("plain_int8")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
KEYS = {"format", "task", "metric", "value", "stderr", "baseline", "drift", "answers_changed", "n"}

# Contexts of equal and unequal lengths, some with several continuations, of one token and more.
REQUESTS = [
    (context, continuation)
    for context, continuations in {
        "The sky is": [" blue", " grey and low", " x"],
        "The sea is": [" deep", "."],
        "A much longer context than the other two, which are short, so that it has a pass of its own": [" indeed", "!"],
        "It": ["s", " is", " was long ago"],
        "": ["a text without a context"],
    }.items()
    for continuation in continuations
]
# Every format, and set-ups in which a token of padding could change what others are stored as.
# mxfp4 has blocks of 32 channels, and the tiny model heads of 16; rotated keys are exact in texts as short as these.
LATE = {"mxfp4", *(f"int{bits}_rot" for bits in range(2, 7))}
SETUPS: dict[str, dict[str, Any]] = {name: {"format": name} for name in qkv.formats() if name not in LATE} | {
    "window": {"format": "fp8_e5m2", "residual_length": 5, "sink_tokens": 3},
    "head": {"format": "fp8_e5m2", "granularity": "head"},
}


def of_setup(name: str, **more: Any) -> NamedCache:
    setup = {**SETUPS[name], **more}
    return NamedCache(name, lambda config: qkv.QKVCache(config, **setup), is_ours=True)


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, place, ("a task", place, 1)) for place, given in enumerate(arguments)]


def scores_of(lm: HFLM, requests: Sequence[tuple[str, str]] = REQUESTS) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", requests), disable_tqdm=True)


def numbers(scores: Sequence[tuple[float, bool]]) -> torch.Tensor:
    return torch.tensor([score for score, _ in scores], dtype=torch.float64)


def make_sliding_model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=12,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    return MistralForCausalLM(config).eval()


# ---- scores and texts against lm-eval's own model --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "dynamic"])
@pytest.mark.parametrize("max_length", [None, 24])
def test_unquantized_scores_are_those_of_lm_evals_own_model(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, name: str, max_length: int | None
) -> None:
    theirs = scores_of(HFLM(tiny_model, tokenizer=tiny_tokenizer, batch_size=3, max_length=max_length))
    ours = scores_of(QKVLM(tiny_model, name, tokenizer=tiny_tokenizer, batch_size=4, max_length=max_length))
    torch.testing.assert_close(numbers(ours), numbers(theirs), rtol=1e-5, atol=1e-4)
    assert [top for _, top in ours] == [top for _, top in theirs]


def test_the_likeliest_continuation_is_known_as_such(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    request = (None, [10, 20, 30], [])
    with torch.inference_mode():
        written: Any = tiny_model.generate(torch.tensor([request[1]]), max_new_tokens=4, do_sample=False)
    likeliest = written[0, 3:].tolist()
    lm = QKVLM(tiny_model, "none", tokenizer=tiny_tokenizer)
    other = [*likeliest[:-1], (likeliest[-1] + 1) % 256]
    found = lm._loglikelihood_tokens([(None, request[1], likeliest), (None, request[1], other)], disable_tqdm=True)
    assert [top for _, top in found] == [True, False]


def test_rolling_scores_of_long_texts_are_those_of_lm_evals_own_model(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [("a text of more than two windows, " * 5,), ("a short one",)]
    requests = instances("loglikelihood_rolling", texts)
    theirs = HFLM(tiny_model, tokenizer=tiny_tokenizer, batch_size=2, max_length=64).loglikelihood_rolling(requests)
    found = {
        name: QKVLM(tiny_model, name, tokenizer=tiny_tokenizer, max_length=64).loglikelihood_rolling(requests)
        for name in ("none", "fp8_e5m2")
    }
    assert found["none"] == pytest.approx(theirs, rel=1e-5)
    assert all(abs(a - b) > 1e-3 for a, b in zip(found["fp8_e5m2"], theirs, strict=True))


def test_unquantized_texts_are_those_of_lm_evals_own_model(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", [(text, wanted) for text in ("a prompt", "another one", "third")])
    theirs = HFLM(tiny_model, tokenizer=tiny_tokenizer, batch_size=3).generate_until(requests, disable_tqdm=True)
    ours = QKVLM(tiny_model, "none", tokenizer=tiny_tokenizer, batch_size=3).generate_until(requests, disable_tqdm=True)
    assert ours == theirs
    assert all(ours)


@pytest.mark.parametrize("name", SETUPS)
def test_texts_do_not_depend_on_what_is_written_beside_them(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    """Padding on the left would be the sinks of a row, or have a share in its scales."""
    wanted = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    prompts = ["a prompt that is longer than the others " * 2, "another one", "third"]
    requests = instances("generate_until", [(text, wanted) for text in prompts])
    alone, together = (
        QKVLM(tiny_model, of_setup(name), tokenizer=tiny_tokenizer, batch_size=size).generate_until(requests, True)
        for size in (1, 3)
    )
    assert together == alone


# ---- the scored pass sees what is stored -----------------------------------------------------------------------------


def reference(model: PreTrainedModel, cache: NamedCache, lm: HFLM, request: tuple[str, str], prompt: bool) -> float:
    """One continuation, token by token; with ``prompt`` after its context but for the last token in one pass."""
    context, continuation = (
        lm._encode_pair(*request) if request[0] else ([lm.prefix_token_id], lm.tok_encode(request[1]))
    )
    tokens = torch.tensor([context + continuation])
    stored = cache.make(model.config)
    (qkv.enable if cache.is_ours else qkv.disable)(model)
    begin, total = 0, 0.0
    with torch.inference_mode():
        if prompt and len(context) > 1:
            begin = len(context) - 1
            model(tokens[:, :begin], past_key_values=stored, use_cache=True)
        for place in range(begin, tokens.shape[1] - 1):
            logits = model(tokens[:, place : place + 1], past_key_values=stored, use_cache=True).logits[0, -1]
            if place >= len(context) - 1:
                total += float(logits.log_softmax(-1)[tokens[0, place + 1]])
    qkv.disable(model)
    return total


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
def test_scores_are_those_of_decoding_token_by_token_in_any_batch(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str, sliding: bool
) -> None:
    model: PreTrainedModel = make_sliding_model() if sliding else make_tiny_model()
    lms = [QKVLM(model, of_setup(name), tokenizer=tiny_tokenizer, batch_size=size) for size in (1, 16)]
    alone, together = (numbers(scores_of(lm)) for lm in lms)
    expected = torch.tensor(
        [reference(model, of_setup(name), lms[0], request, prompt=False) for request in REQUESTS], dtype=torch.float64
    )
    unquantized = numbers(scores_of(QKVLM(model, "dynamic", tokenizer=tiny_tokenizer)))
    assert lms[0].scoring == "chunked"
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=2e-3)
    if name not in ("none", "head"):  # with scales per head the first 64 tokens are exact
        assert float((together - unquantized).abs().max()) > 1e-2


def test_a_cache_whose_pass_sees_unquantized_tokens_is_scored_token_by_token(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    caches = named_cache("hf-fp8"), of_setup("fp8_e5m2", prefill="exact")
    unquantized = numbers(scores_of(QKVLM(tiny_model, "dynamic", tokenizer=tiny_tokenizer)))
    for cache in caches:
        lm = QKVLM(tiny_model, cache, tokenizer=tiny_tokenizer, batch_size=1)
        found = numbers(scores_of(lm))
        expected = [reference(tiny_model, cache, lm, request, prompt=True) for request in REQUESTS]
        assert lm.scoring == "stepwise"
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=2e-3)
        assert float((found - unquantized).abs().max()) > 1e-2


def test_no_way_into_the_model_goes_around_the_cache(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = HFLM(tiny_model, tokenizer=tiny_tokenizer)._model_call(tokens)
    unquantized, quantized = (
        QKVLM(tiny_model, name, tokenizer=tiny_tokenizer)._model_call(tokens) for name in ("none", "fp8_e5m2")
    )
    torch.testing.assert_close(unquantized, theirs, rtol=1e-4, atol=1e-4)
    assert float((quantized - theirs).abs().max()) > 1e-2


def test_the_model_is_left_as_it_was(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    before = tiny_model.config._attn_implementation
    lm = QKVLM(tiny_model, "int8", tokenizer=tiny_tokenizer)
    scores_of(lm)
    assert tiny_model.config._attn_implementation == before
    with pytest.raises(ValueError, match="at least one token"):
        lm._loglikelihood_tokens([(None, [1], [])], disable_tqdm=True)
    assert tiny_model.config._attn_implementation == before


def test_batches_hold_contexts_of_one_length_and_all_requests_once() -> None:
    lengths = [3, 5, 3, 3, 8, 5, 3]
    requests = [
        _Request(place, tuple(range(owner, owner + length)), (1,) * (1 + place % 4))
        for place, (owner, length) in enumerate((owner, lengths[owner]) for owner in range(7) for _ in range(owner + 1))
    ]
    batches = _batches(requests, 6)
    assert sorted(request.place for batch in batches for request in batch) == list(range(28))
    assert all(len({len(request.context) for request in batch}) == 1 for batch in batches)
    assert max(map(len, batches)) <= 6
    assert [len(batch[0].context) for batch in batches] == sorted((len(b[0].context) for b in batches), reverse=True)
    far = [_Request(0, (1,), (1,)), _Request(1, (2,), (1,) * 30), _Request(2, (3,), (1,) * 80)]
    assert [len(batch) for batch in _batches(far, 6)] == [1, 2]  # 50 tokens of padding cost more than a pass
    for batch in batches:  # those of one context side by side
        owners = [request.context for request in batch]
        assert owners == [context for context in dict.fromkeys(owners) for _ in range(owners.count(context))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": "auto"}, "batch_size='auto'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"cache": "int9"}, "unknown cache 'int9'"),
        ({"backend": "seq2seq"}, "decoder-only"),
        ({"max_length": 4}, "5 tokens is longer than the model's limit of 4"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        scores_of(QKVLM(tiny_model, tokenizer=tiny_tokenizer, **arguments), [("a", "12345")])


# ---- tasks over local files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few documents for each of our tasks."""
    folder = tmp_path_factory.mktemp("data")
    questions = [
        {
            "query": f"Question: Which is it, {n}?\n",
            "choices": ["this", "that one", f"no. {n}"][: 2 + n % 2],
            "gold": n % 2,
        }
        for n in range(8)
    ]
    # A text may hold a line break that JSON does not escape.
    words = [{"context": f"It was\u2028a text of {n}", "continuation": "words"} for n in range(8)]
    for name, documents in {"arc_easy": questions, "piqa": questions, "lambada_openai": words}.items():
        lines = [json.dumps(document, ensure_ascii=False) for document in documents]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_our_task_files_put_questions_as_lm_eval_does(data: Path) -> None:
    tasks = lm_tasks.load_tasks(["arc_easy", "piqa", "lambada_openai"], str(data))["tasks"]
    for name in ("arc_easy", "piqa"):
        task = tasks[name]
        task.build_all_requests(limit=2)
        assert [request.args for request in task.instances] == [
            ("Question: Which is it, 0?\nAnswer:", " this"),
            ("Question: Which is it, 0?\nAnswer:", " that one"),
            ("Question: Which is it, 1?\nAnswer:", " this"),
            ("Question: Which is it, 1?\nAnswer:", " that one"),
            ("Question: Which is it, 1?\nAnswer:", " no. 1"),
        ]
        assert [task.doc_to_target(document) for document in task.eval_docs][:3] == [0, 1, 0]
    tasks["lambada_openai"].build_all_requests(limit=1)
    assert tasks["lambada_openai"].instances[0].args == ("It was\u2028a text of 0", " words")


GOOD = {"query": "q", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps({"query": "q", "choices": ["a", "b"]}), "line 2: the column 'gold' is missing; this task needs"),
        (json.dumps({}), "the column 'query' is missing"),
        ("{", "line 2: not JSON"),
        ("[1]", "not a JSON object but list"),
        (json.dumps({**GOOD, "gold": 2}), "'gold' must be the place of a choice, 0 to 1, not 2"),
        (json.dumps({**GOOD, "gold": "0"}), "not '0'"),
        (json.dumps({**GOOD, "choices": ["a"]}), "at least two texts"),
        (json.dumps({**GOOD, "choices": "ab"}), "at least two texts"),
        (json.dumps({**GOOD, "query": " "}), "'query' must be a text"),
    ],
)
def test_a_line_that_is_not_as_it_should_be_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "piqa.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ValueError, match=r"piqa\.jsonl', line 2") as error:
        lm_tasks.load_tasks(["piqa"], str(tmp_path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data: there is no folder '/no/such/folder'"):
        lm_tasks.load_tasks(["piqa"], "/no/such/folder")
    with pytest.raises(ValueError, match=r"cannot read the task file .*piqa\.jsonl': No such file"):
        lm_tasks.load_tasks(["piqa"], str(tmp_path))
    (tmp_path / "piqa.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no documents"):
        lm_tasks.load_tasks(["piqa"], str(tmp_path))
    with pytest.raises(ValueError, match=r"piqa\.jsonl is read from a local folder; give it with --data DIR"):
        lm_tasks.local_documents(file="piqa.jsonl", columns=["query"])


def test_an_unknown_task_names_similar_ones(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks

    manager = tasks.TaskManager
    # Without lm-eval's own thousands of files, which take their time.
    monkeypatch.setattr(tasks, "TaskManager", lambda **given: manager(**{**given, "include_defaults": False}))
    with pytest.raises(
        ValueError, match="unknown task 'piqqa'; similar names: piqa; with --data DIR there are arc_easy"
    ):
        lm_tasks.load_tasks(["piqqa", "piqa"], str(data))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_tasks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lm-eval; run: pip install 'qkv\[eval\]'"):
        lm_compare.check_statistics()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ValueError, match=r"scipy; run: pip install 'qkv\[eval\]'"):
        lm_compare.check_statistics()


# ---- which answers changed -------------------------------------------------------------------------------------------


def outcome(values: Sequence[Any], answers: Sequence[Any] | None = None) -> lm_compare._Outcome:
    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers)

    return lm_compare._Outcome(mean(values), values, answers, mean, is_mean=True)


def test_equal_accuracy_can_hide_changed_answers() -> None:
    before = outcome([1, 1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 1, 0])
    after = outcome([0, 0, 1, 1, 1, 0, 0, 1], [2, 2, 0, 0, 0, 2, 1, 0])
    row = lm_compare.compare(after, before)
    assert (row["value"], row["baseline"], row["drift"]) == (0.5, 0.5, 0)
    assert (row["to_right"], row["to_wrong"], row["answers_changed"]) == (2, 2, 5)  # one wrong answer for another
    assert row["mcnemar_p"] == 1
    assert row["stderr"] == pytest.approx(math.sqrt(2 / 7 / 8))
    assert row["drift_stderr"] == pytest.approx(math.sqrt(4 / 7 / 8))


def test_a_metric_that_is_not_right_or_wrong_has_no_changed_answers() -> None:
    row = lm_compare.compare(outcome([0.25, 1.0]), outcome([0.5, 1.0]))
    assert row["drift"] == pytest.approx(-0.125)
    assert row["answers_changed"] is row["to_right"] is row["to_wrong"] is row["mcnemar_p"] is None


@pytest.mark.parametrize(("to_right", "to_wrong"), [(0, 0), (0, 5), (3, 9), (7, 7), (60, 30)])
def test_mcnemar_is_the_two_sided_binomial_test(to_right: int, to_wrong: int) -> None:
    changed, least = to_right + to_wrong, min(to_right, to_wrong)
    tail = sum(math.comb(changed, k) for k in range(least + 1)) / 2**changed
    assert lm_compare.mcnemar(to_right, to_wrong) == pytest.approx(min(1.0, 2 * tail))


def test_the_standard_error_of_another_metric_is_drawn() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    mean = outcome(values)
    drawn = lm_compare._Outcome(mean.value, values, None, mean.aggregate, is_mean=False)
    assert lm_compare.compare(drawn, drawn)["stderr"] == pytest.approx(
        lm_compare.compare(mean, mean)["stderr"], rel=0.2
    )
    assert lm_compare.compare(drawn, drawn)["drift_stderr"] == 0


def test_an_answer_is_the_likeliest_choice_or_that_by_its_length() -> None:
    task = SimpleNamespace(OUTPUT_TYPE="multiple_choice", doc_to_choice=lambda doc: doc["choices"])
    sample = {
        "doc": {"choices": ["ab", "a much longer one", "\u00e9\u00e9"]},
        "filtered_resps": [(-3, 0), (-9, 0), (-3.5, 1)],
    }
    assert [lm_compare.answer_of(task, sample, metric) for metric in ("acc", "acc_norm", "acc_bytes")] == [0, 1, 1]
    assert lm_compare.answer_of(task, sample, "f1") is None
    task.OUTPUT_TYPE = "generate_until"
    assert lm_compare.answer_of(task, {"filtered_resps": ["42"]}, "exact_match") == "42"


def test_rows_hold_each_cache_against_the_unquantized_one(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, data: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    settings = lm_compare.LmSettings(("none", "fp8_e5m2", "hf-fp8"), data=str(data), limit=6)
    results = lm_compare.run(tiny_model, tiny_tokenizer, settings, lambda *what: told.append(what))
    rows = results["rows"]
    assert [(row["task"], row["metric"], row["format"]) for row in rows] == [
        (task, metric, name)
        for task, metrics in {
            "arc_easy": ("acc", "acc_norm"),
            "piqa": ("acc", "acc_norm"),
            "lambada_openai": ("perplexity", "acc"),
        }.items()
        for metric in metrics
        for name in ("dynamic", "none", "fp8_e5m2", "hf-fp8")
    ]
    assert all(set(row) >= KEYS and row["n"] == 6 for row in rows)
    for row in rows:
        if row["metric"] == "perplexity":
            assert row["answers_changed"] is None
            assert row["drift"] == 0 if row["format"] == "dynamic" else abs(row["drift"]) < 0.1 * row["value"]
            assert (row["format"] in ("fp8_e5m2", "hf-fp8")) == (abs(row["drift"]) > 1e-4 * row["value"])
        else:
            assert row["value"] - row["baseline"] == pytest.approx((row["to_right"] - row["to_wrong"]) / row["n"])
            if row["format"] in ("dynamic", "none"):
                assert row["answers_changed"] == row["drift"] == 0
        assert row["scoring"] == ("stepwise" if row["format"] == "hf-fp8" else "chunked")
    assert set(results["seconds"]) == {"dynamic", "none", "fp8_e5m2", "hf-fp8"}
    assert ("scoring through none", 6 * 5 + 6, 6 * 5 + 6) in told


def test_a_cache_of_others_that_fails_is_a_note_and_ours_is_an_error(
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("an odd number of groups")

    def caches(is_ours: bool) -> list[NamedCache]:
        return [named_cache("dynamic"), NamedCache("broken", fail, is_ours=is_ours)]

    settings = lm_compare.LmSettings((), ("piqa",), str(data), limit=10)
    monkeypatch.setattr(lm_compare, "with_baseline", lambda names: caches(is_ours=False))
    results = lm_compare.run(tiny_model, tiny_tokenizer, settings)
    assert {row["format"] for row in results["rows"]} == {"dynamic"}
    assert results["notes"] == [
        "broken failed: an odd number of groups",
        "the task piqa has 8 documents, not 10",
    ]
    monkeypatch.setattr(lm_compare, "with_baseline", lambda names: caches(is_ours=True))
    with pytest.raises(RuntimeError, match="odd number"):
        lm_compare.run(tiny_model, tiny_tokenizer, settings)


# ---- the command, and lm-eval's own --------------------------------------------------------------------------------


@pytest.fixture
def lm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `qkv` have the command `lm`, whatever it is registered as."""
    monkeypatch.setattr(app, "entry_points", lambda group: [SimpleNamespace(name="lm", load=lambda: lm_command)])


@pytest.mark.usefixtures("lm_only")
def test_the_command_prints_a_table_and_writes_the_rows_of_the_contract(
    command: Command, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    arguments = ["lm", "--data", data, "--tasks", "lambada_openai,piqa", "--limit", 3, "--model", tiny_folder]
    done = command(*arguments, "--formats", "int8,hf-fp8", "--json", tmp_path / "lm.json")
    assert done.status == 0, done.err
    results = json.loads((tmp_path / "lm.json").read_text())
    assert len(results["rows"]) == 4 * 3
    assert all(set(row) >= KEYS for row in results["rows"])
    assert results["meta"]["limit"] == 3
    assert "McNemar" in done.out
    assert "Token by token: hf-fp8" in done.out
    assert "scoring through int8: done" in done.err
    assert "Passed an already-initialized model" not in done.err  # what lm-eval says of how it is called

    done = command(*arguments, "--formats", "int8", "--json", "-")
    assert len(json.loads(done.out)["rows"]) == 4 * 2


@pytest.mark.usefixtures("lm_only")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "/no/such/folder"], "--data: there is no folder '/no/such/folder'"),
        (["--formats", "int9"], "unknown cache 'int9'"),
        (["--tasks", ","], "--tasks is empty"),
        (["--batch", "0"], "--batch"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_status_2(command: Command, arguments: list[str], words: str) -> None:
    done = command("lm", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("qkv: error: ")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.usefixtures("lm_only")
def test_a_missing_column_is_found_before_the_model_is_loaded(command: Command, tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text('{"query": "q", "gold": 0}\n')
    done = command("lm", "--data", tmp_path, "--tasks", "piqa", "--model", "/no/such/model")
    assert done.status == 2
    assert "line 1: the column 'choices' is missing" in done.err.splitlines()[-1]


def test_lm_eval_knows_the_model_and_our_task_files_bring_it_along() -> None:
    from lm_eval.api.registry import get_model
    from lm_eval.tasks._yaml_loader import load_yaml

    from qkv_eval import lm

    assert get_model("qkv") is QKVLM
    assert set(lm_tasks.local_tasks()) == set(lm_compare.TASK_NAMES)
    for path in lm_tasks.local_tasks().values():
        assert load_yaml(path)["custom_dataset"] is lm.local_documents


def test_the_module_runs_as_lm_evals_own_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qkv_eval.lm", "run", "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "--model_args" in done.stdout


# ---- the embedded model on real questions --------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the data files of {SHARED}")
def test_smollm2_without_quantization_answers_every_document_as_lm_evals_own_model(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = smollm2
    tasks = lm_tasks.load_tasks(lm_compare.TASK_NAMES, str(SHARED))
    with lm_tasks.quiet():
        theirs = lm_compare._evaluate(HFLM(model, tokenizer=tokenizer, batch_size=8), tasks, 3)
        ours = lm_compare._evaluate(QKVLM(model, "none", tokenizer=tokenizer), tasks, 3)
    assert list(theirs) == list(ours)
    for key, outcome in ours.items():
        assert outcome.answers == theirs[key].answers
        assert outcome.values == pytest.approx(theirs[key].values, rel=1e-5, abs=1e-3)
