"""Equalized keys: where the vectors come from, how long they stay, and what they are good for."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from setups import SETUPS
from stores import (
    Pair,
    add,
    assert_equals,
    assert_same,
    config_of,
    decoded,
    exact_by_the_book,
    exact_tokens,
    filled,
    joined,
    kv,
    like,
    part,
    sizes,
    vectors,
)
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
)

from qkv.config import CacheConfig
from qkv.equalizer import WARM_UP_TOKENS as EQUALIZER_TOKENS
from qkv.equalizer import equalizing_vectors
from qkv.formats import get_format
from qkv.rotary import Rotary, rotary_of
from qkv.storage import LayerStore

EQUALIZED = [name for name in SETUPS if "equalized" in name]


def biased(n: int, batch: int = 2, seed: int = 0, dim: int = 64, value_dim: int = 8) -> Pair:
    """Keys of which a few channels are large in every token, as a bias makes them (case 1), and values."""
    keys, values = kv(n, batch=batch, key_dim=dim, value_dim=value_dim, seed=seed)
    generator = torch.Generator().manual_seed(1000)
    bias = torch.randn(2, 1, dim, generator=generator)
    bias[:, :, [3, 17, 40]] *= 200.0
    spread = torch.rand(2, 1, dim, generator=generator) + 0.5
    spread[:, :, [17, 50]] *= 20.0
    return keys * spread + bias, values


def key_error(store: LayerStore, keys: torch.Tensor) -> torch.Tensor:
    """The mean squared error of the stored keys, by channel ``[batch, heads, dim]`` relative to its variance."""
    found = torch.from_numpy(decoded(store)[0])
    return (found - keys).square().mean(dim=2) / keys.double().var(dim=2)


@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("setup", EQUALIZED)
def test_vectors_depend_on_the_first_128_tokens_after_the_sinks_alone(setup: str, sink: int) -> None:
    config = config_of(setup, sink_tokens=sink, residual_length=5)
    keys, values = kv(180, **sizes(setup))
    expected = oracle.equalizing_vectors(
        keys[:, :, sink : sink + EQUALIZER_TOKENS].double().numpy(), get_format(config.format).equalizing_power
    )
    changed = keys.clone()
    changed[:, :, :sink] = 1e5
    changed[:, :, sink + EQUALIZER_TOKENS :] *= -300.0
    for x in (keys, changed):
        for cuts in ([], [100], [sink + 127, sink + 128], list(range(120, 140))):
            store = LayerStore(config)
            for start, end in pairwise([0, *cuts, 180]):
                store.append(x[:, :, start:end], values[:, :, start:end])
            transform = store._transforms[0]
            np.testing.assert_array_equal(transform.centre.numpy(), expected[0])
            np.testing.assert_array_equal(transform.multiplier.numpy(), expected[1])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    dim=st.sampled_from([1, 2, 5, 16]),
    power=st.sampled_from([0.0, 0.6, 1.0]),
    what=st.sampled_from(["usual", "outlier", "still", "all still", "zero", "odd", "no number", "huge"]),
)
def test_vectors_equal_the_oracle_and_are_finite_and_positive(seed: int, dim: int, power: float, what: str) -> None:
    keys = kv(20, key_dim=dim, seed=seed)[0] + seed
    if what == "outlier":
        keys[..., 0] *= 500.0
    elif what == "still":
        keys[..., : dim // 2 + 1] = 3.0
    elif what == "all still":
        keys[:] = keys[:1, :, :1]
    elif what == "zero":
        keys.zero_()
    elif what == "odd":
        keys[0, 0, 3:9, 0], keys[1, 1, 5] = float("nan"), float("inf")
    elif what == "no number":
        keys[:, 0, :, 0] = float("nan")
    elif what == "huge":
        keys *= 1e33
    found = equalizing_vectors(keys, power)
    for x, expected in zip(found, oracle.equalizing_vectors(keys.double().numpy(), power), strict=True):
        assert x.dtype == torch.float32
        assert bool(x.isfinite().all())
        np.testing.assert_array_equal(x.numpy(), expected)
    assert bool((found[1] > 0).all())


def turned(n: int, biases: dict[int, float], theta: float = 1e4, dim: int = 32, seed: int = 0) -> torch.Tensor:
    """Keys ``[1, 2, n, dim]`` of a model with biases in some rotary pairs (channels d and d + dim / 2)."""
    keys = kv(n, batch=1, key_dim=dim, seed=seed)[0]
    half = dim // 2
    for pair, bias in biases.items():
        keys[..., pair] += bias
    angle = torch.arange(n).unsqueeze(1) * theta ** (-torch.arange(half) / half)
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    biases=st.dictionaries(st.integers(0, 15), st.floats(-400, 400), max_size=3),
    theta=st.sampled_from([1e2, 1e4, 1e6]),
    tokens=st.sampled_from([20, 31, 32, 100, 128]),
    interleaved=st.booleans(),
    odd=st.booleans(),
)
def test_vectors_with_rotary_pairs_equal_the_oracle(
    seed: int, biases: dict[int, float], theta: float, tokens: int, interleaved: bool, odd: bool
) -> None:
    keys = turned(tokens, biases, theta, seed=seed)
    pairs = Rotary(interleaved=interleaved).pairs(32, keys.device)
    if interleaved:
        keys = keys.unflatten(-1, (2, 16)).transpose(-1, -2).flatten(-2)
    if odd:
        keys[0, 1, 5, 3] = float("nan")
    # A quarter of fewer than eight tokens says nothing about speed.
    listed = list(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)) if tokens >= 32 else None
    expected = oracle.equalizing_vectors(keys.double().numpy(), 0.6, listed)
    for x, y in zip(equalizing_vectors(keys, 0.6, pairs), expected, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("pair", range(16))
def test_a_bias_that_positions_turn_does_not_coarsen_the_other_channels_later(pair: int, theta: float) -> None:
    """Case 1: the first tokens show an arc of what a turning bias does; later tokens lie outside of it.

    Of a bias that turns so slowly that 128 tokens hardly tell (1.85 times at the worst pair here), the rest is left.
    """
    keys = turned(1024, {pair: 100.0}, theta)
    values = torch.zeros(1, 2, 1024, 4)
    others = [d for d in range(32) if d % 16 != pair]
    store = LayerStore(CacheConfig("int8"), rotary=Rotary())
    store.append(keys, values)
    clean = LayerStore(CacheConfig("int8"), rotary=Rotary())
    clean.append(turned(1024, {}, theta), values)
    biased_error, error = (
        key_error(s, x)[..., others].mean().sqrt() for s, x in ((store, keys), (clean, turned(1024, {}, theta)))
    )
    assert biased_error < (2.0 if (pair, theta) == (11, 1e6) else 1.5) * error


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (LlamaConfig(), 0, Rotary()),
        (GPTNeoXConfig(), 0, Rotary(0.25)),
        (GPTJConfig(n_embd=64, n_head=2, rotary_dim=16), 0, Rotary(0.5, 0, True)),
        (CohereConfig(), 0, Rotary(interleaved=True)),
        (DeepseekV3Config(qk_nope_head_dim=8, qk_rope_head_dim=4), 0, Rotary(1.0, 8)),
        (Gemma3TextConfig(num_hidden_layers=6), 5, Rotary()),
        (GPT2Config(), 0, None),
        (None, 0, None),
    ],
    ids=lambda x: type(x).__name__ if hasattr(x, "to_dict") or x is None else "",
)
def test_how_channels_are_paired_is_read_from_the_configuration(config: Any, layer: int, expected: Any) -> None:
    if config is not None:
        import_module(type(config).__module__.replace("configuration_", "modeling_"))
    assert rotary_of(config, layer) == expected


def test_pairs_of_a_part_of_the_channels_and_of_a_part_behind_another() -> None:
    def listed(rotary: Rotary, dim: int) -> list[list[int]]:
        return [x.tolist() for x in rotary.pairs(dim, torch.device("cpu"))]

    assert listed(Rotary(), 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert listed(Rotary(0.5), 8) == [[0, 1], [2, 3]]
    assert listed(Rotary(1.0, 4), 8) == [[4, 5], [6, 7]]
    assert listed(Rotary(0.5, 0, True), 8) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4"])
def test_keys_with_a_few_large_channels_keep_the_others(name: str) -> None:
    """Case 1."""
    keys, values = biased(300)
    errors = [
        key_error(filled(CacheConfig(name, granularity="token", equalize=equalize), (keys, values)), keys)
        for equalize in (False, True)
    ]
    # The channels that are not large are of one size: what is lost of them is what counts.
    small = [d for d in range(64) if d not in (3, 17, 40, 50)]
    plain, equalized = (error[..., small].mean().item() for error in errors)
    # Numbers of 8 bits with an exponent need it least.
    gain, most = {"int8": (20, 1e-4), "fp8_e4m3": (2, 1e-3), "int4": (20, 0.05)}[name]
    assert equalized < plain / gain
    assert equalized < most


def test_int8_equalizes_keys_unless_told_otherwise_and_not_where_channels_have_scales_or_scales_are_given() -> None:
    pair = biased(200)
    scale = torch.ones(2)
    for config, given_scales, expected in (
        (CacheConfig("int8"), {}, True),
        (CacheConfig("int8", granularity="group"), {}, True),
        (CacheConfig("int8", granularity="head"), {}, True),
        (CacheConfig("int8", granularity="channel"), {}, False),
        (CacheConfig("int8", granularity="channel", equalize=True), {}, True),
        (CacheConfig("int8", equalize=False), {}, False),
        (CacheConfig("int8"), {"key_scale": scale}, False),
        (CacheConfig("int8"), {"value_scale": scale}, True),
        (CacheConfig("int8", key_format="fp8_e4m3"), {}, False),
        (CacheConfig("fp8_e4m3", key_format="int8"), {}, True),
        (CacheConfig("fp8_e4m3", equalize=True), {}, True),
        (CacheConfig("none", value_format="int8"), {}, False),
        (CacheConfig("int4"), {}, False),
        (CacheConfig("int4_rot"), {}, True),
        (CacheConfig("int4_rot", equalize=False), {}, False),
    ):
        store = filled(config, pair, **given_scales)
        transforms = store._transforms
        assert (transforms[0] is not None and transforms[0].multiplier is not None) == expected, config
        assert transforms[1] is None or transforms[1].multiplier is None
        assert store.warm == (EQUALIZER_TOKENS if expected else 0), config


@pytest.mark.parametrize("setup", ["int8 token equalized", "int8 head equalized", "int4_rot channel equalized"])
def test_after_a_crop_to_nothing_encoded_new_tokens_give_new_vectors(setup: str) -> None:
    config = config_of(setup, sink_tokens=4)
    pair, other = kv(200), tuple(5 * x + 3 for x in kv(200, seed=1))
    for keep, length in ((4, 200), (2, 200), (100, 120), (131, 131)):  # the last two while warming up
        store = filled(config, part(pair, 0, length))
        assert bool(vectors(store)) == (length > 131)
        store.crop(keep)
        assert store._transforms[0] is None or store._transforms[0].centre is None
        store.append(*other)
        assert_same(store, filled(config, joined(part(pair, 0, keep), other)))


def test_after_a_crop_that_leaves_encoded_tokens_the_vectors_stay() -> None:
    """They are what those tokens were encoded with."""
    store = filled(CacheConfig("int8"), biased(200))
    before = vectors(store)
    store.crop(50)
    assert exact_tokens(store) == [False] * 50
    more = tuple(-3 * x for x in biased(150, seed=1))
    store.append(*more)
    for x, y in zip(vectors(store), before, strict=True):
        assert torch.equal(x, y)
    assert exact_tokens(store) == [False] * 200


def test_after_reset_new_tokens_give_new_vectors() -> None:
    store = filled(CacheConfig("int8"), biased(200))
    before = vectors(store)
    store.reset()
    store.append(*kv(140, key_dim=64, value_dim=8, seed=1))
    assert not any(torch.equal(x, y) for x, y in zip(vectors(store), before, strict=True))
    assert_same(store, filled(CacheConfig("int8"), kv(140, key_dim=64, value_dim=8, seed=1)))


@pytest.mark.parametrize("which", ["both", "centre", "multiplier"])
@pytest.mark.parametrize("setup", ["int8 token equalized", "int8 channel equalized", "int3_rot group"])
def test_given_vectors_serve_from_the_first_token_on_and_survive_reset(setup: str, which: str) -> None:
    config = CacheConfig(**{**config_of(setup, sink_tokens=2).to_dict(), "equalize": None})
    pair = kv(40, **sizes(setup))
    dim = pair[0].shape[3]
    given_vectors = {"key_centre": torch.randn(2, dim), "key_multiplier": torch.rand(2, dim) + 0.5}
    if which != "both":
        given_vectors = {f"key_{which}": given_vectors[f"key_{which}"]}
    kept = {name: x.clone() for name, x in given_vectors.items()}
    store = filled(config, pair, **given_vectors)
    assert store.warm == 0
    assert exact_tokens(store) == exact_by_the_book(config, 40, warm=0)
    expected = like(config, **given_vectors)
    add(expected, pair)
    assert_equals(store, expected)
    store.reset()
    store.append(*pair)
    assert_equals(store, expected)
    assert all(torch.equal(x, given_vectors[name]) for name, x in kept.items())


def test_given_vectors_go_with_given_scales() -> None:
    pair = biased(40)
    given_tensors = {"key_scale": torch.tensor([0.05, 0.03]), "key_centre": pair[0].mean(dim=(0, 2))}
    store = filled(CacheConfig("int8"), pair, **given_tensors)
    expected = like(CacheConfig("int8", value_granularity="token"), **given_tensors)
    add(expected, pair)
    assert_equals(store, expected)


@pytest.mark.parametrize("name", ["key_centre", "key_multiplier"])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 5), (2, 6, 1)])
def test_given_vectors_of_a_wrong_shape_are_refused_and_nothing_is_stored(name: str, shape: tuple[int, ...]) -> None:
    store = LayerStore(CacheConfig("int8"), **{name: torch.ones(shape)})
    with pytest.raises(ValueError, match=rf"{name} must be \[kv_heads, head_dim\] = \[2, 6\], not"):
        store.append(*kv(5))
    assert (store.length, store.shape) == (0, None)


def test_rows_of_padding_get_good_vectors_from_the_others() -> None:
    """A batch of one long row, and of rows whose first 200 tokens are one constant vector."""
    keys, values = biased(400, batch=3, seed=3)
    keys[1:, :, :200] = keys[1:, :, 200:201]
    errors = key_error(filled(CacheConfig("int8"), (keys, values)), keys)
    for row in (1, 2):
        real = keys[row : row + 1, :, 200:], values[row : row + 1, :, 200:]
        alone = key_error(filled(CacheConfig("int8"), real), real[0])
        found = torch.from_numpy(decoded(filled(CacheConfig("int8"), (keys, values)))[0])[row : row + 1, :, 200:]
        padded = (found - real[0]).square().mean(dim=2) / real[0].double().var(dim=2)
        # Of numbers, not of their squares.
        assert padded.mean().sqrt() <= 1.5 * alone.mean().sqrt()
    assert bool(errors[0].isfinite().all())


def test_numbers_that_are_not_finite_among_the_first_do_not_count_for_the_vectors() -> None:
    keys, values = biased(200)
    spoilt = keys.clone()
    spoilt[0, 0, 3, 5], spoilt[1, 1, 100, 17], spoilt[0, 1, 50] = float("nan"), float("inf"), float("-inf")
    store = filled(CacheConfig("int8"), (spoilt, values))
    assert all(bool(x.isfinite().all()) for x in vectors(store))
    odd = ~torch.from_numpy(decoded(store)[0]).isfinite().all(dim=3)
    assert odd.nonzero().tolist() == [[0, 0, 3], [0, 1, 50], [1, 1, 100]]
    clean = key_error(filled(CacheConfig("int8"), (keys, values)), keys)
    found = torch.where(odd.unsqueeze(3), keys.double(), torch.from_numpy(decoded(store)[0]))
    error = (found - keys).square().mean(dim=2) / keys.double().var(dim=2)
    assert error.mean() <= 1.1 * clean.mean()
