"""Scores of a text through a cache: right, faithful to what is stored, and the same however the text is cut."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv.named_caches import NamedCache, named_cache
from qkv_eval.divergence import compare_predictions, token_losses
from qkv_eval.perplexity import NOISE_FLOOR, PROMPT_TOKENS, Scores, by_position, score_caches, summarize
from qkv_eval.text import cut_windows, embedded_text

pytestmark = pytest.mark.usefixtures("plain_int8")


def random_windows(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(seed))


def again(cache: NamedCache) -> NamedCache:
    """The same kind of cache under another name."""
    return NamedCache(f"{cache.name} again", cache.make, cache.is_ours)


def of_setup(**setup: object) -> NamedCache:
    return NamedCache("setup", lambda config: qkv.QKVCache(config, **setup), is_ours=True)


def test_losses_and_divergence_agree_with_float64() -> None:
    random = torch.Generator().manual_seed(0)
    logits, others = (torch.randn(3, 70, 50, generator=random) * 4 for _ in range(2))
    targets = torch.randint(0, 50, (3, 70), generator=random)
    p, q = torch.softmax(logits.double(), -1), torch.softmax(others.double(), -1)
    divergence, same_top = compare_predictions(logits, others)
    expected = -p.gather(-1, targets[..., None])[..., 0].log()
    torch.testing.assert_close(token_losses(logits, targets).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(divergence.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(same_top, p.argmax(-1) == q.argmax(-1))


def test_equal_predictions_do_not_diverge() -> None:
    logits = torch.randn(5, 1000)
    divergence, same_top = compare_predictions(logits, logits.clone())
    assert divergence.abs().max() == 0
    assert same_top.all()


def test_perplexity_is_that_of_one_plain_pass(tiny_model: PreTrainedModel) -> None:
    windows = random_windows(3, 100)
    scores = score_caches(tiny_model, windows, [], chunk=32)["dynamic"]
    with torch.inference_mode():
        logits = tiny_model(windows[:, :-1]).logits.double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert scores.losses.shape == (3, 99)
    assert summarize(scores, scores)["ppl"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_the_unquantized_format_has_no_drift(tiny_model: PreTrainedModel) -> None:
    scores = score_caches(tiny_model, random_windows(2, 200), [named_cache("none")], chunk=64)
    figures = summarize(scores["none"], scores["dynamic"])
    assert abs(figures["kld_mean"]) < 1e-6
    assert abs(figures["dppl_percent"]) < 0.01
    assert figures["same_top_percent"] == 100


def test_coarser_formats_drift_more(tiny_model: PreTrainedModel) -> None:
    names = ("int8", "fp8_e4m3", "fp8_e5m2")
    scores = score_caches(tiny_model, random_windows(2, 300), [named_cache(name) for name in names])
    drift = [summarize(scores[name], scores["dynamic"])["kld_mean"] for name in names]
    assert 1e-6 < drift[0] < drift[1] < drift[2]


SETUPS: list[dict[str, object]] = [
    # mxfp4 has blocks of 32 channels, and the tiny model heads of 16.
    *({"format": name} for name in qkv.formats() if name not in ("none", "mxfp4")),
    {"format": "int8", "granularity": "head"},
    {"format": "int8", "sink_tokens": 4},
    {"format": "int8", "residual_length": 32},
    {"format": "fp8_e5m2", "sink_tokens": 3, "residual_length": 17},
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_scoring_in_chunks_equals_scoring_token_by_token(tiny_model: PreTrainedModel, setup: dict[str, object]) -> None:
    windows, cache = random_windows(2, 130), of_setup(**setup, backend="reference")
    modes = {"setup again": "stepwise"}
    scores = score_caches(tiny_model, windows, [cache, again(cache)], chunk=32, scoring=modes)
    chunked, steps = scores["setup"], scores["setup again"]
    assert (chunked.scoring, steps.scoring) == ("chunked", "stepwise")
    assert chunked.losses.shape == steps.losses.shape == (2, 129)
    assert (chunked.losses - steps.losses).abs().max() < 1e-4
    assert (chunked.divergence - steps.divergence).abs().max() < 1e-4
    assert chunked.divergence.mean() > 1e-6


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_kernel_that_serves_single_tokens_adds_little_to_what_the_format_does(
    tiny_model: PreTrainedModel, setup: dict[str, object]
) -> None:
    """Chunks are decoded for torch's attention, single tokens go through the kernel: the scores may differ by it."""
    windows, cache = random_windows(2, 130), of_setup(**setup)
    modes = {"setup again": "stepwise"}
    scores = score_caches(tiny_model, windows, [cache, again(cache)], chunk=32, scoring=modes)
    chunked, steps, plain = (scores[name].losses for name in ("setup", "setup again", "dynamic"))
    assert (chunked - steps).abs().mean() < (chunked - plain).abs().mean() / 20


