"""`qkv bench redundancy`: how often keys are computed, and why it is right to keep them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROSE, Command, make_tiny_model
from families import FAMILIES
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from qkv.named_caches import as_argument
from qkv_eval.bench import redundancy
from qkv_eval.bench.redundancy import (
    NO_CACHE,
    USUAL,
    ProjectionCounts,
    ProjectionHooks,
    RedundancySettings,
    find_projections,
    fit_growth,
    positions_with_cache,
    positions_without_cache,
    waste_factor,
)

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

KEYS = {
    "cache",
    "prompt",
    "generated",
    "positions_computed",
    "expected",
    "factor",
    "first_position_computed",
    "layers",
    "seconds",
    "ms_first",
    "ms_last",
    "tokens",
    "counts",
}
# Of 26 tokens the windows and chunks of these models, of 16, hold but a part.
PROMPT, GENERATED = 20, 6


def measure(model: PreTrainedModel, caches: tuple[str, ...] = ("int8",), **settings: Any) -> dict[str, Any]:
    return redundancy.run(model, RedundancySettings(caches, **{"rounds": 1, **settings}))


def known_family(name: str) -> PreTrainedModel:
    try:
        return FAMILIES[name]()
    except AttributeError:
        pytest.skip(f"this version of transformers has no {name}")


# ---- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "generated"), [(1, 1), (1, 9), (7, 1), (7, 5), (100, 37)])
def test_the_closed_forms_are_what_reading_step_by_step_adds_up_to(prompt: int, generated: int) -> None:
    reads = [range(prompt + step) for step in range(generated)]
    assert positions_without_cache(prompt, generated) == sum(map(len, reads))
    assert positions_with_cache(prompt, generated) == len({place for read in reads for place in read})
    assert waste_factor(prompt, generated) == sum(map(len, reads)) / len(reads[-1])


def test_usual_factors_are_the_closed_forms_and_one_new_token_wastes_nothing() -> None:
    rows = redundancy.usual_factors()
    assert [(row["prompt"], row["generated"]) for row in rows] == list(USUAL)
    assert all(row["factor"] == row["without_cache"] / row["with_cache"] > 50 for row in rows)
    assert waste_factor(1000, 1) == 1


# ---- counts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("T5", "BART", "Whisper")])
def test_counts_of_every_family_are_the_closed_forms(name: str) -> None:
    rows = measure(known_family(name), prompt_tokens=(PROMPT,), new_tokens=(GENERATED,))["rows"]
    assert [row["cache"] for row in rows] == [NO_CACHE, "dynamic", "int8"]
    plain, *cached = rows
    total = PROMPT + GENERATED
    assert plain["positions_computed"] == plain["expected"] == PROMPT * GENERATED + GENERATED * (GENERATED - 1) // 2
    assert plain["counts"] == [min(GENERATED, total - 1 - place) for place in range(total)]
    assert plain["first_position_computed"] == GENERATED
    assert plain["factor"] == pytest.approx(waste_factor(PROMPT, GENERATED))
    for row in cached:
        assert row["positions_computed"] == row["expected"] == total - 1
        assert row["counts"] == [1] * (total - 1) + [0]  # the last token's keys are never needed
        assert row["factor"] == row["first_position_computed"] == 1
    for row in rows:
        assert row["layers_agree"]
        # Latent attention makes values of all positions again, see below.
        assert row["value_positions_computed"] == row["positions_computed"] or name == "DeepSeek-V3"
        assert row["layer_positions_computed"] == row["layers"] * row["positions_computed"]
        assert row["head_positions_computed"] == row["kv_heads"] * row["positions_computed"]


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
def test_an_encoder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"has an encoder.*a decoder alone"):
        measure(known_family(name))


def test_each_step_expands_what_latent_attention_keeps_and_a_note_says_so() -> None:
    results = measure(known_family("DeepSeek-V3"), prompt_tokens=(6,), new_tokens=(3,))
    plain, dynamic, _ = results["rows"]
    assert plain["value_positions_computed"] == dynamic["value_positions_computed"] == 6 + 7 + 8
    assert dynamic["positions_computed"] == 8
    assert any("dynamic: latent attention keeps what keys and values are made of" in note for note in results["notes"])
    ordinary = measure(known_family("Llama"), prompt_tokens=(6,), new_tokens=(3,))
    assert all(row["value_positions_computed"] == row["positions_computed"] for row in ordinary["rows"])
    assert not any("latent" in note for note in ordinary["notes"])


def test_a_model_without_known_projections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redundancy, "_SEPARATE", (("k", "v"),))
    with pytest.raises(
        ValueError, match=r"no projections of keys and values are found in Llama.*called k, v, qkv_proj"
    ):
        find_projections(make_tiny_model())


def test_a_layer_whose_projections_are_called_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = find_projections
    monkeypatch.setattr(redundancy, "find_projections", lambda model: whole(model)[:1])
    with pytest.raises(ValueError, match="2 layers of this model keep keys, and 1 projections were seen"):
        measure(make_tiny_model())


def test_layers_and_heads_multiply_both_counts_and_leave_the_factor() -> None:
    factors = set()
    for layers, heads in ((1, 1), (2, 1), (2, 3), (5, 3)):
        model = make_tiny_model(num_hidden_layers=layers, num_key_value_heads=heads)
        plain, dynamic, _ = measure(model, prompt_tokens=(9,), new_tokens=(4,))["rows"]
        assert (plain["layers"], plain["kv_heads"]) == (layers, layers * heads)
        for key, times in (("layer_positions_computed", layers), ("head_positions_computed", layers * heads)):
            assert (plain[key], dynamic[key]) == (times * (9 + 10 + 11 + 12), times * 12)
            factors.add(plain[key] / dynamic[key])
        factors.add(plain["factor"])
    assert factors == {waste_factor(9, 4)}


def test_hooks_are_gone_afterwards_even_when_the_model_fails(tiny_model: PreTrainedModel) -> None:
    found = find_projections(tiny_model)
    counts = ProjectionCounts(len(found), 4)

    def call(ids: list[int], first: int, rows: int) -> None:
        with ProjectionHooks(found) as hooks:
            hooks.at(counts, first, rows)
            tiny_model(input_ids=torch.tensor([ids]))

    with pytest.raises(IndexError):
        call([1, 2, 10**6], 0, 3)
    with pytest.raises(ValueError, match="computed keys of 2 tokens in a step of 1"):
        call([1, 2], 2, 1)
    tiny_model(input_ids=torch.tensor([[1, 2]]))
    assert not counts.keys.any()
    assert not any(each._forward_hooks for layer in found for each in (layer.keys, layer.values))


def test_generate_computes_as_often_and_writes_the_same(tiny_model: PreTrainedModel) -> None:
    """Ours is a loop of its own, since `generate` does not say where a step begins."""
    prompt = redundancy.random_prompt(tiny_model, 1, 10, 0)
    rows_seen: dict[str, int] = {}
    texts = {}
    for name, arguments in (
        (NO_CACHE, {"use_cache": False}),
        ("dynamic", as_argument(DynamicCache(config=tiny_model.config))),
    ):
        rows_seen[name] = 0

        def count(module: Any, inputs: Any, output: torch.Tensor, name: str = name) -> None:
            rows_seen[name] += output.shape[1]

        handle = find_projections(tiny_model)[0].keys.register_forward_hook(count)
        generated: Any = tiny_model
        ids = generated.generate(prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8, **arguments)
        texts[name] = ids[0, 10:].tolist()
        handle.remove()
    rows = {row["cache"]: row for row in measure(tiny_model, prompt_tokens=(10,), new_tokens=(8,))["rows"]}
    assert rows_seen == {name: rows[name]["positions_computed"] for name in rows_seen}
    assert texts[NO_CACHE] == texts["dynamic"]
    assert rows["dynamic"]["same_tokens"] == 8


# ---- growth --------------------------------------------------------------------------------------------------------


def test_counts_grow_with_the_square_of_the_new_tokens_without_a_cache(tiny_model: PreTrainedModel) -> None:
    results = measure(tiny_model, prompt_tokens=(12,), new_tokens=(5, 40))
    plain, dynamic, int8 = results["fits"][-3:]
    assert (plain["squared"], plain["linear"], plain["constant"]) == pytest.approx((0.5, 11.5, 0), abs=1e-6)
    for fit in (dynamic, int8):
        assert (fit["squared"], fit["linear"], fit["constant"]) == pytest.approx((0, 1, 11), abs=1e-6)
    assert all(fit["max_deviation"] < 1e-6 for fit in results["fits"])
    row = results["rows"][3]
    assert [token["position"] for token in row["tokens"]] == list(range(12, 52))
    so_far = [token["layer_positions_computed"] for token in row["tokens"]]
    assert so_far == [2 * positions_without_cache(12, g) for g in range(1, 41)]
    # Over all layers the same curve, twice as high; a part in the cube there is not.
    cubed, squared, _, _ = np.polyfit(np.arange(1, 41), so_far, 3)
    assert (cubed, squared) == pytest.approx((0, 2 * 0.5), abs=1e-6)
    assert len(results["rows"]) == 6
    assert fit_growth({**row, "generated": 3}) is None


def test_only_without_a_cache_does_a_token_take_longer_the_later_it_is() -> None:
    """A model as small as can be timed: of 16 times the positions, a step takes more than twice as long.

    The quickest token of several counts: whatever else runs on the machine makes others slower.
    """
    model = make_tiny_model(
        hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, head_dim=48
    )
    short, long = (
        {row["cache"]: row for row in measure(model, prompt_tokens=(prompt,), new_tokens=(8,), rounds=3)["rows"]}
        for prompt in (50, 800)
    )

    def later(row: dict[str, Any]) -> float:
        return min(token["ms"] for token in row["tokens"][1:])

    assert later(long[NO_CACHE]) > 2 * later(short[NO_CACHE])
    assert later(long[NO_CACHE]) > 2 * later(long["dynamic"])
    assert later(long["dynamic"]) < 2 * later(short["dynamic"])


# ---- what makes it possible ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_keys_and_values_of_a_position_are_the_same_whatever_follows(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer.encode(PROSE)[:60]])
    kept = 40
    others = torch.tensor([tokenizer.encode("Twelve 12, 13; und so weiter! " * 9)[: 60 - kept]])

    def read(*pieces: torch.Tensor) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        for piece in pieces:
            model(input_ids=piece, use_cache=True, logits_to_keep=1, **as_argument(cache))
        return cache

    def first(cache: DynamicCache) -> list[torch.Tensor]:
        return [side[:, :, :kept].clone() for layer in cache.layers for side in (layer.keys, layer.values)]

    alone = first(read(ids[:, :kept]))
    # Through the cache: what comes later reads what is kept, and changes none of it.
    for rest in (ids[:, kept:], others):
        assert all(map(torch.equal, alone, first(read(ids[:, :kept], *rest.split(1, dim=1)))))
    # Computed again with something behind: other sizes of matrices are summed in another order, and nothing else.
    again = [first(read(torch.cat([ids[:, :kept], rest], dim=1))) for rest in (ids[:, kept:], others)]
    for whole in again:
        assert max(map(distance, alone, whole)) < 1e-4
    # Of the same sizes, bit for bit; and what stands before does matter.
    assert all(map(torch.equal, *again))
    changed = first(read(torch.cat([ids[:, 1:2], ids[:, 1:]], dim=1)))
    assert min(distance(a[:, :, -1], b[:, :, -1]) for a, b in list(zip(alone, changed, strict=True))[2:]) > 1e-3


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_the_real_model_counts_and_writes_alike(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> None:
    results = measure(smollm2[0], prompt_tokens=(16,), new_tokens=(8,))
    plain, dynamic, int8 = results["rows"]
    assert (plain["positions_computed"], plain["layers"], plain["kv_heads"]) == (16 * 8 + 28, 30, 90)
    assert dynamic["positions_computed"] == int8["positions_computed"] == 23
    # Up to near ties, which rounding decides.
    assert dynamic["same_tokens"] == 8 or dynamic["gap"] < 1e-3
    assert plain["same_tokens"] == 8
    assert plain["kv_bytes"] is None
    assert int8["kv_bytes"] > 0


def test_a_difference_of_the_unquantized_cache_is_said_with_how_near_the_tokens_were() -> None:
    row = {"positions_computed": 1, "expected": 1, "value_positions_computed": 1, "layers_agree": True}
    rows = [{**row, "cache": name, "same_tokens": 5, "gap": 2e-6} for name in ("dynamic", "int8")]
    assert redundancy._remarks(rows) == [
        "DynamicCache goes on otherwise than no cache after 5 tokens, where the two likeliest were 2e-06 apart in "
        "logits: rounding decides near ties"
    ]
    assert redundancy._remarks([{**rows[1], "expected": 2}]) == [
        "int8: the counts are not those of the closed form, or layers differ in them"
    ]


# ---- the command and the report ------------------------------------------------------------------------------------


def test_the_command_and_its_panel(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a report needs matplotlib (pip install 'qkv[report]')")
    pytest.importorskip("jinja2", reason="a report needs jinja2 (pip install 'qkv[report]')")
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    lengths = ["--prompt-tokens", "20,30", "--new-tokens", 40, "--rounds", 1]
    done = command("bench", "redundancy", "--model", tiny_folder, *lengths, "--caches", "int8", "--json", results)
    assert done.status == 0, done.err
    for words in ("Positions whose keys were computed", "Time of the new tokens", "1,580", "59", "4,034.0"):
        assert words in done.out, words
    content = json.loads(results.read_text())
    assert content["meta"]["command"] == "bench redundancy"
    assert len(content["rows"]) == len(content["fits"]) == 6
    assert len(content["factors"]) == len(USUAL)
    for row in content["rows"]:
        assert set(row) >= KEYS
    assert command("report", results, "-o", page).status == 0
    text = page.read_text()
    for words in (
        "Why a cache",
        "Time of a token, ms, prompt 20, 40 new tokens",
        "Keys computed so far, prompt 30, 40 new tokens",
        "How often the keys of a position are computed",
        "no cache 26.8 times; otherwise once",
        "Keys computed, without a cache and with one",
        "no cache, position 0: 40 times",
    ):
        assert words in text, words


@pytest.mark.parametrize("value", ["text", None, True, [], [None, {}], {"a": 1}, math.nan, -1, 0], ids=str)
def test_values_that_cannot_be_drawn_are_left_out(value: Any) -> None:
    pytest.importorskip("matplotlib", reason="a report needs matplotlib (pip install 'qkv[report]')")
    pytest.importorskip("jinja2", reason="a report needs jinja2 (pip install 'qkv[report]')")
    from qkv_eval.report import build_page
    from qkv_eval.report.load import Run

    keys = KEYS - {"cache"}
    row = {"cache": "dynamic", **dict.fromkeys(keys, 3), "tokens": [{"position": 3, "ms": 1.0}], "counts": [1, 0]}
    for changed in ([*keys], ["tokens"], ["counts"], ["prompt"]):
        rows = ({**row, **dict.fromkeys(changed, value)}, {**row, "tokens": [{"position": value, "ms": value}]})
        page = build_page([Run(1, "x.json", "bench redundancy", rows, {"command": "bench redundancy"})])
        assert "Keys computed, without a cache and with one" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens: '0' will not do"),
        (["--new-tokens", "many"], "--new-tokens: 'many' will not do"),
        (["--caches", "int9"], "unknown cache 'int9'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, command: Command, tiny_folder: Path) -> None:
    done = command("bench", "redundancy", "--model", tiny_folder, *arguments)
    assert done.status == 2
    assert message in done.err


@pytest.mark.parametrize("change", [{"prompt": 0}, {"generated": 0}, {"rounds": 0}], ids=str)
def test_nothing_to_do_is_refused(change: dict[str, int], tiny_model: PreTrainedModel) -> None:
    numbers = {"prompt": 2, "generated": 2, "rounds": 1, **change}
    measured: Callable[..., Any] = redundancy.measure_redundancy
    with pytest.raises(ValueError, match="must be at least 1"):
        measured(tiny_model, [], numbers["prompt"], numbers["generated"], rounds=numbers["rounds"])
