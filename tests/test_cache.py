"""QKVCache against DynamicCache on tiny random models: the same answers, whatever the way there."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from setups import SETUPS, format_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import (
    DynamicCache,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import qkv
from qkv.named_caches import as_argument
from qkv.planes import Plane

QUANTIZED = [name for name in qkv.formats() if name != "none"]
INT8 = {"format": "int8", "equalize": False}
# Keys per channel, in groups of tokens: what is not a whole group waits, and a crop may cut one.
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 32}
# Of these neither a token nor a row of a batch depends on what comes with it.
TOKEN_WISE: list[dict[str, Any]] = [
    INT8,
    {"format": "fp8_e4m3"},
    {"format": "fp8_e5m2"},
    {"format": "none", "value_format": "int8"},
    {"format": "int4", "granularity": "group"},
    {"format": "int5_rot", "granularity": "token", "equalize": False},
    {"format": "nf4"},
]
# Different ways to store; every one must keep the promises below.
WAYS: list[dict[str, Any]] = [
    *TOKEN_WISE,
    {"format": "int8"},
    {**INT8, "granularity": "head"},
    {**INT8, "residual_length": 5, "sink_tokens": 3},
    {"format": "fp8_e4m3", "granularity": "head", "residual_length": 7},
    CHANNELS,
    {**CHANNELS, "key_format": "int8", "residual_length": 5, "sink_tokens": 3},
    {"format": "k5v4"},
]
LONG = 200  # tokens; keys that are equalized stay exact until there are 128 of them behind the sinks


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True, **kwargs).logits


@torch.no_grad()
def stepwise(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits(model, cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], dim=1)


# ---- the unquantized cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_none_equals_dynamic_cache_bit_for_bit_with_the_same_attention(
    implementation: str, dtype: torch.dtype, tiny_model: PreTrainedModel
) -> None:
    model = copy.deepcopy(tiny_model).to(dtype)
    model.set_attn_implementation(implementation)
    ids = prompt(2, 300)
    ours, theirs = qkv.QKVCache(model.config, "none"), DynamicCache(config=model.config)
    for piece in (ids[:, :270], ids[:, 270:275], *ids[:, 275:].split(1, dim=1)):
        assert torch.equal(logits(model, ours, piece), logits(model, theirs, piece))
    for (our_keys, our_values, _), (their_keys, their_values, _) in zip(ours, theirs, strict=True):
        assert torch.equal(our_keys, their_keys)
        assert torch.equal(our_values, their_values)


def test_none_with_the_fused_attention_is_within_2e_5_of_the_largest_logit(tiny_model: PreTrainedModel) -> None:
    ids = prompt(2, 300)
    expected = stepwise(tiny_model, DynamicCache(config=tiny_model.config), ids)
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, "none")
    actual = stepwise(tiny_model, cache, ids)
    assert cache.stats()["layers"][0]["backend"] == "cpu"
    assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


# ---- one pass, pieces, and single steps ------------------------------------------------------------------------------


def in_pieces(model: PreTrainedModel, way: dict[str, Any], ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    cache = qkv.QKVCache(model.config, **way)
    return torch.cat([logits(model, cache, x) for x in ids.split(pieces, dim=1)], dim=1).log_softmax(-1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_pass_pieces_and_single_steps_agree(way: dict[str, Any], tiny_model: PreTrainedModel) -> None:
    """Case 11. In double precision no code can differ by rounding, so that this is about what a query sees."""
    model = qkv.enable(copy.deepcopy(tiny_model).double())
    ids = prompt(2, LONG)
    way = {**way, "backend": "reference"}
    whole = in_pieces(model, way, ids, [LONG])
    assert torch.allclose(in_pieces(model, way, ids, [1] * LONG), whole, rtol=0, atol=1e-9)
    assert torch.allclose(in_pieces(model, way, ids, [100, 3, 40, 7, 50]), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_fused_steps_agree_with_one_pass_far_within_the_error_of_the_format(
    way: dict[str, Any], tiny_model: PreTrainedModel
) -> None:
    """Case 11. Rounding in float32 flips single codes by one step, so the measure is what the format itself does."""
    ids = prompt(2, LONG)
    exact = logits(tiny_model, DynamicCache(config=tiny_model.config), ids).log_softmax(-1)
    qkv.enable(tiny_model)
    whole = in_pieces(tiny_model, way, ids, [LONG])
    for pieces in ([1] * LONG, [100, 3, 40, 7, 50]):
        other = in_pieces(tiny_model, way, ids, pieces)
        assert float((other - whole).square().mean()) < 0.05 * float((whole - exact).square().mean())
        assert abs(float((other - whole).mean())) < 1e-4


@pytest.mark.parametrize("name", [*QUANTIZED, *qkv.presets()])
def test_the_scored_pass_attends_to_the_stored_values(name: str, wide_model: PreTrainedModel) -> None:
    """Case 16: what one pass over a text shows is the error of the format, not that of nothing."""
    ids = prompt(1, 300)
    exact = logits(wide_model, DynamicCache(config=wide_model.config), ids).log_softmax(-1)
    qkv.enable(wide_model)
    stored = logits(wide_model, qkv.QKVCache(wide_model.config, name), ids).log_softmax(-1)
    unseen = logits(wide_model, qkv.QKVCache(wide_model.config, name, prefill="exact"), ids).log_softmax(-1)
    decoding = stepwise(wide_model, qkv.QKVCache(wide_model.config, name), ids).log_softmax(-1)

    def drift(other: torch.Tensor) -> float:
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    assert drift(stored) > 1e-7
    assert drift(stored) == pytest.approx(drift(decoding), rel=0.05)
    assert abs(drift(unseen)) < 1e-9


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_exact_prefill_stores_the_same_codes_as_stored_prefill(
    way: dict[str, Any], tiny_model: PreTrainedModel
) -> None:
    """They differ in what the first layer attends to, so only the first layer's keys can be compared."""
    qkv.enable(tiny_model)
    caches = [qkv.QKVCache(tiny_model.config, **way, prefill=prefill) for prefill in ("stored", "exact")]
    for cache in caches:
        logits(tiny_model, cache, prompt(1, LONG))
    assert torch.equal(caches[0].view(0).decode()[0], caches[1].view(0).decode()[0])
    assert any(segment.length for segment in caches[1].layers[0].store.packed)


