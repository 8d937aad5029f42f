"""`qkv calibrate`: scales against what a plain cache holds, and that a cache takes them as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROSE, Command, make_tiny_model
from families import FAMILIES, VOCABULARY
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv.named_caches import as_argument
from qkv.scales import save_scales
from qkv_eval import calibrate
from qkv_eval.calibrate import CalibrateSettings
from qkv_eval.text import cut_windows, load_text

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SIDES = ("key", "value")
BOOK = str(Path(__file__).parent / "prose.txt")


@torch.no_grad()
def cached(model: PreTrainedModel, windows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, ``[windows, kv_heads, tokens, head_dim]``, out of a plain cache."""
    cache = DynamicCache()  # without a configuration, so that layers with a sliding window keep all of it
    model(input_ids=windows, **as_argument(cache))
    return [(layer.keys, layer.values) for layer in cache.layers]


def windows_of(tokenizer: Any, settings: CalibrateSettings) -> torch.Tensor:
    return cut_windows(tokenizer, load_text(settings.text), settings.window, settings.limit)


def by_head(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes ``[heads, all others]`` of ``[batch, heads, tokens, dim]``."""
    return x.float().abs().transpose(0, 1).flatten(1)


def squared_error(x: torch.Tensor, format: str, scale: torch.Tensor) -> float:
    """Of one head's numbers ``[n]``, stored under a scale."""
    return float((calibrate._stored(format, x[None], scale[None]).double() - x.double()).square().sum())


class FewTokens:
    """A tokenizer for models with a small vocabulary: a token for each character."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(character) % (VOCABULARY - 3) for character in text]}


# ---- which scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("sink_tokens", [0, 7])
def test_maximum_is_the_largest_magnitude_of_the_text(
    tiny_tokenizer: PreTrainedTokenizerFast, format: str, sink_tokens: int
) -> None:
    model = make_tiny_model(num_attention_heads=6, num_key_value_heads=2)
    settings = CalibrateSettings(format, window=90, limit=3, sink_tokens=sink_tokens, text=BOOK)
    results = calibrate.run(model, tiny_tokenizer, settings)
    expected = {}
    for i, pair in enumerate(cached(model, windows_of(tiny_tokenizer, settings))):
        for side, x in zip(SIDES, pair, strict=True):
            expected[f"layers.{i}.{side}_scale"] = by_head(x[:, :, sink_tokens:]).amax(1) / LARGEST[format]
    assert set(results["scales"]) == set(expected)
    for name, scale in results["scales"].items():
        assert scale.dtype == torch.float32
        assert torch.equal(scale, expected[name]), name
    assert results["about"]["tokens"] == str(3 * (90 - sink_tokens))
    for row in results["rows"]:
        for side in SIDES:
            assert row[f"{side}_scale"] == float(expected[f"layers.{row['layer']}.{side}_scale"][row["head"]])
            assert row[f"{side}_range"] == pytest.approx(1)
    assert [(row["layer"], row["head"]) for row in results["rows"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9, 100.0])
def test_a_percentile_of_the_magnitudes_fits(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, percentile: float
) -> None:
    settings = CalibrateSettings(method="percentile", percentile=percentile, window=150, limit=2, text=BOOK)
    scales = calibrate.run(tiny_model, tiny_tokenizer, settings)["scales"]
    for i, pair in enumerate(cached(tiny_model, windows_of(tiny_tokenizer, settings))):
        for side, x in zip(SIDES, pair, strict=True):
            magnitudes = by_head(x)[0].sort().values
            exact = float(magnitudes[math.ceil(len(magnitudes) * percentile / 100) - 1])
            found = float(scales[f"layers.{i}.{side}_scale"]) * 127
            # A bin is 1/128 of a power of two wide.
            assert exact * (1 - 1e-6) <= found <= min(exact * (1 + 1 / 128), float(magnitudes[-1])) * (1 + 1e-6)


@pytest.mark.parametrize("format", LARGEST)
def test_on_heavy_tails_the_least_error_is_less_than_that_of_the_maximum(format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3000, 20, generator=generator)
    x /= torch.randn(1, 2, 3000, 1, generator=generator).square().add(0.02).sqrt()  # of a Student's kind
    seen = calibrate._Magnitudes(with_histogram=True)
    seen.add(x)
    scales = {
        method: calibrate._choose(seen, CalibrateSettings(format, method), LARGEST[format])
        for method in ("maximum", "error")
    }
    for head in range(2):
        numbers = x[0, head].flatten()
        maximum, least = (squared_error(numbers, format, scales[method][head]) for method in ("maximum", "error"))
        assert least < (0.9 if format == "int8" else 1.0) * maximum
        grid = scales["maximum"][head] * 2.0 ** torch.arange(-3, 1, 0.04)
        best = min(squared_error(numbers, format, scale) for scale in grid)
        assert least < 1.05 * best


def test_the_least_error_is_found_on_a_model_too(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny_model(num_attention_heads=6, num_key_value_heads=2)
    found = {}
    for method in ("maximum", "error"):
        settings = CalibrateSettings(method=method, window=200, limit=2, text=BOOK)
        found[method] = calibrate.run(model, tiny_tokenizer, settings)["scales"]
    sums = dict.fromkeys(found, 0.0)
    for i, pair in enumerate(cached(model, windows_of(tiny_tokenizer, settings))):
        for side, x in zip(SIDES, pair, strict=True):
            for method in found:
                for head, scale in enumerate(found[method][f"layers.{i}.{side}_scale"]):
                    sums[method] += squared_error(x[:, head].flatten(), "int8", scale)
    assert sums["error"] < 0.999 * sums["maximum"]


def test_a_head_of_zeros_gets_a_scale_too() -> None:
    x = torch.randn(1, 2, 50, 8)
    x[:, 1] = 0
    for method in calibrate.METHODS:
        seen = calibrate._Magnitudes(with_histogram=True)
        seen.add(x)
        scales = calibrate._choose(seen, CalibrateSettings(method=method), 127.0)
        assert bool((scales > 0).all())
        assert bool(scales.isfinite().all())
        assert not bool(calibrate._stored("int8", x[0, 1].flatten()[None], scales[1:]).any())


def test_a_histogram_is_the_same_however_its_numbers_come() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 8, generator=generator) * torch.logspace(-2, 2, 40).unsqueeze(1)
    whole, pieces, back = (calibrate._Magnitudes(with_histogram=True) for _ in range(3))
    whole.add(x)
    for start in range(0, 40, 7):
        pieces.add(x[:, :, start : start + 7])
    for start in reversed(range(0, 40, 9)):
        back.add(x[:, :, start : start + 9])
    bits = by_head(x).view(torch.int32) >> 16
    for seen in (whole, pieces, back):
        assert seen.counts is not None
        assert torch.equal(seen.largest, by_head(x).amax(1))
        assert int(seen.counts.sum()) == x.numel()
        for head in range(3):
            counts = seen.counts[head]
            expected = bits[head].bincount(minlength=seen.first + len(counts))
            assert torch.equal(counts, expected[seen.first :])
            points, weights = seen.points(head)
            assert float(weights.sum()) == pytest.approx(2 * 40 * 8)
            assert float(points.max()) <= float(seen.largest[head])


def test_memory_does_not_grow_with_the_text_nor_with_tiny_numbers() -> None:
    seen = calibrate._Magnitudes(with_histogram=True)
    for exponent in (0, -30, -44, -100, 1):
        seen.add(torch.full((1, 1, 1, 1), 2.0**exponent))
    seen.add(torch.zeros(1, 1, 3, 1))
    assert seen.counts is not None
    assert seen.counts.shape[1] <= 34 * 128
    assert int(seen.counts.sum()) == 8


@pytest.mark.parametrize("equalize", [False, True])
@pytest.mark.parametrize("method", calibrate.METHODS)
def test_scales_do_not_depend_on_how_the_work_is_cut(
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    equalize: bool,
) -> None:
    settings = CalibrateSettings(method=method, window=60, limit=4, equalize=equalize, text=BOOK)
    first, again = (calibrate.run(tiny_model, tiny_tokenizer, settings)["scales"] for _ in range(2))
    monkeypatch.setattr(calibrate, "_PASS_TOKENS", 60)
    calls: list[tuple[str, int, int]] = []
    pieces = calibrate.run(tiny_model, tiny_tokenizer, settings, lambda *call: calls.append(call))["scales"]
    for name, scale in first.items():
        assert torch.equal(again[name], scale)
        # A bin, or a step of the grid, may change where rounding in the model does.
        torch.testing.assert_close(pieces[name], scale, rtol=1e-4 if method == "maximum" else 0.05, atol=1e-5)
    stages = {"calibrating", "choosing scales", *(["equalizing"] if equalize else [])}
    assert {what for what, _, _ in calls} == stages
    for what in stages:
        steps = [(done, total) for name, done, total in calls if name == what]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


# ---- equalizing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink_tokens", [0, 2, 6])
def test_equalizing_vectors_and_scales_are_those_of_an_obvious_computation(
    tiny_tokenizer: PreTrainedTokenizerFast, sink_tokens: int
) -> None:
    model = make_tiny_model(num_attention_heads=6, num_key_value_heads=2)
    settings = CalibrateSettings(window=90, limit=3, equalize=True, sink_tokens=sink_tokens, text=BOOK)
    found = calibrate.run(model, tiny_tokenizer, settings)["scales"]
    plain = calibrate.run(
        model, tiny_tokenizer, CalibrateSettings(window=90, limit=3, sink_tokens=sink_tokens, text=BOOK)
    )["scales"]
    for i, (keys, _) in enumerate(cached(model, windows_of(tiny_tokenizer, settings))):
        centre = keys[:, :, max(4, sink_tokens) :].double().mean((0, 2))
        counted = keys[:, :, sink_tokens:].double()
        distance = (counted - centre[None, :, None]).abs().amax((0, 2))
        multiplier = (distance**0.7) / (distance**0.7).log().mean(1, keepdim=True).exp()
        torch.testing.assert_close(found[f"layers.{i}.key_centre"].double(), centre, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[f"layers.{i}.key_multiplier"].double(), multiplier, rtol=1e-5, atol=1e-6)
        transformed = (counted - centre[None, :, None]) / multiplier[None, :, None]
        largest = transformed.abs().amax((0, 2, 3))
        torch.testing.assert_close(found[f"layers.{i}.key_scale"].double() * 127, 1.5 * largest, rtol=1e-5, atol=0)
        assert torch.equal(found[f"layers.{i}.value_scale"], plain[f"layers.{i}.value_scale"])


@pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")
def test_equalized_keys_of_a_real_model_are_stored_better(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    model, tokenizer = smollm2
    windows = windows_of(tokenizer, CalibrateSettings(window=128, limit=4, text=BOOK))
    pairs = cached(model, windows[3:])  # what the scales have not seen
    errors = {}
    for equalize in (False, True):
        settings = CalibrateSettings(window=128, limit=3, equalize=equalize, text=BOOK)
        path = tmp_path / f"{equalize}.safetensors"
        results = calibrate.run(model, tokenizer, settings)
        save_scales(path, results["scales"], model.config, "int8", results["about"])
        cache = qkv.QKVCache(model.config, "int8", scales=path)
        sums = torch.zeros(2, dtype=torch.float64)
        for i, (keys, values) in enumerate(pairs):
            cache.update(keys, values, i)
            stored = cache.view(i).decode()[0]
            sums += torch.stack([(stored - keys).square().sum(), keys.square().sum()]).double()
        errors[equalize] = float(sums[0] / sums[1]) ** 0.5
    assert errors[True] < 0.75 * errors[False]


# ---- a cache with them -----------------------------------------------------------------------------------------------


def held(cache: qkv.QKVCache) -> list[torch.Tensor]:
    """The scales ``[kv_heads]`` of keys and values of each layer that a cache stores with now."""
    rows = []
    for layer in cache.layers:
        for scale in (layer.store._key_head, layer.store._value_head):
            assert scale.current is not None
            assert bool((scale.current == scale.current[:1]).all())
            rows.append(scale.current[0])
    return rows


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    return model(input_ids=ids, **as_argument(cache)).logits


def prose_ids(tokens: int, rows: int = 1) -> torch.Tensor:
    """Tokens of the tiny tokenizer's kind, rows of different text."""
    return torch.tensor(list(PROSE.encode()[: rows * tokens])).view(rows, tokens)


@pytest.mark.parametrize("equalize", [False, True])
@pytest.mark.parametrize("format", LARGEST)
def test_a_cache_stores_with_the_scales_of_the_file_whatever_comes(
    command: Command, tiny_model: PreTrainedModel, tiny_folder: Path, tmp_path: Path, format: str, equalize: bool
) -> None:
    path = tmp_path / "scales.safetensors"
    arguments = ["--model", tiny_folder, "--format", format, "--window", 100, "--limit", 2, "--threads", 1]
    assert command("calibrate", *arguments, "-o", path, *(["--equalize"] if equalize else [])).status == 0
    in_file = load_file(path)
    expected = [in_file[f"layers.{i}.{side}_scale"] for i in range(2) for side in SIDES]

    def as_in_the_file() -> bool:
        return all(torch.equal(one, other) for one, other in zip(held(cache), expected, strict=True))

    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, format, scales=path)
    assert all(row["granularity"] == "head" for row in cache.stats()["layers"])
    first = logits(tiny_model, prose_ids(3), cache)
    assert as_in_the_file()  # from the first token on
    logits(tiny_model, prose_ids(400), cache)  # beyond what a warm-up would take
    states = torch.full((1, 1, 2, 16), 500.0)
    for i in range(2):
        cache.update(states, states, i)  # beyond what the scales can store
    assert as_in_the_file()
    cache.crop(-300)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert as_in_the_file()
    cache.reset()
    assert torch.equal(logits(tiny_model, prose_ids(3), cache), first)
    assert as_in_the_file()
    assert all(torch.equal(tensor, in_file[name]) for name, tensor in load_file(path).items())


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("method", calibrate.METHODS)
def test_calibrated_scales_do_little_to_predictions_and_absurd_ones_much(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, format: str, method: str
) -> None:
    """Case 10."""
    settings = CalibrateSettings(format, method, window=200, limit=2, text=BOOK)
    results = calibrate.run(tiny_model, tiny_tokenizer, settings)
    qkv.enable(tiny_model)
    ids = prose_ids(150)
    exact = logits(tiny_model, ids, qkv.QKVCache(tiny_model.config, "none"))
    found, drift = {}, {}
    for factor in (1.0, 1000.0, 1e-3):
        path = tmp_path / f"{factor}.safetensors"
        scales = {name: scale * factor for name, scale in results["scales"].items()}
        save_scales(path, scales, tiny_model.config, format)
        cache = qkv.QKVCache(tiny_model.config, format, scales=path)
        found[factor] = logits(tiny_model, ids, cache)
        drift[factor] = float((found[factor] - exact).square().mean().sqrt())
    assert drift[1.0] < 0.2 * float(exact.std())
    assert not torch.equal(found[1000.0], found[1.0])
    if format == "int8":  # fp8 has exponents of its own and bears a scale that is too large
        assert drift[1000.0] > 5 * drift[1.0]
    assert drift[1e-3] > 3 * drift[1.0]


@pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")
@pytest.mark.parametrize("equalize", [False, True])
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Mistral", [0, 1]),
        ("Gemma 2", [0, 1]),
        ("Gemma 4", [0, 1]),
        ("gpt-oss", [0, 1]),
        ("Llama 4", [0, 1, 2, 3]),
        ("Bamba", [1]),
        ("Falcon-H1", [0, 1]),
        ("Qwen3-Next", [3]),
        ("Inkling", [0, 1]),
        ("GPT-2", [0, 1]),
        ("DeepSeek-V3", [0, 1]),
    ],
)
def test_families_with_windows_and_other_layers_can_be_calibrated(
    tmp_path: Path, name: str, layers: list[int], equalize: bool
) -> None:
    model, path = FAMILIES[name](), tmp_path / "scales.safetensors"
    settings = CalibrateSettings(window=50, limit=2, equalize=equalize, text=BOOK)
    results = calibrate.run(model, FewTokens(), settings)
    assert sorted({row["layer"] for row in results["rows"]}) == layers
    kinds = ["key_scale", "value_scale", *(["key_centre", "key_multiplier"] if equalize else [])]
    assert set(results["scales"]) == {f"layers.{i}.{kind}" for i in layers for kind in kinds}
    # Linear attention, and in Gemma 4 the layers that share another's keys.
    left_out = {"Bamba": "layers 0", "Qwen3-Next": "layers 0, 1, 2", "Gemma 4": "layers 2, 3"}
    expected = [f"left out, since qkv does not store them: {left_out[name]}"] if name in left_out else []
    assert [note for note in results["notes"] if "left out" in note] == expected
    save_scales(path, results["scales"], model.config, "int8", results["about"])
    cache = qkv.QKVCache(model.config, "int8", scales=path)
    windows = windows_of(FewTokens(), settings)
    qkv.enable(model)
    exact, ours = logits(model, windows, DynamicCache(config=model.config)), logits(model, windows, cache)
    # A mean, since a token that another expert gets is another token.
    assert 0 < float((ours - exact).abs().mean()) < 0.1 * float(exact.abs().mean())
    for i in layers:
        store = cache.layers[i].store
        assert store.warm == 0
        assert torch.equal(store._key_head.current[0], results["scales"][f"layers.{i}.key_scale"])


