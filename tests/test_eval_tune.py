"""`qkv tune`: the solver is exact, what is measured is what counts, and no kill, budget or bad input costs more."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import Command, make_tiny_model, make_tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import qkv
from qkv_eval import tune, tune_costs, tune_measure
from qkv_eval.results_file import ResultsFile
from qkv_eval.text import Text, load_text
from qkv_eval.tune_costs import Candidate, Ledger, Passes, default_candidates, measure_time, read_candidates
from qkv_eval.tune_measure import Measurements
from qkv_eval.tune_settings import TuneSettings, split_text
from qkv_eval.tune_solve import solve

SETUP = {"version": "1", "torch": "2", "transformers": "5", "python": "3.11", "processor": "a", "threads": 1}
# Without equalization, so that a channel of large keys spoils the others of its token.
CANDIDATES = {
    "keys": [
        {"format": "int4", "granularity": "token"},
        {"format": "int8", "granularity": "token", "equalize": False},
    ],
    "values": [
        {"format": "int3", "granularity": "token"},
        {"format": "int4", "granularity": "token"},
        {"format": "int8", "granularity": "token"},
    ],
}
SMALL: dict[str, Any] = {
    "window": 256,
    "measure_window": 256,
    "limit": 2,
    "validate": 1,
    "points": 4,
    "sink_tokens": 0,
    "formats": ("int8",),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Three layers; in the keys of the middle one, one channel is far larger than the others, and its query smaller."""
    made = make_tiny_model(num_hidden_layers=3)
    with torch.no_grad():
        attention: Any = made.model.layers[1].self_attn
        for channel in (5, 13):  # the two that rotary embedding turns into each other
            attention.k_proj.weight[channel] *= 60
            attention.q_proj.weight[channel::16] /= 60
    return made


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("candidates") / "candidates.yaml"
    path.write_text(yaml.safe_dump(CANDIDATES))
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned") / "tuned.measurements.jsonl"


@pytest.fixture(scope="module")
def tuned(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, candidates: str, file: Path) -> dict[str, Any]:
    """What tuning to 6.5 bits per value gives."""
    with ResultsFile(file) as kept:
        wanted = TuneSettings(bits=6.5, candidates=candidates, **SMALL)
        return tune.run(model, tokenizer, wanted, results=kept, setup=SETUP)


def again(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, candidates: str, file: Path, **changes: Any
) -> dict[str, Any]:
    """Tunes for something else, from the same measurements."""
    with ResultsFile(file) as kept:
        wanted = TuneSettings(candidates=candidates, **{**SMALL, **changes})
        return tune.run(model, tokenizer, wanted, results=kept, setup=SETUP)


# ---- solver --------------------------------------------------------------------------------------------------------

AMOUNTS = st.one_of(st.integers(0, 4).map(float), st.floats(0, 3), st.floats(-8, 0).map(lambda power: 10.0**power))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[float]]], list[float]]:
    limits = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    costs = [[draw(AMOUNTS) for _ in range(size)] for size in sizes]
    weights = [[[draw(AMOUNTS) for _ in range(limits)] for _ in range(size)] for size in sizes]
    return costs, weights, [draw(st.floats(0, 2.5)) * len(sizes) for _ in range(limits)]


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_solver_finds_what_trying_everything_finds(
    problem: tuple[list[list[float]], list[list[list[float]]], list[float]],
) -> None:
    costs, weights, limits = problem
    best, slack = float("inf"), 0.0
    for picks in itertools.product(*(range(len(group)) for group in costs)):
        sums = [sum(weights[g][pick][i] for g, pick in enumerate(picks)) for i in range(len(limits))]
        # Within rounding of a limit either answer will do.
        slack = max(slack, *(abs(s - limit) < 1e-9 for s, limit in zip(sums, limits, strict=True)))
        if all(s <= limit for s, limit in zip(sums, limits, strict=True)):
            best = min(best, sum(costs[g][pick] for g, pick in enumerate(picks)))
    found = solve(costs, weights, limits)
    if found is None:
        assert best == float("inf") or slack
        return
    assert all(w <= limit * (1 + 1e-9) + 1e-9 for w, limit in zip(found.weights, limits, strict=True))
    assert found.cost <= best + 1e-9
    assert found.exact
    assert found.cost >= best - 1e-9 or slack
    assert found.cost == pytest.approx(sum(group[pick] for group, pick in zip(costs, found.picks, strict=True)))