# ---- what is stored stays as it is -----------------------------------------------------------------------------------


def tokens(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, 2, 1, n, 16, generator=torch.Generator().manual_seed(seed))
    return keys, values


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_later_tokens_that_are_larger_do_not_saturate(way: dict[str, Any]) -> None:
    """Case 2: neither scales nor the vectors for equalizing are bounds, whenever they were taken."""
    cache = qkv.QKVCache(None, **way)
    cache.update(*tokens(150), 0)
    late = [100 * x for x in tokens(192, seed=1)]
    cache.update(*late, 0)
    store = cache.layers[0].store
    formats = (store.key_format, store.value_format)
    for stored, given, format in zip(cache.view(0).decode(), late, formats, strict=True):
        error = (stored[:, :, 150:] - given).square().mean().sqrt() / given.square().mean().sqrt()
        bits = 24 if format is None else 5 if format.name.startswith("fp8") else format.bits
        assert float(error) < 4 * 2.0**-bits


@pytest.mark.parametrize("residual", [1, 20, 70])
@pytest.mark.parametrize("way", [{"format": "int8"}, {"format": "int6", "granularity": "group"}, CHANNELS], ids=str)
def test_the_last_tokens_of_a_residual_window_are_always_exact(way: dict[str, Any], residual: int) -> None:
    """Case 4: also when a group of tokens is full, of which all but them are encoded."""
    cache = qkv.QKVCache(None, **way, residual_length=residual)
    given, at = tokens(260), 0
    for n in (50, *[1] * 100, 60, *[1] * 50):
        cache.update(*(x[:, :, at : at + n] for x in given), 0)
        at += n
        for stored, x in zip(cache.view(0).decode(), given, strict=True):
            span = slice(max(0, at - residual), at)
            assert torch.equal(stored[:, :, span], x[:, :, span])
    assert cache.layers[0].store.packed


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_token_changes_once_and_never_again(way: dict[str, Any]) -> None:
    """Case 5: what was encoded is not encoded anew, whatever comes behind it."""
    cache = qkv.QKVCache(None, **way)
    given, at = tokens(300), 0
    before = [x[:, :, :0] for x in given]
    for n in (30, *[1] * 110, 40, *[1] * 70, 50):
        cache.update(*(x[:, :, at : at + n] for x in given), 0)
        now = cache.view(0).decode()
        for stored, old, x in zip(now, before, given, strict=True):
            held = stored[:, :, :at]
            assert bool(((held == old) | (old == x[:, :, :at])).all())
        before, at = list(now), at + n
    assert all(bool((x != y).any()) for x, y in zip(before, given, strict=True)) or way["format"] == "none"


