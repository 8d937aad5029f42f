"""Attention over data made to break it: huge and outlying numbers, and what is not finite."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from attending import (
    BACKENDS,
    SOME,
    Data,
    Shape,
    Wanted,
    assert_close,
    config_of,
    each_backend,
    each_of_some,
    each_setup,
    exact,
    random_data,
    rms,
    run,
    store_for,
    view_of,
)
from instruction_sets import INSTRUCTION_SETS, each_instruction_set
from setups import GROUP_TOKENS, SETUPS, format_of

from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView


def hard_data(kind: str, dtype: torch.dtype) -> tuple[Data, dict[str, Any]]:
    """Data of one kind for one query of three heads over 600 tokens, and further arguments of attention."""
    data = random_data(Shape(1, 2, 3, 1, 600, 64, 64), seed=len(kind))
    generator = torch.Generator().manual_seed(1)
    query, keys, values = data
    how: dict[str, Any] = {}
    if kind == "huge key channels":  # case 1: a bias of the key projection, as in Qwen2.5
        keys[..., 5] += 300.0
        keys[..., 40] -= 120.0
    elif kind == "huge key channels that differ by token":
        keys[..., 5] *= 200.0
        keys[..., 40] *= 50.0
    elif kind == "huge query channel":
        query[..., 7] *= 100.0
    elif kind == "huge query channel where keys are small":
        query[..., 7] *= 300.0
        keys[..., 7] /= 300.0
    elif kind == "huge channels of query and keys":
        query[..., 7] *= 100.0
        keys[..., 7] += 300.0
    elif kind == "value scales that vary by 1e4":
        values *= 10.0 ** (4 * torch.rand(*values.shape[:3], 1, generator=generator) - 2)
    elif kind == "key scales that vary by 1e4":
        keys *= 10.0 ** (4 * torch.rand(*keys.shape[:3], 1, generator=generator) - 3.5)
    elif kind == "a first token with nearly all the weight and a tiny value":
        keys[:, :, 0] = 4 * query.view(1, 2, 3, 64).mean(dim=2)
        query += 2 * keys[:, :, :1].repeat_interleave(3, dim=1) / 4
        values[:, :, 0] *= 1e-3
    elif kind == "a huge value without weight":
        values[:, :, 17] *= 1e4
        how["mask"] = torch.ones(1, 1, 1, 600, dtype=torch.bool)
        how["mask"][..., 17] = False
    elif kind == "a huge value with little weight":
        values[:, :, 17] *= 1e4
        keys[:, :, 17] = -1.5 * query.view(1, 2, 3, 64).mean(dim=2)
    elif kind == "very peaked":
        query *= 8.0
    elif kind == "very flat":
        query *= 1e-3
    elif kind == "a large softmax scale":
        how["softmax_scale"] = 20.0
    elif kind == "a small softmax scale":
        how["softmax_scale"] = 1e-6
    elif kind == "a negative softmax scale":
        how["softmax_scale"] = -0.3
    elif kind == "small numbers":
        query, keys, values = query * 1e-4, keys * 1e-4, values * 1e-4
        how["softmax_scale"] = 1e7
    elif kind == "tiny numbers":
        query, keys, values = query * 1e-15, keys * 1e-15, values * 1e-25
        how["softmax_scale"] = 1e29
    elif kind == "huge numbers":
        query, keys, values = query * 1e12, keys * 1e12, values * 1e30
        how["softmax_scale"] = 1e-25
    elif kind == "one channel alone":
        values[..., 1:] = 0.0
        keys[..., 1:] = 0.0
    elif kind == "equal tokens":
        keys, values = keys[:, :, :1].expand_as(keys), values[:, :, :1].expand_as(values)
    elif kind == "a group of huge key channels where the query is small":
        keys[..., 32:] *= 1e3
        query[..., 32:] /= 1e3
    elif kind == "a group of huge query channels where keys are small":
        query[..., 32:] *= 300.0
        keys[..., 32:] /= 300.0
    elif kind == "values of some tokens huge and with little weight":
        keys[:, :, 64:128] = 0.1 * keys[:, :, 64:128] - 1.5 * query.view(1, 2, 3, 64).mean(dim=2, keepdim=True)
        values[:, :, 64:128] *= 1e3
    elif kind == "value channels that vary by 1e4":
        values *= 10.0 ** (4 * torch.rand(64, generator=generator) - 2)
    elif kind == "values far from zero":
        values += 30.0 * torch.randn(64, generator=generator)
    elif kind == "scores that rise":
        keys += 0.1 * torch.arange(600).view(1, 1, -1, 1) * query.view(1, 2, 3, 64).mean(dim=2, keepdim=True) / 10
    return Data(query.to(dtype), keys.to(dtype).contiguous(), values.to(dtype).contiguous()), how


HARD = [
    "huge key channels",
    "huge key channels that differ by token",
    "huge query channel",
    "huge query channel where keys are small",
    "huge channels of query and keys",
    "value scales that vary by 1e4",
    "key scales that vary by 1e4",
    "a first token with nearly all the weight and a tiny value",
    "a huge value without weight",
    "a huge value with little weight",
    "very peaked",
    "very flat",
    "a large softmax scale",
    "a small softmax scale",
    "a negative softmax scale",
    "small numbers",
    "tiny numbers",
    "huge numbers",
    "one channel alone",
    "equal tokens",
    "a group of huge key channels where the query is small",
    "a group of huge query channels where keys are small",
    "values of some tokens huge and with little weight",
    "value channels that vary by 1e4",
    "values far from zero",
    "scores that rise",
]


@pytest.mark.parametrize("kind", HARD)
def test_on_hard_data_the_error_of_the_kernel_stays_far_below_that_of_quantization(kind: str) -> None:
    half = [pair for pair in enumerate(SETUPS) if pair[0] % 2 == HARD.index(kind) % 2]
    for index, name in [*half, (2, "int8 channel"), (0, "int4 group"), (1, "int4 channel")]:
        dtype = torch.float32 if (index + len(kind)) % 4 < 2 else torch.bfloat16
        data, how = hard_data(kind, dtype)
        wanted = Wanted(data, view_of(data, config_of(name, residual_length=index % 3 * 20)), hard=True, **how)
        for isa in INSTRUCTION_SETS:
            wanted.check(isa)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_on_hard_data_the_other_backends_equal_the_oracle_too(backend: str, kind: str) -> None:
    data, how = hard_data(kind, torch.float32)
    for options in ({"format": "none"}, *SOME):
        assert_close(backend, data, view_of(data, CacheConfig(**options)), hard=True, **how)


def with_huge_channels(factor: float) -> Data:
    """Keys of which two channels are huge in every token, as a large bias of the key projection makes them."""
    data = random_data(Shape(1, 2, 3, 1, 600, 64, 64))
    data.keys.mul_(4)
    data.keys[..., 5] += 150.0 * factor
    data.keys[..., 40] -= 100.0 * factor
    return data


def lost(data: Data, **options: Any) -> float:
    """The part of what attention says that storing keys and values changes."""
    store = LayerStore(CacheConfig(**options))
    store.append(data.keys, data.values)
    wanted = exact(*data)
    return rms(exact(data.query, *KVView(store).decode(torch.float64)) - wanted) / rms(wanted)


def test_int8_survives_keys_with_a_few_huge_constant_channels() -> None:
    """Case 1: with a scale per token and head not even half of what attention says is lost; equalized, a little."""
    assert lost(with_huge_channels(1), format="int8", equalize=False) < 0.5
    for factor in (0.0, 1.0, 1000.0):
        assert lost(with_huge_channels(factor), format="int8") < 0.03


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_scale_per_channel_and_zero_points_survive_keys_with_a_few_huge_constant_channels(bits: int) -> None:
    """Case 1: such keys lose as little as others do; with a scale per token or group they lose all that they say."""

    def with_keys(data: Data, **options: Any) -> float:
        return lost(data, format="none", key_format=f"int{bits}", **options)

    usual, huge = with_huge_channels(0.0), with_huge_channels(1.0)
    assert with_keys(huge, granularity="channel") < 2 * with_keys(usual, granularity="channel")
    assert with_keys(huge, granularity="channel") < 0.5 * with_keys(huge, granularity="token")
    assert with_keys(huge, equalize=True) < 2 * with_keys(usual, equalize=True)


# ---- not a number --------------------------------------------------------------------------------------------------


def spoilt_channels(view: KVView, options: dict[str, Any], channel: int, dim: int) -> set[int]:
    """The channels of a value that one channel that is not finite makes not-a-number."""
    format, scaling = format_of(options, "value"), view.store.scalings[1]
    assert format is not None
    assert scaling is not None

    def whole(channels: set[int], size: int) -> set[int]:
        return {first + i for first in {c // size * size for c in channels} for i in range(size)}

    # A rotation mixes the channels of its block, on the way in and on the way out.
    block = dim & -dim if format.rotated else 1
    size = {"group": scaling.group, "channel": 1}.get(scaling.granularity, dim)
    return whole(whole(whole({channel}, block), size), block)


@each_setup
def test_a_number_that_is_not_finite_shows_in_the_rows_that_attend_to_it_and_in_no_other(name: str) -> None:
    """A key in the whole row, a value in the channels that share its scale; per channel, all tokens of the group do."""
    shape, channel = Shape(2, 2, 3, 5, 80, 32, 96), 40
    chance = random.Random(name)
    for side, position, sink in itertools.product(("keys", "values"), (10, 78, 0), (0, 2)):
        odd = chance.choice([math.nan, math.inf, -math.inf])
        kind = chance.choice(["causal", "boolean", "additive", "lowest"])
        config = config_of(name, sink_tokens=sink)
        clean, data = random_data(shape), random_data(shape)
        getattr(data, side)[1, 0, position, channel if side == "values" else 3] = odd
        views = []
        for x in (clean, data):
            store = store_for(clean, config)
            store.append(x.keys, x.values)
            views.append(KVView(store))
        # Exact tokens stay as they are; of what is encoded together all or nothing is a number.
        kept = name == "none" or position < sink or position >= sink + store.packed_length
        together = GROUP_TOKENS if "channel" in name and not kept else 1
        start = position // together * together
        span = slice(max(start, sink if not kept else 0), start + together)
        seen = torch.ones(2, 1, 5, 80, dtype=torch.bool).tril(75)
        if kind != "causal":
            seen[:, :, 1] = False  # a row that sees nothing
            seen[:, :, 2, position] = False
            seen[:, :, 3, span] = False
        mask = {
            "causal": None,
            "boolean": seen,
            "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
            "lowest": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
        }[kind]
        attends = torch.zeros(2, 5, 6, dtype=torch.bool)
        attends[1, :, :3] = seen[1, 0, :, span].any(dim=-1).unsqueeze(1)
        # The same numbers, but for the order of summation; a scale per head may be smaller without the token.
        atol = 0.02 if "head" in name else 1e-5
        for backend in BACKENDS:
            expected, out = (run(backend, clean.query, view, mask=mask) for view in views)
            torch.testing.assert_close(out[~attends], expected[~attends], rtol=1e-5, atol=atol, msg=backend)
            if side == "values":
                shows = {channel} if kept else spoilt_channels(views[1], SETUPS[name], channel, 96)
                wanted = torch.tensor([c in shows for c in range(96)])
                assert torch.equal(~out[attends].isfinite(), wanted.expand(int(attends.sum()), 96)), backend
            elif math.isnan(odd) or not kept:
                assert bool(out[attends].isnan().all()), backend


@each_backend
@each_of_some
def test_a_query_that_is_not_finite_spoils_its_own_row_only(backend: str, options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 2, 2, 3, 50, 32, 32))
    view = view_of(data, CacheConfig(**options, residual_length=4))
    expected = run(backend, data.query, view)
    query = data.query.clone()
    query[0, 1, 2, 5] = float("nan")
    out = run(backend, query, view)
    assert bool(out[0, 2, 1].isnan().all())
    out[0, 2, 1] = expected[0, 2, 1]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@each_instruction_set
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_small_float8_codes_count_whether_or_not_the_program_flushes_subnormal_numbers(isa: str, format: str) -> None:
    """All codes but one are the format's own subnormal numbers, which the kernels hold as float32's."""
    data = random_data(Shape(1, 2, 2, 1, 40, 64, 64))
    largest = 448.0 if format == "fp8_e4m3" else 57344.0
    for x in (data.keys, data.values):
        x.sign_().mul_(6 * 2.0**-9 if format == "fp8_e4m3" else 3 * 2.0**-16)
        x[..., 5] = largest
    data.query[..., 5] = 0.0
    view = view_of(data, CacheConfig(format=format, equalize=False))
    how = {"softmax_scale": 1 / float(data.keys[..., 0].abs().max())}
    wanted = run(isa, data.query, view, **how)
    exact = run("reference", data.query, view, **how)
    small = exact[..., 6:]
    torch.testing.assert_close(wanted[..., 6:], small, rtol=1e-4, atol=1e-4 * float(small.abs().max()))
    torch.set_flush_denormal(True)
    try:
        out = run(isa, data.query, view, **how)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out, wanted)
    assert bool(out[..., 6:].abs().max() > 0)