def test_a_window_counts_whole_where_layers_forget(tmp_path: Path) -> None:
    model = FAMILIES["Mistral"]()
    settings = CalibrateSettings(window=50, limit=2, text=BOOK)
    scales = calibrate.run(model, FewTokens(), settings)["scales"]
    for i, pair in enumerate(cached(model, windows_of(FewTokens(), settings))):
        for side, x in zip(SIDES, pair, strict=True):
            assert x.shape[2] == 50
            torch.testing.assert_close(scales[f"layers.{i}.{side}_scale"], by_head(x).amax(1) / 127, rtol=1e-5, atol=0)


def test_the_model_is_plain_afterwards(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    plain = tiny_model.config._attn_implementation
    settings = CalibrateSettings(window=90, limit=1, text=BOOK)
    expected = calibrate.run(tiny_model, tiny_tokenizer, settings)["scales"]
    qkv.enable(tiny_model)
    found = calibrate.run(tiny_model, tiny_tokenizer, settings)["scales"]
    assert all(torch.equal(found[name], scale) for name, scale in expected.items())
    assert tiny_model.config._attn_implementation == plain


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int4"}, "there is no format 'int4' to calibrate; use one of int8, fp8_e4m3, fp8_e5m2"),
        ({"method": "median"}, "there is no method 'median' to calibrate; use one of maximum, percentile, error"),
        ({"percentile": 0}, "percentile=0 must be above 0 and at most 100"),
        ({"percentile": 100.5}, "percentile=100.5 must be above 0"),
        ({"percentile": math.nan}, "percentile=nan must be"),
        ({"head_room": 0.9}, "head_room=0.9 must be at least 1"),
        ({"head_room": math.inf}, "head_room=inf must be at least 1"),
        ({"sink_tokens": -1}, "sink_tokens=-1 must be at least 0"),
        ({"window": 20, "sink_tokens": 20}, "window=20 leaves nothing: the first 20 tokens"),
        ({"window": 4, "equalize": True}, "window=4 leaves nothing: the first 4 tokens"),
        ({"window": 1}, "window=1 is too short"),
        ({"window": 2000}, "2000 tokens are more than the model's 1024 positions"),
        ({"limit": 0}, "limit=0 leaves nothing"),
        ({"text": "nowhere.txt"}, "cannot read the text file 'nowhere.txt'"),
    ],
)
def test_bad_settings_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate.run(tiny_model, tiny_tokenizer, CalibrateSettings(**{"window": 50, **changes}))