# ---- keys with huge channels -----------------------------------------------------------------------------------------


def model_with_bias(bias: float) -> PreTrainedModel:
    """A tiny Qwen2, whose keys have a bias: ``bias`` in the channels that rotate slowest, where queries are small."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=260,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.bias.normal_()
            for channel in (15, 31):
                attention.k_proj.bias[channel] += bias
                attention.q_proj.weight.view(3, 32, -1)[:, channel] *= 0.01
    return model


@pytest.mark.parametrize(
    ("way", "times"),
    [
        # The bias rotates out of the range that the first 128 tokens had.
        ({"format": "int8"}, 5),
        ({"format": "fp8_e4m3"}, 1.5),
        ({"format": "int4"}, 1.5),
        ({"format": "int4_rot"}, 1.5),
        ({"format": "int4", "granularity": "token", "equalize": True}, 5),
    ],
    ids=str,
)
def test_a_model_with_a_large_bias_of_its_keys_loses_little_more_than_one_without(
    way: dict[str, Any], times: float
) -> None:
    """Case 1. The same without what is made for such keys: the model is lost."""
    ids = prompt(2, 512)

    def drift(bias: float, **options: Any) -> float:
        model = model_with_bias(bias)
        exact = logits(model, DynamicCache(config=model.config), ids).log_softmax(-1)
        qkv.enable(model)
        cache = qkv.QKVCache(model.config, **options)
        stored = torch.cat([logits(model, cache, piece) for piece in ids.split(128, dim=1)], dim=1).log_softmax(-1)
        return float((exact.exp() * (exact - stored)).sum(-1)[:, 128:].mean())

    assert drift(300.0, **way) < times * drift(0.0, **way)
    if "fp8" not in way["format"]:
        lost = {"format": way["format"].removesuffix("_rot"), "granularity": "token", "equalize": False}
        assert drift(300.0, **lost) > 5 * drift(300.0, **way)


# ---- generation ------------------------------------------------------------------------------------------------------


# Padding takes part in the choice of scales per head and per channel, and of the vectors that keys are equalized by, so
# that there a row in a batch differs from the row alone; sinks and the residual window count padding as tokens.
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", [{"format": "none"}, *TOKEN_WISE], ids=str)
def test_generate_with_left_padding_equals_each_row_alone(
    way: dict[str, Any], fused: bool, tiny_model: PreTrainedModel
) -> None:
    """In double precision, where rounding decides nothing; the kernel's masks are held against the oracle elsewhere."""
    model = copy.deepcopy(tiny_model).double()
    if fused:
        qkv.enable(model)
        way = {**way, "backend": "reference"}
    lengths = [30, 17, 24]
    rows = [prompt(1, n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(row, (30 - row.shape[1], 0), value=258) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (30 - r.shape[1], 0)) for r in rows])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 258}
    batch = model.generate(padded, attention_mask=mask, **as_argument(qkv.QKVCache(model.config, **way)), **options)
    for i, row in enumerate(rows):
        alone = model.generate(row, **as_argument(qkv.QKVCache(model.config, **way)), **options)
        new = alone[0, lengths[i] :]
        assert torch.equal(new, batch[i, 30 : 30 + len(new)])