def test_the_size_of_chunks_and_groups_changes_nothing(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, caches = random_windows(5, 150), [named_cache("int8")]
    together = score_caches(tiny_model, windows, caches, chunk=1000)["int8"]
    monkeypatch.setattr("qkv_eval.perplexity._MOST_LOGITS", 2 * 37 * 260)
    apart = score_caches(tiny_model, windows, caches, chunk=37)["int8"]
    torch.testing.assert_close(together.losses, apart.losses, rtol=0, atol=1e-4)
    torch.testing.assert_close(together.divergence, apart.divergence, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hf-fp8", "hf-hqq8"])
def test_a_cache_that_hides_its_stored_values_in_a_pass_is_scored_token_by_token(
    tiny_model: PreTrainedModel, name: str
) -> None:
    """Case 16. In one pass such caches hand back what they were given: perplexity would show no drift at all."""
    if name == "hf-hqq8":
        pytest.importorskip("hqq", reason="hqq is not installed")
    windows, cache = random_windows(2, PROMPT_TOKENS + 61), [named_cache(name)]
    scores = score_caches(tiny_model, windows, cache)
    figures = summarize(scores[name], scores["dynamic"])
    assert figures["kld_mean"] > 1e-7
    assert figures["scoring"] == "stepwise"
    assert (figures["tokens"], scores[name].first) == (2 * 60, PROMPT_TOKENS)
    with pytest.raises(ValueError, match=f"{name!r} hides what it stores .* 'chunked' would flatter it"):
        score_caches(tiny_model, windows, cache, scoring="chunked")
    scores = score_caches(tiny_model, windows, cache, scoring="prefill-exact")
    figures = summarize(scores[name], scores["dynamic"])
    assert (figures["kld_mean"], figures["scoring"]) == (0, "prefill-exact")


def test_exact_prefill_shows_no_drift_and_says_what_it_is(tiny_model: PreTrainedModel) -> None:
    scores = score_caches(tiny_model, random_windows(2, 100), [named_cache("fp8_e5m2")], scoring="prefill-exact")
    figures = summarize(scores["fp8_e5m2"], scores["dynamic"])
    assert figures["scoring"] == "prefill-exact"
    assert abs(figures["kld_mean"]) < 1e-6


def test_a_setup_with_exact_prefill_is_found_out_and_scored_token_by_token(tiny_model: PreTrainedModel) -> None:
    cache = of_setup(format="fp8_e5m2", prefill="exact")
    scores = score_caches(tiny_model, random_windows(1, PROMPT_TOKENS + 40), [cache])
    assert scores["setup"].scoring == "stepwise"
    assert scores["setup"].divergence.mean() > 1e-5


def test_the_noise_floor_is_rounding(tiny_model: PreTrainedModel) -> None:
    threads = torch.get_num_threads()
    scores = score_caches(tiny_model, random_windows(2, 200), [named_cache("int8")], noise_floor=True)
    floor, int8 = (summarize(scores[name], scores["dynamic"]) for name in (NOISE_FLOOR, "int8"))
    assert 0 < floor["kld_max"] < 1e-5 < int8["kld_max"]
    assert floor["same_top_percent"] == 100
    assert torch.get_num_threads() == threads
    assert list(scores) == ["dynamic", NOISE_FLOOR, "int8"]


def test_an_unknown_scoring_is_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="unknown scoring 'fast'; use one of auto, chunked"):
        score_caches(tiny_model, random_windows(1, 20), [], scoring="fast")


def test_figures_by_position_add_up_to_those_of_the_whole(tiny_model: PreTrainedModel) -> None:
    scores = score_caches(tiny_model, random_windows(2, 100), [named_cache("fp8_e5m2")])
    counted = torch.rand(2, 99, generator=torch.Generator().manual_seed(0)) < 0.7
    whole = summarize(scores["fp8_e5m2"], scores["dynamic"], counted)
    rows = by_position(scores["fp8_e5m2"], scores["dynamic"], counted)
    assert [row["from"] for row in rows] == [0, *[row["to"] for row in rows[:-1]]]
    assert (rows[-1]["to"], sum(row["tokens"] for row in rows)) == (99, int(counted.sum()))
    for key in ("kld_mean", "same_top_percent"):
        assert sum(row[key] * row["tokens"] for row in rows) / whole["tokens"] == pytest.approx(whole[key], rel=1e-6)


def test_quantiles_are_those_of_the_positions() -> None:
    divergence = torch.arange(1001.0)[None] / 1000
    scores = Scores(torch.zeros(1, 1001), divergence, divergence < 2, "chunked")
    figures = summarize(scores, scores)
    found = [figures[key] for key in ("kld_median", "kld_p99", "kld_p999", "kld_max")]
    assert found == pytest.approx([0.5, 0.99, 0.999, 1.0])


def test_with_a_stepwise_cache_all_rows_are_over_the_same_positions(tiny_model: PreTrainedModel) -> None:
    windows = random_windows(1, PROMPT_TOKENS + 20)
    scores = score_caches(tiny_model, windows, [named_cache("int8"), named_cache("hf-fp8")])
    assert {tuple(part.losses.shape) for part in scores.values()} == {(1, 19)}


def test_scoring_leaves_the_model_plain(tiny_model: PreTrainedModel) -> None:
    attention = tiny_model.config._attn_implementation
    score_caches(tiny_model, random_windows(1, 20), [named_cache("int8")])
    assert tiny_model.config._attn_implementation == attention


def test_progress_ends_at_its_total(tiny_model: PreTrainedModel) -> None:
    calls: list[tuple[int, int]] = []
    windows = random_windows(2, 50)
    score_caches(tiny_model, windows, [], chunk=16, progress=lambda _, done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (98, 98)


def test_windows_beyond_the_model_are_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="1025 tokens are more than the model's 1024 positions"):
        score_caches(tiny_model, random_windows(1, 1025), [])


def test_windows_with_nothing_after_the_prompt_are_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="at least 130"):
        score_caches(tiny_model, random_windows(1, 129), [named_cache("hf-fp8")])