def test_a_whole_model_is_solved_within_its_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = [2.5, 3.5, 4.5, 5.5, 6.5, 8.25]
    scales = torch.rand(64, generator=generator).exp().pow(4).tolist()
    costs = [[scale * 4.0**-b for b in bits] for scale in scales]
    found = solve(costs, [[[b] for b in bits]] * 64, [64 * 4.5])
    assert found is not None
    assert found.exact
    assert 4.4 * 64 < found.weights[0] <= 4.5 * 64
    assert found.cost < 0.9 * sum(group[2] for group in costs)
    both = solve(costs, [[[b, 1 / b] for b in bits]] * 64, [64 * 4.5, 64 * 0.25])
    assert both is not None
    assert both.cost >= found.cost
    assert both.weights[1] <= 16 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("costs", "weights", "limits", "message"),
    [
        ([], [], [1.0], "at least one option"),
        ([[]], [[]], [1.0], "at least one option"),
        ([[1.0]], [[[1.0]]], [], "needs limits"),
        ([[float("nan")]], [[[1.0]]], [1.0], "finite"),
        ([[1.0]], [[[-1.0]]], [1.0], "at least 0"),
        ([[1.0]], [[[1.0, 2.0]]], [1.0], "have weights of shape"),
    ],
)
def test_what_is_no_problem_is_refused(costs: Any, weights: Any, limits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(costs, weights, limits)


# ---- what is measured ----------------------------------------------------------------------------------------------


def test_a_pass_from_a_layer_on_gives_what_a_whole_pass_gives(model: LlamaForCausalLM) -> None:
    windows = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    base = qkv.CacheConfig("none")
    with Passes(model, windows, 16) as passes:
        assert passes.resumes
        for layer in range(3):
            config = replace(base, layers={layer: Candidate("key", "fp8_e4m3").changes()})
            from_here = passes.divergence(config, layer)
            assert from_here.shape == (2, 48)
            assert from_here.mean() > 1e-8
            passes.resumes = False
            assert torch.equal(from_here, passes.divergence(config, layer))
            passes.resumes = True
            assert torch.equal(passes.divergence(base, layer), torch.zeros(2, 48))
    assert all("forward" not in vars(layer) for layer in model.model.layers)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_layers_need_all_before_them_gets_whole_passes(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    first, last = model.model.layers[0], model.model.layers[2]

    def remember(*arguments: Any, **named: Any) -> torch.Tensor:
        seen.append(type(first).forward(first, *arguments, **named))
        return seen[-1]

    monkeypatch.setattr(first, "forward", remember)
    hook = last.register_forward_hook(lambda module, given, output: output + seen.pop())
    try:
        with Passes(model, torch.randint(0, 256, (1, 32)), 8) as passes:
            assert not passes.resumes
            config = qkv.CacheConfig("none", layers={2: Candidate("value", "fp8_e4m3").changes()})
            assert passes.divergence(config, 2).mean() > 1e-8
        assert vars(first)["forward"] is remember
    finally:
        hook.remove()


@pytest.mark.parametrize("context", [100, 192])
@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_bits_are_those_of_a_real_cache(model: LlamaForCausalLM, context: int, granularity: str) -> None:
    ledger = Ledger(model, context)
    assert list(ledger.layers) == [0, 1, 2]
    base = qkv.CacheConfig("none", sink_tokens=4)
    key = Candidate("key", "int4", granularity, 32 if granularity == "channel" else None)
    value = Candidate("value", "int3_rot", "group", 16)
    both = replace(base, **key.changes(), **value.changes())
    bits, numbers = ledger.count(both, 1)
    assert numbers == 2 * 16 * context
    sides = ledger.side(key, 1, base) + ledger.side(value, 1, base)
    if granularity == "token":  # no token waits for its group
        assert sides == bits
    cache = qkv.QKVCache(model.config, both)
    qkv.enable(model)
    try:
        model(input_ids=torch.zeros(1, context, dtype=torch.int64), past_key_values=cache)
    finally:
        qkv.disable(model)
    assert ledger.bits_per_value(both) == pytest.approx(cache.stats()["bits_per_value"], abs=1e-12)


def test_layers_of_a_sliding_window_count_what_they_keep() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=32,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    ledger = Ledger(model, 100)
    assert {geometry.window for geometry in ledger.layers.values()} == {32}
    cache = qkv.QKVCache(config, "fp8_e4m3")
    qkv.enable(model)
    for tokens in (99, 1):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), past_key_values=cache)
    bits, numbers = ledger.count(qkv.CacheConfig("fp8_e4m3"), 0)
    assert bits / numbers == pytest.approx(cache.stats()["bits_per_value"])
    assert numbers < 2 * 16 * 100