class FakeQuantized(DynamicCache):
    """DynamicCache of keys and values that went through a format on their way in."""

    def __init__(self, config: Any, way: dict[str, Any]):
        super().__init__(config=config)
        self.way = way

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        layer = qkv.QKVCache(None, **self.way)
        layer.update(key_states, value_states, 0)
        return super().update(layer.layers[0].keys, layer.layers[0].values, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("way", [{"format": "none"}, *TOKEN_WISE], ids=str)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_generate_equals_dynamic_cache_of_the_decoded_values(
    way: dict[str, Any], beams: int, sample: bool, tiny_model: PreTrainedModel
) -> None:
    """In double precision, where rounding decides nothing: greedy, sampling, beam search and beam sampling."""
    model = copy.deepcopy(tiny_model).double()
    ids = prompt(2, 70)

    def generate(cache: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(
            ids, **as_argument(cache), max_new_tokens=12, num_beams=beams, do_sample=sample, pad_token_id=258
        )

    expected = generate(FakeQuantized(model.config, way))
    assert torch.equal(generate(qkv.QKVCache(model.config, **way)), expected)
    qkv.enable(model)
    assert torch.equal(generate(qkv.QKVCache(model.config, **way, backend="reference")), expected)


@pytest.mark.parametrize("way", [{"format": "none"}, *WAYS], ids=str)
@pytest.mark.parametrize("length", [35, 120])
def test_a_second_turn_on_the_same_cache_equals_one_long_prompt(
    way: dict[str, Any], length: int, tiny_model: PreTrainedModel
) -> None:
    """Case 8. In double precision; also where keys begin to be equalized in the first answer."""
    model = qkv.enable(copy.deepcopy(tiny_model).double())
    way = {**way, "backend": "reference"}
    first, second = prompt(1, length, seed=2), prompt(1, 20, seed=3)
    cache = qkv.QKVCache(model.config, **way)
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 258}
    answer = model.generate(first, **as_argument(cache), **options)
    # The last token that was generated has not gone through the model.
    assert cache.get_seq_length() == answer.shape[1] - 1
    assert cache.layers[0].keys.dtype == model.dtype
    turns = torch.cat([answer, second], dim=1)
    continued = model.generate(turns, **as_argument(cache), **options)
    fresh = model.generate(turns, **as_argument(qkv.QKVCache(model.config, **way)), **options)
    assert torch.equal(continued, fresh)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_reset_leaves_nothing_of_a_warm_up(way: dict[str, Any], tiny_model: PreTrainedModel) -> None:
    """Case 3."""
    qkv.enable(tiny_model)
    ids = prompt(2, LONG)
    fresh, used = (qkv.QKVCache(tiny_model.config, **way) for _ in range(2))
    dummy = torch.full((1, 1, LONG, 16), 1e4) * torch.linspace(-1, 1, 16)
    for layer in range(2):
        used.update(dummy, -dummy, layer)
    used.reset()
    assert used.get_seq_length() == 0
    assert used.nbytes() == 0
    assert torch.equal(logits(tiny_model, used, ids), logits(tiny_model, fresh, ids))


# Shorter than the warm-up of equalized keys, and longer.
@pytest.mark.parametrize("length", [80, 150])
@pytest.mark.parametrize("way", [{"format": "none"}, *WAYS], ids=str)
def test_a_deep_copy_continues_like_the_original_and_shares_nothing(
    way: dict[str, Any], length: int, tiny_model: PreTrainedModel
) -> None:
    """Case 12."""
    qkv.enable(tiny_model)
    prefix, one, other = prompt(1, length), prompt(1, 60, seed=4), prompt(1, 70, seed=5)
    cache = qkv.QKVCache(tiny_model.config, **way)
    logits(tiny_model, cache, prefix)
    twin = copy.deepcopy(cache)
    pointers = [{t.data_ptr() for t in held(c)} for c in (cache, twin)]
    assert not pointers[0] & pointers[1]
    expected = logits(tiny_model, cache, one)
    twin_of_twin = copy.deepcopy(twin)
    logits(tiny_model, twin_of_twin, other)
    assert torch.equal(logits(tiny_model, twin, one), expected)
    assert twin.layers[0].model_config is tiny_model.config


def held(cache: qkv.QKVCache) -> list[torch.Tensor]:
    """The tensors that a cache holds."""
    found = []
    for layer in cache.layers:
        for segment in layer.store.segments():
            found += [t for plane in segment.planes() for t in plane.tensors()]
        for transform in layer.store._transforms:
            if transform is not None:
                parts = (transform.signs, transform.centre, transform.multiplier)
                found += [t for t in parts if t is not None]
    return found


@pytest.mark.parametrize("length", [50, 150])
@pytest.mark.parametrize("way", [{"format": "none"}, *WAYS], ids=str)
def test_a_pickled_cache_continues_like_the_original(
    way: dict[str, Any], length: int, tiny_model: PreTrainedModel
) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, **way)
    logits(tiny_model, cache, prompt(1, length))
    twin = pickle.loads(pickle.dumps(cache))
    for ids in (prompt(1, 60, seed=8), prompt(1, 1, seed=9)):
        assert torch.equal(logits(tiny_model, twin, ids), logits(tiny_model, cache, ids))


# What left the residual window, or made a scale per head grow, stays as it is: see LayerStore.crop.
@pytest.mark.parametrize("way", [{"format": "none"}, *TOKEN_WISE], ids=str)
def test_crop_then_append_equals_never_having_seen_the_cropped_tokens(
    way: dict[str, Any], tiny_model: PreTrainedModel
) -> None:
    qkv.enable(tiny_model)
    ids, wrong, right = prompt(1, 40), prompt(1, 10, seed=2), prompt(1, 12, seed=3)
    cache, fresh = (qkv.QKVCache(tiny_model.config, **way) for _ in range(2))
    logits(tiny_model, cache, ids)
    logits(tiny_model, cache, wrong)
    cache.crop(-10)
    logits(tiny_model, fresh, ids)
    assert cache.get_seq_length() == 40
    assert torch.equal(logits(tiny_model, cache, right), logits(tiny_model, fresh, right))


