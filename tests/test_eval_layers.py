"""`qkv eval layers`: errors by layer and head against an obvious computation, and what one layer alone does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import make_tiny_model
from families import FAMILIES, VOCABULARY
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import qkv
from qkv_eval import layers
from qkv_eval.layers import LayersSettings, measure_errors
from qkv_eval.text import cut_windows, embedded_text

pytestmark = pytest.mark.usefixtures("plain_int8")

KEYS = {"format", "layer", "head", "key_error", "value_error", "score_error", "output_error", "kld_alone"}
ERRORS = ("key_error", "value_error", "score_error", "output_error")


def random_windows(count: int, length: int, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def errors_of(model: PreTrainedModel, windows: torch.Tensor, name: str) -> dict[int, Any]:
    """The errors of each layer, and those of its kv heads."""
    setup = layers._setup(model, name)
    return {layer: sums.rows() for layer, sums in measure_errors(model, windows, [setup])[name].items()}


@torch.no_grad()
def queries_of(model: LlamaForCausalLM, windows: torch.Tensor) -> list[torch.Tensor]:
    """The queries of each layer after rotary embedding, ``[batch, q_heads, tokens, head_dim]``."""
    states = model.model(windows, output_hidden_states=True).hidden_states
    rotary = model.model.rotary_emb(states[0], torch.arange(windows.shape[1])[None])
    queries = []
    for layer, state in zip(model.model.layers, states, strict=False):
        flat = layer.self_attn.q_proj(layer.input_layernorm(state))
        query = flat.view(*windows.shape, -1, model.config.head_dim).transpose(1, 2)
        queries.append(apply_rotary_pos_emb(query, query, *rotary)[0])
    return queries


def together(by_head: dict[int, list[Any]], heads: range) -> list[Any]:
    return [pair for head in heads for pair in by_head[head]]


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    error = sum(float((stored.double() - exact.double()).square().sum()) for exact, stored in pairs)
    return math.sqrt(error / sum(float(exact.double().square().sum()) for exact, _ in pairs))


@pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")
def test_errors_are_those_of_an_obvious_computation() -> None:
    model = make_tiny_model(num_attention_heads=6, num_key_value_heads=2)
    windows = random_windows(2, 23)
    found = errors_of(model, windows, "fp8_e5m2")
    exact, stored = DynamicCache(config=model.config), qkv.QKVCache(model.config, "fp8_e5m2")
    with torch.no_grad():
        model(windows, past_key_values=exact)
    for i, queries in enumerate(queries_of(model, windows)):
        keys, values = exact.layers[i].keys, exact.layers[i].values
        stored.update(keys, values, i)
        other_keys, other_values = stored.view(i).decode()
        scores: dict[int, list[Any]] = {head: [] for head in range(6)}
        outputs: dict[int, list[Any]] = {head: [] for head in range(6)}
        for row in range(2):
            for head in range(6):
                for at in range(23):
                    both = []
                    for some_keys, some_values in ((keys, values), (other_keys, other_values)):
                        seen = some_keys[row, head // 3, : at + 1].double()
                        score = seen @ queries[row, head, at].double() * 16**-0.5
                        output = score.softmax(0) @ some_values[row, head // 3, : at + 1].double()
                        both.append((score - score.mean(), output))
                    scores[head].append((both[0][0], both[1][0]))
                    outputs[head].append((both[0][1], both[1][1]))
        whole, heads = found[i]
        assert whole["key_error"] == pytest.approx(relative([(keys, other_keys)]), rel=1e-4)
        assert whole["value_error"] == pytest.approx(relative([(values, other_values)]), rel=1e-4)
        assert whole["score_error"] == pytest.approx(relative(together(scores, range(6))), rel=1e-4)
        assert whole["output_error"] == pytest.approx(relative(together(outputs, range(6))), rel=1e-4)
        assert len(heads) == 2
        for kv, head in enumerate(heads):
            group = range(3 * kv, 3 * kv + 3)
            assert head["key_error"] == pytest.approx(relative([(keys[:, kv], other_keys[:, kv])]), rel=1e-4)
            assert head["value_error"] == pytest.approx(relative([(values[:, kv], other_values[:, kv])]), rel=1e-4)
            assert head["score_error"] == pytest.approx(relative(together(scores, group)), rel=1e-4)
            for name, by_head in (("score", scores), ("output", outputs)):
                expected = [relative(by_head[h]) for h in group]
                assert head[f"{name}_error_by_query_head"] == pytest.approx(expected, rel=1e-4)


def test_unquantized_has_no_errors_and_moves_no_predictions(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    results = layers.run(tiny_model, tiny_tokenizer, LayersSettings(("none",), window=100))
    rows = results["rows"]
    assert [(row["layer"], row["head"]) for row in rows] == [(0, None), (0, 0), (1, None), (1, 0)]
    assert all(set(row) >= KEYS for row in rows)
    assert all(row[name] == 0 for row in rows for name in ERRORS)
    assert all(abs(row["kld_alone"]) < 1e-8 for row in rows if row["head"] is None)
    assert all(row["kld_alone"] is None for row in rows if row["head"] is not None)


def test_the_layers_alone_add_up_roughly_to_all_of_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny_model(num_hidden_layers=4)
    results = layers.run(model, tiny_tokenizer, LayersSettings(("int8", "fp8_e5m2"), window=200, limit=2))
    for total in results["totals"]:
        alone = [
            row["kld_alone"] for row in results["rows"] if row["format"] == total["format"] and row["head"] is None
        ]
        assert len(alone) == 4
        assert min(alone) > 1e-7
        assert total["kld_alone_sum"] == pytest.approx(sum(alone))
        assert 0.4 < total["kld_alone_sum"] / total["kld"] < 2.5
        assert total["scoring"] == "chunked"
    int8, fp8 = (total["kld"] for total in results["totals"])
    assert int8 < fp8


def test_results_are_the_same_every_time_and_however_the_work_is_cut(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LayersSettings(("int8",), window=90, limit=3)
    first, again = (layers.run(tiny_model, tiny_tokenizer, settings) for _ in range(2))
    assert first == again
    monkeypatch.setattr(layers, "_PASS_TOKENS", 90)
    monkeypatch.setattr(layers, "_MOST_BYTES", 1)
    monkeypatch.setattr(layers, "_QUERIES", 17)
    calls: list[tuple[str, int, int]] = []
    pieces = layers.run(tiny_model, tiny_tokenizer, settings, lambda *call: calls.append(call))
    for row, other in zip(first["rows"], pieces["rows"], strict=True):
        for name in ERRORS:
            assert other[name] == pytest.approx(row[name], rel=1e-4)
        assert (other["kld_alone"] or 0) == pytest.approx(row["kld_alone"] or 0, rel=0.02, abs=1e-8)
    for what in {what for what, _, _ in calls}:
        steps = [(done, total) for name, done, total in calls if name == what]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")
def test_only_one_layer_is_stored_in_the_format(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    scales = {f"layers.{i}.{kind}_scale": torch.tensor([0.01 * (i + 1)]) for i in (0, 1) for kind in ("key", "value")}
    save_file(scales, tmp_path / "scales.safetensors")
    config = qkv.CacheConfig(
        "int8",
        key_format="fp8_e4m3",
        granularity="head",
        sink_tokens=3,
        scales=str(tmp_path / "scales.safetensors"),
        prefill="exact",
        layers={1: {"value_format": "fp8_e5m2"}},
    )
    config.to_yaml(tmp_path / "mine.yaml")
    setup = layers._setup(tiny_model, str(tmp_path / "mine.yaml"))
    for layer, values in ((0, "int8"), (1, "fp8_e5m2")):
        cache = setup.alone(layer).make(tiny_model.config)
        states = torch.randn(1, 1, 100, 16)
        for i in (0, 1):
            cache.update(states, states, i)
        rows = cache.stats()["layers"]
        assert (rows[layer]["key_format"], rows[layer]["value_format"]) == ("fp8_e4m3", values)
        assert (rows[1 - layer]["key_format"], rows[1 - layer]["value_format"]) == ("none", "none")
        assert torch.equal(cache.view(1 - layer).decode()[0], states)
        stored = cache.view(layer).decode()[0]
        assert not torch.equal(stored, states)
        assert torch.equal(setup.store(layer, states, states)[0], stored)
        assert torch.equal(stored[:, :, :3], states[:, :, :3])
    klds, _ = layers._measure_divergence(tiny_model, random_windows(1, 80), [setup], None)
    assert min(klds["mine"].values()) > 1e-6  # `exact` would hide it


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 4", "gpt-oss", "Llama 4", "Phi-3"])
def test_watching_changes_nothing_in_models_with_windows_softcap_and_sinks(name: str) -> None:
    model = FAMILIES[name]()
    windows = random_windows(2, 50, VOCABULARY)
    with torch.inference_mode():
        expected = model(windows).logits
        with layers._watched(model, layers._Watcher([])):
            watched = model(windows).logits
        assert torch.equal(model(windows).logits, expected)
    torch.testing.assert_close(watched, expected, rtol=1e-4, atol=2e-5)
    found = errors_of(model, windows, "int8")
    assert set(found) == set(layers._setup(model, "int8").layers)
    for whole, heads in found.values():
        assert all(1e-3 < whole[error] < 0.1 for error in ERRORS)
        groups = model.config.num_attention_heads // len(heads)
        assert all(len(head["output_error_by_query_head"]) == groups for head in heads)


def test_layers_that_are_not_ours_are_left_out_and_said_so(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = FAMILIES["Bamba"]()
    setup = layers._setup(model, "int8")
    errors = measure_errors(model, random_windows(1, 40, VOCABULARY), [setup])["int8"]
    assert set(errors) == set(setup.layers) == {1}
    assert layers._notes(setup, errors) == ["left out, since qkv does not store them: layers 0"]


@pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")
@pytest.mark.parametrize("name", ["GPT-J", "DeepSeek-V3"])
def test_where_attention_cannot_be_watched_keys_and_values_are_still_compared(name: str) -> None:
    model = FAMILIES[name]()
    setup = layers._setup(model, "int8")
    errors = measure_errors(model, random_windows(1, 40, VOCABULARY), [setup])["int8"]
    for sums in errors.values():
        whole, heads = sums.rows()
        assert 1e-3 < whole["key_error"] < 0.02
        assert whole["score_error"] is whole["output_error"] is None
        assert heads[0]["output_error_by_query_head"] is None
    assert "layers 0, 1: no errors of scores and output" in layers._notes(setup, errors)[0]


def test_everything_is_as_before_even_after_a_failure(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, names = tiny_model.config._attn_implementation, list(ALL_ATTENTION_FUNCTIONS._local_mapping)
    setup, windows = layers._setup(tiny_model, "int8"), random_windows(1, 20)
    measure_errors(tiny_model, windows, [setup])

    def fail(*_: object) -> None:
        raise KeyError("stop")

    monkeypatch.setattr(layers, "_scores", fail)
    with pytest.raises(KeyError):
        measure_errors(tiny_model, windows, [setup])
    assert tiny_model.config._attn_implementation == attention
    assert list(ALL_ATTENTION_FUNCTIONS._local_mapping) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ("int9",)}, "unknown cache 'int9'"),
        ({"formats": ("dynamic",)}, "'dynamic' cannot store a single layer alone; use formats of ours"),
        ({"formats": ("int8", "hf-fp8")}, "'hf-fp8' cannot store a single layer alone"),
        ({"formats": ()}, "formats is empty"),
        ({"window": 2000}, "2000 tokens are more than the model's 1024 positions"),
        ({"window": 1}, "window=1 is too short"),
        ({"limit": 0}, "limit=0 leaves nothing"),
        ({"text": "nowhere.txt"}, "cannot read the text file 'nowhere.txt'"),
    ],
)
def test_bad_settings_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layers.run(tiny_model, tiny_tokenizer, LayersSettings(**changes))


def test_two_setups_under_one_name_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    qkv.CacheConfig("int8", sink_tokens=4).to_yaml(tmp_path / "int8.yaml")
    with pytest.raises(ValueError, match="two of the formats would be called 'int8'"):
        layers.run(tiny_model, tiny_tokenizer, LayersSettings(("int8", str(tmp_path / "int8.yaml"))))


def test_int8_errs_less_than_fp8_in_every_layer_of_a_real_model(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = smollm2
    windows = cut_windows(tokenizer, embedded_text(), 96, 1)
    setups = [layers._setup(model, name) for name in ("int8", "fp8_e4m3")]
    int8, fp8 = (errors.values() for errors in measure_errors(model, windows, setups).values())
    assert len(int8) == len(fp8) == 30
    for ours, other in zip(int8, fp8, strict=True):
        (fine, heads), (coarse, _) = ours.rows(), other.rows()
        assert len(heads) == 3
        assert 0.002 < fine["value_error"] < coarse["value_error"] < 0.04
        assert fine["key_error"] < 0.03


def test_the_command_prints_a_table_and_writes_the_rows(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keep_threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qkv_eval.cli_layers import layers as command

    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "layers.json"
    app = typer.Typer()
    app.command()(command)
    sizes = ["--formats", "none,int8", "--window", "120", "--limit", "2", "--heads", "--threads", "1"]
    app(args=[*sizes, "--model", str(tiny_folder), "--json", str(file)], standalone_mode=False)
    results = json.loads(file.read_text())
    assert all(set(row) >= KEYS for row in results["rows"])
    assert [(row["format"], row["layer"], row["head"]) for row in results["rows"]] == [
        (name, layer, head) for name in ("none", "int8") for layer in (0, 1) for head in (None, 0)
    ]
    assert [total["format"] for total in results["totals"]] == ["none", "int8"]
    assert results["meta"]["text"]["windows"] == 2
    captured = capsys.readouterr()
    assert "the layers alone add up to" in captured.out
    assert "storing single layers as int8: done" in captured.err