def test_the_reference_takes_the_time_of_the_reference(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_costs, "_MOST_TIMED", 2)
    geometry = Ledger(model, 64).layers[0]
    ours, reference, spread = measure_time(geometry, 3, 64, qkv.CacheConfig("int8"), rounds=5)
    assert 0.2 < ours / reference < 5
    assert spread >= 0


# ---- candidates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("keys: [{format: int8}]", "two lists, keys and values"),
        ("keys: []\nvalues: [{format: int8}]", "keys is missing or empty"),
        ("keys: [int8]\nvalues: [{format: int8}]", r"keys\[0\] must map format"),
        (
            "keys: [{format: int9}]\nvalues: [{format: int8}]",
            r"keys\[0\]: unknown format 'int9'; use one of none, int8",
        ),
        ("keys: [{format: int8}]\nvalues: [{format: int8, equalize: true}]", r"values\[0\]: unknown key 'equalize'"),
        ("keys: [{format: int8, granularity: row}]\nvalues: [{format: int8}]", "key_granularity='row' is not known"),
        ("keys: [{format: int8, group_size: [1]}]\nvalues: [{format: int8}]", "key_group_size must be a whole number"),
        ("keys: [", "is not valid YAML"),
    ],
)
def test_candidates_that_are_wrong_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_candidates(path)
    assert "c.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_candidates_have_names_and_repeats_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "keys: [{format: int8}, {format: int8}, {format: int8, equalize: false}, {format: int4, group_size: 32}]\n"
        "values: [{format: int4, granularity: group, group_size: 64}]"
    )
    read = read_candidates(path)
    assert [candidate.name for candidate in read["key"]] == ["int8", "int8-plain", "int4-32"]
    assert [candidate.name for candidate in read["value"]] == ["int4-group64"]


def test_defaults_are_what_there_is_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_candidates([64])
    names = ["int2_rot-32", "int2_rot", "int3_rot", "int4_rot", "int5_rot", "int6_rot", "int8"]
    assert [candidate.name for candidate in found["key"]] == [candidate.name for candidate in found["value"]] == names
    assert [candidate.group_size for candidate in default_candidates([80, 160])["value"]][:2] == [20, None]
    monkeypatch.setattr(qkv, "formats", lambda: ("none", "int8", "int4_rot"))
    assert [candidate.format for candidate in default_candidates([64])["key"]] == ["int4_rot", "int8"]
    monkeypatch.setattr(qkv, "formats", lambda: ("none", "int8"))
    assert [candidate.format for candidate in default_candidates([64])["value"]] == ["int8", "none"]


# ---- the choice ----------------------------------------------------------------------------------------------------