def test_an_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        calibrate.run(FAMILIES["T5"](), FewTokens(), CalibrateSettings(window=50, text=BOOK))


@pytest.mark.parametrize("equalize", [False, True])
def test_keys_that_are_not_finite_are_refused(tiny_tokenizer: PreTrainedTokenizerFast, equalize: bool) -> None:
    model = make_tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match="layer 1 has keys that are not finite; load the model in float32"):
        calibrate.run(model, tiny_tokenizer, CalibrateSettings(window=50, limit=1, equalize=equalize, text=BOOK))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_scales_and_rows(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    book, path, file = tmp_path / "book.txt", tmp_path / "scales.safetensors", tmp_path / "rows.json"
    book.write_text(PROSE, encoding="utf-8")
    arguments = ["--model", tiny_folder, "--text", book, "--window", 100, "--limit", 3, "--threads", 1]
    done = command("calibrate", *arguments, "--method", "percentile", "--percentile", 99.5, "-o", path, "--json", file)
    assert done.status == 0
    assert "int8, percentile 99.5" in done.out
    assert "book.txt, 3 x 100 tokens" in " ".join(done.out.split())
    assert "calibrating: done" in done.err
    assert f"wrote {path}" in done.err
    results = json.loads(file.read_text())
    assert [(row["layer"], row["head"]) for row in results["rows"]] == [(0, 0), (1, 0)]
    for row in results["rows"]:
        for side in SIDES:
            assert row[f"{side}_scale"] > 0
            assert row[f"{side}_largest"] > 0
            assert 0.3 < row[f"{side}_range"] <= 1.0001
    assert results["meta"]["command"] == "calibrate"
    assert results["meta"]["calibration"]["tokens"] == "300"
    assert results["meta"]["text"]["name"] == "book.txt"
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
    assert metadata["method"] == "percentile 99.5"
    assert metadata["cache_format"] == "int8"
    assert metadata["text"] == "book.txt"
    assert metadata["tokens"] == "300"
    assert metadata["equalized"] == "no"
    assert metadata["date"].startswith("20")
    assert not any(str(tmp_path) in value for value in metadata.values())
    assert load_file(path)["layers.1.value_scale"].tolist() == [results["rows"][1]["value_scale"]]


def test_json_to_standard_output_stands_there_alone(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    arguments = ["--model", tiny_folder, "--window", 100, "--limit", 0, "--text", tmp_path / "short.txt"]
    (tmp_path / "short.txt").write_text(PROSE[:450], encoding="utf-8")
    done = command("calibrate", *arguments, "--method", "error", "--equalize", "-o", path, "--json", "-")
    assert done.status == 0
    assert len(json.loads(done.out)["rows"]) == 2
    assert json.loads(done.out)["meta"]["text"]["windows"] == 4
    assert "choosing scales: done" in done.err
    assert "layers.1.key_multiplier" in load_file(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--output"]),
        (["-o", "{folder}"], ["--output", "is a folder"]),
        (["-o", "{folder}/no/x.safetensors"], ["--output", "there is no folder"]),
        (["-o", "{folder}/x", "--format", "int4"], ["int4", "int8", "fp8_e5m2"]),
        (["-o", "{folder}/x", "--method", "mean"], ["mean", "maximum, percentile, error"]),
        (["-o", "{folder}/x", "--percentile", "101"], ["percentile=101"]),
        (["-o", "{folder}/x", "--percentile", "many"], ["--percentile"]),
        (["-o", "{folder}/x", "--head-room", "0"], ["head_room=0"]),
        (["-o", "{folder}/x", "--window", "1"], ["--window"]),
        (["-o", "{folder}/x", "--limit", "-1"], ["--limit"]),
        (["-o", "{folder}/x", "--sink-tokens", "2048"], ["window=2048 leaves nothing"]),
        (["-o", "{folder}/x", "--text", "/no/such/text"], ["/no/such/text"]),
        (["-o", "{folder}/x", "--model", "/no/such/model"], ["/no/such/model"]),
        (["-o", "{folder}/x", "--json", "/no/such/folder/x.json"], ["--json"]),
    ],
)
def test_bad_arguments_exit_2_with_one_clear_line_and_write_nothing(
    command: Command, tiny_folder: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    if "--model" not in given:
        given += ["--model", str(tiny_folder)]
    done = command("calibrate", *given)
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    for word in words:
        assert word in done.err
    assert list(tmp_path.iterdir()) == []


def test_scales_for_another_model_are_refused_by_the_commands(
    command: Command, tiny_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    other, path, setup = tmp_path / "other", tmp_path / "scales.safetensors", tmp_path / "mine.yaml"
    make_tiny_model(num_hidden_layers=3).save_pretrained(other)
    tiny_tokenizer.save_pretrained(other)
    assert command("calibrate", "--model", tiny_folder, "--window", 100, "--limit", 1, "-o", path).status == 0
    qkv.CacheConfig("int8", scales=str(path)).to_yaml(setup)
    sizes = ["--prompt", "hello", "--max-new-tokens", 3, "--format", setup]
    assert command("generate", "--model", tiny_folder, *sizes).status == 0
    done = command("generate", "--model", other, *sizes)
    assert done.status == 2
    assert "num_hidden_layers is 2 there and 3 here" in done.err.splitlines()[-1]