def test_standard_errors_are_those_of_the_tokens() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    flat = torch.zeros_like(losses)
    baseline = Scores(losses, flat, flat == 0, "chunked")
    shifted = Scores(losses + 0.01, flat + 0.002, flat == 0, "chunked")
    figures = summarize(shifted, baseline)
    assert figures["ppl"] == pytest.approx(math.exp(3.01))
    assert figures["ppl_stderr"] == pytest.approx(math.exp(3.01) * losses.std().item() / 2, rel=1e-6)
    assert figures["dppl_percent"] == pytest.approx(100 * (math.exp(0.01) - 1), rel=1e-4)
    assert figures["dppl_percent_stderr"] < 1e-4
    assert figures["kld_mean"] == pytest.approx(0.002)


def test_int8_on_a_real_model_is_as_good_as_8_bits_should_be(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    model, tokenizer = smollm2
    windows = cut_windows(tokenizer, embedded_text(), window=512, limit=2)
    scores = score_caches(model, windows, [named_cache("int8"), named_cache("fp8_e4m3")])
    int8, fp8 = (summarize(scores[name], scores["dynamic"]) for name in ("int8", "fp8_e4m3"))
    assert int8["ppl"] == pytest.approx(15.2, abs=3)  # the text differs a little between versions of Python
    assert 1e-5 < int8["kld_mean"] < 0.0012
    assert int8["same_top_percent"] > 97.5
    assert int8["kld_mean"] < fp8["kld_mean"] < 0.010
    assert abs(int8["dppl_percent"]) < 0.5


def test_an_unquantized_cache_of_another_class_is_no_different(tiny_model: PreTrainedModel) -> None:
    plain = NamedCache("plain", lambda config: DynamicCache(), is_ours=False)
    scores = score_caches(tiny_model, random_windows(1, 80), [plain])
    assert torch.equal(scores["plain"].losses, scores["dynamic"].losses)