def test_the_layer_with_outlying_keys_gets_more_bits_for_them(tuned: dict[str, Any]) -> None:
    keys = {row["layer"]: row["format"] for row in tuned["rows"] if row["chosen"] and row["side"] == "key"}
    assert keys == {0: "int4-token", 1: "int8-token-plain", 2: "int4-token"}
    alone = {(row["layer"], row["format"]): row["kld"] for row in tuned["rows"] if row["side"] == "key"}
    assert alone[1, "int4-token"] > 5 * max(alone[0, "int4-token"], alone[2, "int4-token"])
    assert len(tuned["rows"]) == 3 * (2 + 3)
    assert sum(row["chosen"] for row in tuned["rows"]) == 3 * 2


def test_the_set_up_stores_what_was_promised_and_keeps_the_budget(
    tuned: dict[str, Any], model: LlamaForCausalLM, tmp_path: Path
) -> None:
    from qkv_eval.cli_tune import _write

    path = tmp_path / "tuned.yaml"
    _write(str(path), tuned["config"].to_dict(), ["a line\nwith a break"])
    assert path.read_text().startswith("# a line with a break\n")
    assert qkv.CacheConfig.from_yaml(path) == tuned["config"]
    cache = qkv.QKVCache(model.config, path)
    qkv.enable(model)
    try:
        model(input_ids=torch.zeros(1, tuned["context"], dtype=torch.int64), past_key_values=cache)
    finally:
        qkv.disable(model)
    bits = cache.stats()["bits_per_value"]
    assert bits == pytest.approx(tuned["choice"]["bits_per_value"], abs=1e-9)
    assert bits <= 6.5


def test_at_every_budget_the_choice_is_on_the_front_of_the_uniform_ones_or_below(tuned: dict[str, Any]) -> None:
    uniform = [row for row in tuned["verified"] if row["kind"] in ("uniform", "preset") and row["kld_validation"]]
    validated = [row for row in tuned["front"] if row.get("kld_validation") is not None]
    assert len(uniform) >= 3
    assert len(validated) >= 3
    for row in validated:
        assert row["bits_per_value"] <= row["budget"] * (1 + 1e-9)
        within = [other["kld_validation"] for other in uniform if other["bits_per_value"] <= row["budget"]]
        assert row["kld_validation"] <= min(within, default=float("inf"))
    within = [other["kld_validation"] for other in uniform if other["bits_per_value"] <= 6.5]
    assert tuned["choice"]["kld_validation"] <= min(within)
    predicted = [row["kld_predicted"] for row in sorted(tuned["front"], key=lambda row: row["budget"])]
    assert all(after <= before for before, after in itertools.pairwise(predicted))