# ---- which path served -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_stats_name_the_path_that_served(way: dict[str, Any], tiny_model: PreTrainedModel) -> None:
    """Case 13."""
    cache = qkv.QKVCache(tiny_model.config, **way)
    assert [row["backend"] for row in cache.stats()["layers"]] == [None, None]
    with pytest.warns(qkv.SlowPathWarning, match=r"qkv\.enable"):
        logits(tiny_model, cache, prompt(1, 3))
    assert [row["backend"] for row in cache.stats()["layers"]] == ["decoded", "decoded"]
    qkv.enable(tiny_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(tiny_model, cache, prompt(1, 20))
        assert [row["backend"] for row in cache.stats()["layers"]] == ["dense", "dense"]
        logits(tiny_model, cache, prompt(1, 1))
        assert [row["backend"] for row in cache.stats()["layers"]] == ["cpu", "cpu"]
    reference = qkv.QKVCache(tiny_model.config, **way, backend="reference")
    logits(tiny_model, reference, prompt(1, 3))
    assert [row["backend"] for row in reference.stats()["layers"]] == ["reference", "reference"]


@pytest.mark.parametrize("name", [*SETUPS, *qkv.presets()])
def test_no_step_of_decoding_decodes_a_layer(
    name: str, wide_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 13: whatever the format is and whatever shares a scale, attention reads the codes."""
    way = SETUPS.get(name, {"format": name})
    qkv.enable(wide_model)
    cache = qkv.QKVCache(wide_model.config, **way)
    logits(wide_model, cache, prompt(2, LONG))
    assert all(layer.store.packed for layer in cache.layers)

    def refuse(*arguments: Any) -> None:
        pytest.fail("a step of decoding decoded what is stored")

    monkeypatch.setattr(Plane, "decode_into", refuse)
    for n in (1, 1, 5, 1):
        logits(wide_model, cache, prompt(2, n, seed=n))
        assert [row["backend"] for row in cache.stats()["layers"]] == ["cpu", "cpu"]


def test_stats_and_nbytes_count_everything(tiny_model: PreTrainedModel) -> None:
    """Case 17."""
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, **INT8, residual_length=6, sink_tokens=2)
    logits(tiny_model, cache, prompt(2, 100))
    stats = cache.stats()
    assert stats["tokens"] == 100
    assert stats["bytes"] == cache.nbytes() == sum(row["bytes"] for row in stats["layers"])
    # 92 tokens of 8 bits and a scale of 16 bits per 16 values, 8 exact ones of 32 bits.
    assert stats["bits_per_value"] == pytest.approx((92 * 9 + 8 * 32) / 100)
    assert sum(t.untyped_storage().nbytes() for t in held(cache)) == cache.nbytes()
    row = stats["layers"][0]
    assert (row["key_format"], row["value_format"], row["granularity"], row["tokens"]) == (
        "int8",
        "int8",
        "token",
        100,
    )


# What the keys and the values of 100 tokens take, in bits for 16 channels.
COSTS: list[tuple[dict[str, Any], float]] = [
    # A scale and a zero point of a byte each for every token.
    ({"format": "int4", "granularity": "group"}, 2 * 100 * (16 * 4 + 16)),
    ({"format": "int3_rot", "granularity": "token", "equalize": False}, 2 * 100 * (16 * 3 + 16)),
    ({"format": "nvfp4"}, 2 * 100 * (16 * 4 + 8)),
    # 96 keys in three groups, with a scale and a zero point for every channel; 4 wait, and so do the values.
    (CHANNELS, 96 * 16 * 4 + 3 * 16 * 16 + 96 * (16 * 4 + 16) + 4 * 2 * 16 * 32),
]


@pytest.mark.parametrize(("way", "bits"), COSTS, ids=str)
def test_bits_per_value_count_codes_scales_offsets_and_what_waits(
    way: dict[str, Any], bits: float, tiny_model: PreTrainedModel
) -> None:
    """Case 17."""
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, **way)
    logits(tiny_model, cache, prompt(2, 100))
    assert cache.stats()["bits_per_value"] == pytest.approx(bits / (2 * 100 * 16))
    assert sum(t.untyped_storage().nbytes() for t in held(cache)) == cache.nbytes() >= 2 * 2 * bits / 8


def test_a_layer_without_keys_is_left_untouched_and_said_so() -> None:
    config = Lfm2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
    config.layer_types = ["full_attention", "conv"]
    cache = qkv.QKVCache(config, "int8")
    cache.update(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), 0)
    rows = cache.stats()["layers"]
    assert [row["key_format"] for row in rows] == ["int8", "none"]
    assert rows[1]["backend"] == "untouched"
    assert cache.is_linear == [False, True]


class Peak(TorchDispatchMode):
    """Follows the bytes of all tensor memory made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor) and type(x).__name__ != "PackedTensor":
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.alive and storage.nbytes():
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4", "k5v4"])
def test_the_peak_of_prefill_and_decoding_is_below_that_of_dynamic_cache(format: str, fused: bool) -> None:
    """Case 14: one layer is decoded at a time, and nothing is concatenated."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4, vocab_size=50
    )
    model = LlamaForCausalLM(config).eval()
    if fused:
        qkv.enable(model)

    def peak(cache: Any) -> int:
        gc.collect()
        with Peak() as follow, warnings.catch_warnings():
            warnings.simplefilter("ignore", qkv.SlowPathWarning)
            logits(model, cache, torch.ones(1, 1500, dtype=torch.long), logits_to_keep=1)
            for _ in range(3):
                logits(model, cache, torch.ones(1, 1, dtype=torch.long))
        return follow.peak

    ours, theirs = peak(qkv.QKVCache(config, format)), peak(DynamicCache(config=config))
    assert ours < 0.75 * theirs


# ---- what users pass in ----------------------------------------------------------------------------------------------


def test_what_the_caller_passed_in_is_not_changed(tiny_model: PreTrainedModel) -> None:
    """Case 19."""
    layers = {0: {"format": "fp8_e4m3"}}
    scales = {"layers.0.key_scale": torch.tensor([0.5])}
    before = copy.deepcopy((layers, scales, tiny_model.config.to_dict()))
    cache = qkv.QKVCache(tiny_model.config, "int8", granularity="head", layers=layers, scales=scales)
    cache.update(torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16), 0)
    assert layers == before[0]
    assert torch.equal(scales["layers.0.key_scale"], before[1]["layers.0.key_scale"])
    assert tiny_model.config.to_dict() == before[2]
    layers[0]["format"] = "int8"
    scales["layers.0.key_scale"].fill_(9.0)
    assert cache.config.layers[0]["format"] == "fp8_e4m3"
    assert float(cache.layers[0].store._given[0]) == 0.5


def test_formats_may_differ_by_layer_and_between_keys_and_values(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    layers = {1: {"key_format": "int4", "key_granularity": "channel", "sink_tokens": 2}}
    cache = qkv.QKVCache(tiny_model.config, "int8", value_format="fp8_e4m3", layers=layers)
    logits(tiny_model, cache, prompt(1, LONG))
    rows = cache.stats()["layers"]
    assert [(row["key_format"], row["value_format"]) for row in rows] == [("int8", "fp8_e4m3"), ("int4", "fp8_e4m3")]
    assert [row["granularity"] for row in rows] == ["token", "channel/token"]
    logits(tiny_model, cache, prompt(1, 1))
    assert [row["backend"] for row in cache.stats()["layers"]] == ["cpu", "cpu"]


def test_given_scales_are_used_and_absurd_ones_change_the_output(tiny_model: PreTrainedModel) -> None:
    """Case 10."""
    qkv.enable(tiny_model)
    ids = prompt(1, LONG)

    def run(factor: float | None) -> torch.Tensor:
        scales = None
        if factor is not None:
            names = [f"layers.{i}.{kind}_scale" for i in range(2) for kind in ("key", "value")]
            scales = {name: torch.tensor([factor]) for name in names}
        cache = qkv.QKVCache(tiny_model.config, "int8", granularity="head", scales=scales)
        return logits(tiny_model, cache, ids)

    exact = logits(tiny_model, qkv.QKVCache(tiny_model.config, "none"), ids)
    sensible, absurd = run(0.05), run(1e-4)
    assert float((sensible - exact).abs().max()) < 0.1 * float((absurd - exact).abs().max())
    assert not torch.equal(run(None), sensible)


def test_given_equalizing_vectors_are_used_and_absurd_ones_change_the_output(tiny_model: PreTrainedModel) -> None:
    """Case 10. With given vectors the first token is encoded as it comes."""
    qkv.enable(tiny_model)
    ids = prompt(1, 60)

    def run(centre: float | None) -> torch.Tensor:
        scales = None
        if centre is not None:
            scales = {f"layers.{i}.key_centre": torch.full((1, 16), centre) for i in range(2)}
            scales |= {f"layers.{i}.key_multiplier": torch.linspace(0.5, 2.0, 16).view(1, 16) for i in range(2)}
        return logits(tiny_model, qkv.QKVCache(tiny_model.config, "int8", scales=scales), ids)

    exact = logits(tiny_model, qkv.QKVCache(tiny_model.config, "none"), ids)
    sensible, absurd = run(0.1), run(1e4)
    assert 0 < float((sensible - exact).abs().max()) < 0.1 * float((absurd - exact).abs().max())
    assert not torch.equal(run(None), sensible)


def test_scales_can_come_from_a_safetensors_file(tiny_model: PreTrainedModel, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "scales.safetensors"
    save_file({f"layers.1.{kind}_scale": torch.tensor([0.25]) for kind in ("key", "value")}, path)
    cache = qkv.QKVCache(tiny_model.config, "int8", granularity="head", scales=path)
    value = torch.full((1, 1, 1, 16), 1000.0)
    cache.update(value, value, 1)
    assert float(cache.layers[1].values.amax()) == 127 * 0.25


@pytest.mark.parametrize("first", ["int8", torch.nn.Linear(1, 1)])
def test_something_else_than_a_configuration_is_refused(first: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.config"):
        qkv.QKVCache(first)


def test_the_slow_path_is_said_once_for_a_cache(tiny_model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            logits(tiny_model, cache, prompt(1, 2))
    assert len([w for w in caught if issubclass(w.category, qkv.SlowPathWarning)]) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"format": "int9"}, "known formats: none, int8"),
    ({"format": "int8", "key_format": "x"}, "unknown format 'x'"),
    ({"format": "int8", "granularity": "row"}, "granularity='row'"),
    ({"format": "int4", "granularity": "head"}, "use one of group, channel, token"),
    ({"format": "mxfp4", "key_granularity": "channel"}, "use one of group"),
    ({"format": "int8", "group_size": 64}, "group_size goes with granularity 'group' or 'channel', not 'token'"),
    ({"format": "int4", "value_granularity": "token", "value_group_size": 16}, "group_size goes with granularity"),
    ({"format": "int4", "key_granularity": "channel", "key_group_size": 24}, "one of 16, 32, 64, 128; not 24"),
    ({"format": "int8", "equalize": 1}, "equalize must be true, false or None"),
    ({"format": "k5v5v5"}, "set-ups: k8v4"),
    ({"format": "int8", "residual_length": -1}, "residual_length"),
    ({"format": "int8", "sink_tokens": 1.5}, "sink_tokens"),
    ({"format": "int8", "prefill": "half"}, "prefill"),
    ({"format": "int8", "backend": "gpu"}, "backend"),
    ({"format": "int8", "layers": {5: {"format": "none"}}}, "layers 0 to 1"),
    ({"format": "int8", "layers": {0: {"fromat": "none"}}}, "unknown key 'fromat'"),
    ({"format": "missing.yaml"}, "cannot read"),
    ({"format": 8}, "name of a format or preset"),
    ({"format": "int8", "scales": "missing.safetensors"}, "cannot read scales"),
    ({"format": "int8", "scales": {"layers.9.key_scale": torch.ones(1)}}, "no layer"),
    ({"format": "int8", "scales": {"layer.0": torch.ones(1)}}, "no name of a scale"),
    ({"format": "int8", "scales": {"layers.0.key_scale": torch.zeros(1)}}, "positive"),
    ({"format": "int8", "scales": {"layers.0.key_scale": torch.ones(1, 1)}}, r"\[kv_heads\]"),
    ({"format": "int8", "granularity": "token", "scales": {"layers.0.key_scale": torch.ones(1)}}, "granularity"),
    ({"format": "none", "scales": {"layers.0.key_scale": torch.ones(1)}}, "without scales"),
    ({"format": "none", "scales": {"layers.0.key_centre": torch.ones(1, 16)}}, "not quantized"),
    ({"format": "int8", "equalize": False, "scales": {"layers.0.key_centre": torch.ones(1, 16)}}, "equalize is false"),
    ({"format": "int8", "equalize": True, "scales": {"layers.0.key_scale": torch.ones(1)}}, "without the vectors"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=str)
def test_a_mistake_in_the_arguments_is_one_clear_value_error(
    arguments: dict[str, Any], message: str, tiny_model: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=message):
        qkv.QKVCache(tiny_model.config, **arguments)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"format": "mxfp4"}, "blocks of 32 channels, and keys have head_dim=16"),
        ({"format": "int8", "value_format": "mxfp4"}, "blocks of 32 channels, and values have head_dim=16"),
        (
            {"format": "int4", "granularity": "group", "group_size": 12},
            "does not go with group_size=12",
        ),
        ({"format": "nvfp4", "group_size": 32}, "blocks of 16 channels; group_size=32"),
        (
            {"format": "int8", "scales": {"layers.0.key_centre": torch.zeros(1, 8)}},
            r"must be .* = \[1, 16\]",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_head_size_is_refused_at_the_first_update(
    way: dict[str, Any], message: str, tiny_model: PreTrainedModel
) -> None:
    """Case 9."""
    cache = qkv.QKVCache(tiny_model.config, **way)
    with pytest.raises(ValueError, match=message):
        logits(tiny_model, cache, prompt(1, 3))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("head_dim", [24, 80, 96, 112])
@pytest.mark.parametrize("name", [*QUANTIZED, *qkv.presets()])
def test_any_head_size_serves(name: str, head_dim: int) -> None:
    """Case 9: rotations and groups too, of sizes that are no power of two; fixed blocks say what they need."""
    model = qkv.enable(make_tiny_model(head_dim=head_dim, num_hidden_layers=1))
    block = format_of(qkv.CacheConfig.of(name).to_dict(), "key").block
    cache = qkv.QKVCache(model.config, name)
    if block is not None and head_dim % block:
        with pytest.raises(ValueError, match=f"head_dim={head_dim}, which is no multiple of {block}"):
            logits(model, cache, prompt(1, 3))
        return
    ids = prompt(1, LONG)
    exact = logits(model, DynamicCache(config=model.config), ids)
    stored = torch.cat([logits(model, cache, ids[:, :170]), stepwise(model, cache, ids[:, 170:])], dim=1)
    assert cache.stats()["layers"][0]["backend"] == "cpu"
    # A bound on what is plainly wrong: with 2 bits a fifth of what the model says is noise.
    assert 0 < float((stored - exact).square().mean()) < (0.4 if name.startswith("int2") else 0.2) * float(exact.var())


def test_a_head_dim_of_0_is_refused() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    config.head_dim = 0
    with pytest.raises(ValueError, match="head_dim"):
        qkv.QKVCache(config, "int8")
    with pytest.raises(ValueError, match="head_dim"):
        qkv.QKVCache(None, "int8").update(torch.zeros(1, 1, 3, 0), torch.zeros(1, 1, 3, 0), 0)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 16), "batch is 2, but the cache holds 1"),
        (torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), "kv_heads"),
        (torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 16), "head_dim of keys"),
        (torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 2, 16), "must agree"),
        (torch.zeros(1, 1, 3, 16).half(), torch.zeros(1, 1, 3, 16), "one dtype"),
        (torch.zeros(1, 1, 3, 16).half(), torch.zeros(1, 1, 3, 16).half(), "float32"),
        (torch.zeros(1, 3, 16), torch.zeros(1, 3, 16), "must be"),
        (torch.zeros(1, 1, 3, 16).int(), torch.zeros(1, 1, 3, 16).int(), "floating point"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_and_changes_nothing(
    keys: torch.Tensor, values: torch.Tensor, message: str, tiny_model: PreTrainedModel
) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, "int8")
    logits(tiny_model, cache, prompt(1, LONG))
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        cache.update(keys, values, 0)
    ids = prompt(1, 2, seed=9)
    assert torch.equal(logits(tiny_model, cache, ids), logits(tiny_model, twin, ids))


def test_scales_of_a_wrong_shape_are_refused_at_the_first_update(tiny_model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8", granularity="head", scales={"layers.0.key_scale": torch.ones(3)})
    with pytest.raises(ValueError, match=r"key scales must be \[kv_heads\] = \[1\]"):
        cache.update(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), 0)
    assert cache.get_seq_length() == 0


def test_without_a_model_configuration_layers_are_made_as_they_are_used() -> None:
    cache = qkv.QKVCache(None, "int8")
    assert cache.get_seq_length() == 0
    keys, _ = cache.update(torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16), 1)
    assert len(cache) == 2
    assert keys.shape == (1, 1, 3, 16)