def test_the_figures_are_those_of_eval_ppl(
    tuned: dict[str, Any], model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    from qkv.named_caches import NamedCache
    from qkv_eval.perplexity import score_caches, summarize

    parts = split_text(tokenizer, load_text(None), TuneSettings(bits=7, **SMALL))
    cache = NamedCache("tuned", lambda config: qkv.QKVCache(config, tuned["config"]), is_ours=True)
    scores = score_caches(model, parts.held_out, [cache])
    figures = summarize(scores["tuned"], scores["dynamic"])
    for key in ("ppl", "dppl_percent", "kld_mean", "same_top_percent", "tokens"):
        assert tuned["choice"][key] == pytest.approx(figures[key], rel=1e-4, abs=1e-7)
    assert tuned["verified"][0]["kind"] == "baseline"
    assert tuned["verified"][0]["bits_per_value"] == 32


def test_no_token_of_the_text_serves_two_purposes(tokenizer: PreTrainedTokenizerFast) -> None:
    content = "".join(chr(0x4E00 + i) for i in range(1500))  # three bytes, three tokens each
    wanted = TuneSettings(bits=4, window=300, measure_window=256, measure_windows=2, validate=3, limit=None)
    for begins in (False, True):
        of_bytes = make_tiny_tokenizer(begins_with_bos=begins)
        parts = split_text(of_bytes, Text("a text", content), wanted)
        assert [len(part) for part in (parts.measuring, parts.validation, parts.held_out)] == [2, 3, 10]
        found = [set(of_bytes.decode(w[begins:][3:-3])) - {"\N{REPLACEMENT CHARACTER}"} for w in itertools.chain(
            parts.measuring, parts.validation, parts.held_out)]  # fmt: skip
        assert sum(map(len, found)) == len(set().union(*found))
    with pytest.raises(
        ValueError, match="gives 5 windows of 300 tokens; 2 for measuring, 3 for validation and 1 held-"
    ):
        split_text(tokenizer, Text("a text", content[:505]), wanted)


def test_the_fewest_bits_are_found_that_keep_a_bound_on_the_validation_text(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, candidates: str, file: Path, tuned: dict[str, Any]
) -> None:
    bound = 2 * tuned["choice"]["kld_validation"]
    found = again(model, tokenizer, candidates, file, max_kld=bound)
    choice = found["choice"]
    assert choice["kld_validation"] <= bound
    assert choice["bits_per_value"] < tuned["choice"]["bits_per_value"]
    smaller = [row for row in found["front"] if row["budget"] < choice["bits_per_value"] - 1e-9]
    assert all(row["kld_validation"] > bound for row in smaller if row.get("kld_validation") is not None)
    with pytest.raises(ValueError, match=r"no choice .* keeps a divergence of at most 1e-09 nats; the closest, of"):
        again(model, tokenizer, candidates, file, max_kld=1e-9)


def test_a_limit_on_the_time_is_kept_by_what_pairs_take_together(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    candidates: str,
    file: Path,
    tuned: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(
        geometry: Any, q_per_kv: int, context: int, config: qkv.CacheConfig, *_: Any
    ) -> tuple[float, float, float]:
        assert q_per_kv == 3
        sides = [config.key_format or config.format, config.value_format or config.format]
        time = sum({"int8": 0.5, "int4": 0.7}.get(name, 0.9) for name in sides)
        # Two of few bits take longer together than each beside int8.
        return 1e-3 * (time + 0.1 * ("int8" not in sides)), 1e-3, 0.0

    monkeypatch.setattr(tune_measure, "measure_time", take)
    timed = again(model, tokenizer, candidates, file, bits=6.5, max_ratio_of_time=1.3)
    assert timed["choice"]["time_ratio"] <= 1.3
    assert timed["choice"]["bits_per_value"] <= 6.5
    assert all(row["time_share"] is not None for row in timed["rows"])
    assert all(row["time_ratio"] <= 1.3 for row in timed["front"])
    assert timed["asked"] == "at most 6.5 bits per value and at most 1.3 times the time of int8"
    alone = again(model, tokenizer, candidates, file, max_ratio_of_time=1.0)
    assert {row["format"] for row in alone["rows"] if row["chosen"]} == {"int8-token", "int8-token-plain"}
    with pytest.raises(ValueError, match=r"takes 0\.9 times the time of int8 or less; the fastest takes 1\.000 times"):
        again(model, tokenizer, candidates, file, max_ratio_of_time=0.9)


def test_sinks_stay_exact_with_every_candidate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, candidates: str
) -> None:
    wanted = TuneSettings(bits=9.5, candidates=candidates, **{**SMALL, "sink_tokens": 4, "points": 0, "limit": 1})
    found = tune.run(model, tokenizer, wanted, setup=SETUP)
    assert found["config"].sink_tokens == 4
    assert 9 < found["choice"]["bits_per_value"] <= 9.5


def test_a_prediction_that_is_far_off_and_a_better_uniform_one_are_told() -> None:
    choice = {"kld_predicted": 0.1, "kld_mean": 0.25, "bits_per_value": 4.5}
    other = {"format": "int4", "kind": "uniform", "kld_mean": 0.2, "bits_per_value": 4.5, "kld_validation": 1}
    notes = tune._doubts(choice, [choice | {"kind": "tuned"}, other], max_kld=0.1)
    assert len(notes) == 3
    assert "2.5 times the predicted one" in notes[0]
    assert "on held-out text it is 0.25" in notes[1]
    assert "int4 stores no more" in notes[2]


# ---- resuming ------------------------------------------------------------------------------------------------------


def test_a_second_run_measures_nothing_and_another_budget_no_layer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    candidates: str,
    file: Path,
    tuned: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(Passes, "__enter__", refuse)
    monkeypatch.setattr(tune_measure, "score_caches", refuse)
    before = file.read_bytes()
    same = again(model, tokenizer, candidates, file, bits=6.5)
    assert same == tuned
    assert file.read_bytes() == before
    with pytest.raises(AssertionError, match="measured again"):
        again(model, tokenizer, candidates, file, bits=6.5, measure_windows=1)
    monkeypatch.undo()
    monkeypatch.setattr(Passes, "__enter__", refuse)
    other = again(model, tokenizer, candidates, file, bits=6.0)
    assert other["choice"]["bits_per_value"] <= 6


KILLED = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from conftest import make_tiny_model, make_tiny_tokenizer
from pathlib import Path
from qkv_eval import results_file, tune
from qkv_eval.tune_settings import TuneSettings
whole, left = results_file._write, [int(sys.argv[4])]
def write_half(file, content):
    left[0] -= 1
    if left[0] < 0:
        os.write(file, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    whole(file, content)
results_file._write = write_half
wanted = TuneSettings(bits=9, candidates=sys.argv[3], **json.loads(sys.argv[5]))
with results_file.ResultsFile(Path(sys.argv[2])) as kept:
    tune.run(make_tiny_model(), make_tiny_tokenizer(), wanted, results=kept, setup=json.loads(sys.argv[6]))
"""


def test_after_a_kill_what_was_measured_is_not_measured_again(
    tokenizer: PreTrainedTokenizerFast, candidates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "measurements.jsonl"
    small = {**SMALL, "points": 0, "limit": 1, "formats": ["int8"]}
    arguments = [Path(__file__).parent, file, candidates, 4, json.dumps(small), json.dumps(SETUP)]
    victim = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert file.read_bytes().count(b"\n") == 4
    measured: list[int] = []
    whole = Passes.divergence

    def count(self: Passes, config: qkv.CacheConfig, layer: int) -> torch.Tensor:
        measured.append(layer)
        return whole(self, config, layer)

    monkeypatch.setattr(Passes, "divergence", count)
    wanted = TuneSettings(bits=9, candidates=candidates, **{**small, "formats": ("int8",)})
    with ResultsFile(file) as kept:
        assert "is half-written" in kept.problems[0]
        tune.run(make_tiny_model(), tokenizer, wanted, results=kept, setup=SETUP)
    assert len(measured) == 2 * 5 - 4


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(tiny_folder: Path, candidates: str, tmp_path: Path) -> list[Any]:
    sizes = ["--window", 256, "--measure-window", 256, "--limit", 1, "--validate", 1, "--points", 2, "--sinks", 2]
    return ["tune", "--model", tiny_folder, "--candidates", candidates, "-o", tmp_path / "tuned.yaml", *sizes]


def test_the_command_writes_a_set_up_and_results_that_the_report_draws(
    command: Command, quick: list[Any], tmp_path: Path
) -> None:
    done = command(*quick, "--bits", 7, "--json", tmp_path / "tune.json", "--threads", 1)
    assert done.status == 0, done.err
    assert "measuring single layers: done" in done.err
    assert "at most 7 bits per value" in done.out
    text = (tmp_path / "tuned.yaml").read_text()
    config = qkv.CacheConfig.from_yaml(tmp_path / "tuned.yaml")
    assert config.sink_tokens == 2
    assert "# Tuned by qkv tune for" in text
    assert str(tmp_path) not in text
    results = json.loads((tmp_path / "tune.json").read_text())
    assert results["meta"]["command"] == "tune"
    assert results["meta"]["text"]["windows"] == 1
    assert set(results["rows"][0]) == {
        "layer", "side", "format", "bits_per_value", "kld", "kld_stderr", "time_share", "chosen",
    }  # fmt: skip
    assert results["choice"] == results["verified"][-1]
    assert results["choice"]["format"] == "tuned"
    assert {"format", "scoring", "tokens", "ppl", "kld_mean", "same_top_percent"} <= set(results["choice"])
    from qkv_eval.report import load_runs

    assert [run.kind for run in load_runs([tmp_path / "tune.json"])] == ["tune", "eval ppl"]
    scored = [run for run in load_runs([tmp_path / "tuned.measurements.jsonl"]) if run.kind == "tune"]
    assert [len(run.rows) for run in scored] == [2 * 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--bits", "--max-kld"]),
        (["--bits", "4", "--max-kld", "0.1"], ["not both"]),
        (["--bits", "0"], ["bits=0.0"]),
        (["--bits", "nan"], ["bits=nan"]),
        (["--bits", "1"], ["no choice", "within 1 bits per value", "the smallest stores"]),
        (["--bits", "6", "-o", "tuned.json"], ["'tuned.json'", ".yaml"]),
        (["--bits", "6", "-o", "/no/such/folder/tuned.yaml"], ["/no/such/folder"]),
        (["--bits", "6", "--candidates", "missing.yaml"], ["missing.yaml"]),
        (["--bits", "6", "--formats", "dynamic"], ["'dynamic' is no set-up of ours"]),
        (["--bits", "6", "--formats", "int9"], ["int9"]),
        (["--bits", "6", "--text", "/no/such/text"], ["/no/such/text"]),
        (["--bits", "6", "--window", "2000"], ["1024 positions"]),
        (["--bits", "6", "--measure-window", "400"], ["measure_window=400", "256"]),
        (["--bits", "6", "--validate", "0"], ["--validate"]),
        (["--bits", "6", "--model", "/no/such/model"], ["/no/such/model"]),
    ],
)
def test_bad_input_exits_2_with_one_clear_line(
    command: Command, quick: list[Any], tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = command(*quick, *arguments)
    assert done.status == 2
    assert done.out == ""
    line = done.err.splitlines()[-1]
    assert line.startswith("qkv: error: ")
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []


def test_a_candidate_that_does_not_go_with_the_model_is_refused_if_given(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("keys: [{format: int8}]\nvalues: [{format: int4, granularity: group, group_size: 48}]")
    with pytest.raises(ValueError, match="the candidate int4-group48 for values cannot be used"):
        tune.run(model, tokenizer, TuneSettings(bits=6, candidates=str(path), **SMALL), setup=SETUP)


def test_smoothing_draws_an_outlying_divergence_towards_its_layer_and_its_candidate() -> None:
    candidates = {side: [Candidate(side, "int4"), Candidate(side, "int8")] for side in ("key", "value")}
    klds = {
        (layer, c): {"kld": 1e-2 if c.format == "int4" else 1e-4}
        for layer in range(4)
        for c in itertools.chain(*candidates.values())
    }
    klds[2, candidates["key"][0]] = {"kld": 1e-3}
    pairs = list(itertools.product(candidates["key"], candidates["value"]))
    measured: Any = object.__new__(Measurements)
    measured.candidates, measured.klds, measured.pairs = candidates, klds, pairs
    measured.ledger = SimpleNamespace(layers=dict.fromkeys(range(4)))
    plain, smooth = measured.costs(), measured.smooth_costs()
    assert plain[2][0] < smooth[2][0] < plain[1][0]
    assert smooth[0][3] == pytest.approx(plain[0][3], rel=0.3)
