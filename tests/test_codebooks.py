"""Code books: the nearest entry of a table, whatever the number; against bitsandbytes itself: test_bitsandbytes.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import qkv
from qkv.formats import get_format
from qkv.formats.base import Format
from qkv.formats.codebook import CodeBook
from qkv.planes import Plane, Scaling

NAMES = ["nf4", "nf4_rot", "fp4", "bnb8"]
each_book = pytest.mark.parametrize("name", NAMES)
each_table = pytest.mark.parametrize("name", ["nf4", "fp4", "bnb8"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
few = settings(max_examples=60, deadline=None)
many = settings(max_examples=200, deadline=None)


def book(name: str) -> Format:
    format = get_format(name)
    assert format is not None
    assert format.table is not None
    return format


def table(name: str) -> np.ndarray:
    return np.array(book(name).table, dtype=np.float32)


def vectors() -> st.SearchStrategy[np.ndarray]:
    """Arrays ``[n, dim]`` of float32 of any finite size: zeros, subnormals and 3e38 among them."""
    corners = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 3e38, -3.4028235e38, 1.0, -1.0, 65504.0])
    any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
    usual = st.floats(-8, 8, width=32)
    shape = array_shapes(min_dims=2, max_dims=2, max_side=17)
    return arrays(np.float32, shape, elements=st.one_of(usual, any_size, corners))


def cast(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    top = torch.finfo(dtype).max
    return torch.from_numpy(x).clamp(-top, top).to(dtype)


# ---- tables --------------------------------------------------------------------------------------------------------


@each_book
def test_a_table_has_a_number_for_each_code_a_zero_and_nothing_beyond_1(name: str) -> None:
    values = table(name)
    assert len(values) == 1 << book(name).bits
    assert np.abs(values).max() == book(name).largest == 1.0
    assert 0.0 in values
    # As Python knows them: the compiled kernels and torch round a table to the same float32.
    assert torch.tensor(book(name).table).tolist() == values.tolist()


def test_the_numbers_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA, appendix E: 8 quantiles of the negative half, 9 of the positive one, a shared zero, over the largest.

    The outermost quantile is as bitsandbytes chose it, the mean of 1 - 1/32 and 1 - 1/30.
    """
    from statistics import NormalDist

    outermost = ((1 - 1 / 32) + (1 - 1 / 30)) / 2
    upper = [NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    lower = [-NormalDist().inv_cdf(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    expected = np.array(sorted([*upper, 0.0, *lower]))
    np.testing.assert_allclose(table("nf4"), expected / expected.max(), atol=2e-6)


def test_the_numbers_of_bnb8_are_the_middles_of_equal_steps_in_each_decade() -> None:
    expected = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2**decade + 1) * 10.0 ** (decade - 6)
        middles = (edges[:-1] + edges[1:]) / 2
        expected += [*middles, *-middles]
    np.testing.assert_allclose(table("bnb8"), np.sort(expected), rtol=3e-7)


# ---- encoding ------------------------------------------------------------------------------------------------------


def nearest(name: str, x: np.ndarray) -> np.ndarray:
    """The place of the nearest number among the sorted ones, one by one; halfway, in float32, the lower one."""
    values = np.sort(table(name), kind="stable")
    places = []
    for number in x:
        above = (values[:-1] + values[1:]) / np.float32(2) < number
        places.append(int(above.sum()))
    return values[places]


@each_table
@many
@given(x=arrays(np.float32, 24, elements=st.floats(-1, 1, width=32)))
def test_a_number_gets_the_nearest_entry(name: str, x: np.ndarray) -> None:
    codes = book(name).round(torch.from_numpy(x))
    assert codes.dtype == torch.uint8
    found = table(name)[codes.numpy()]
    np.testing.assert_array_equal(found, nearest(name, x))
    wide = x.astype(np.float64)[:, None]
    distance = np.abs(wide - table(name).astype(np.float64)).min(axis=1)
    # A midpoint is a float32, half a unit in its last place off.
    np.testing.assert_allclose(np.abs(wide[:, 0] - found), distance, atol=2.0**-24)


@each_table
def test_numbers_around_every_midpoint_get_the_nearer_entry_and_ties_the_lower_one(name: str) -> None:
    values = np.unique(table(name))  # fp4 has two zeros
    middle = (values[:-1] + values[1:]) / np.float32(2)
    for x, expected in (
        (np.nextafter(middle, np.float32(-2)), values[:-1]),
        (middle, values[:-1]),
        (np.nextafter(middle, np.float32(2)), values[1:]),
    ):
        codes = book(name).round(torch.from_numpy(x))
        np.testing.assert_array_equal(table(name)[codes.numpy()], expected)


@each_table
def test_every_entry_is_encoded_as_itself(name: str) -> None:
    values = table(name)
    codes = book(name).round(torch.from_numpy(values))
    np.testing.assert_array_equal(values[codes.numpy()], values)
    if name != "fp4":
        assert codes.tolist() == list(range(len(values)))


@each_table
def test_every_number_of_bfloat16_gets_the_nearest_entry(name: str) -> None:
    """The look-up is by 16 bits of a float32: all that there are between -1 and 1."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.abs() <= 1]
    codes = book(name).round(x)
    np.testing.assert_array_equal(table(name)[codes.numpy()], nearest(name, x.numpy()))


def test_a_table_that_is_finer_than_the_look_up_is_refused() -> None:
    class Fine(CodeBook):
        name = "fine"
        bits = 4
        table = (-1.0, *(1 - i / 4096 for i in range(15)))

    with pytest.raises(ValueError, match=r"'fine': numbers of its table lie closer together than 1/128"):
        Fine().round(torch.zeros(3))


@each_book
@many
@given(x=vectors(), dtype=DTYPES)
def test_the_scale_is_the_largest_number_rounded_up_to_bfloat16(name: str, x: np.ndarray, dtype: torch.dtype) -> None:
    rows = cast(x, dtype)
    scale, offset = book(name).choose(rows)
    assert offset is None
    assert scale.dtype == torch.bfloat16
    for row, found in zip(rows.double().numpy(), scale.tolist(), strict=True):
        needed = max(float(np.abs(row).max()), oracle.SMALLEST_SCALE)
        assert found == min(oracle.bfloat16_up(needed), oracle.LARGEST_BFLOAT16)


@each_book
@many
@given(x=vectors())
def test_the_error_is_at_most_half_of_the_gap_around_a_number(name: str, x: np.ndarray) -> None:
    rows = torch.from_numpy(x)
    format = book(name)
    scale, _ = format.choose(rows)
    error = (format.decode(format.encode(rows, scale), scale, torch.float64) - rows).abs().numpy()
    values = np.unique(table(name)).astype(np.float64)
    wide = scale.double().numpy()[:, None]
    scaled = np.clip(rows.double().numpy() / wide, -1, 1)
    place = np.clip(np.searchsorted(values, scaled), 1, len(values) - 1)
    gap = np.where(scaled < values[0], 2 * (values[0] - scaled), values[place] - values[place - 1])
    # The quotient and the product are float32; above the largest bfloat16 numbers saturate.
    size = np.abs(rows.double().numpy())
    room = size * 2.0**-22 + wide * 2.0**-22 + np.where(size > oracle.LARGEST_BFLOAT16, size * 2.0**-8, 0)
    assert bool((error <= gap / 2 * wide + room).all())


@each_book
@few
@given(x=vectors(), dtype=DTYPES)
def test_any_finite_input_decodes_to_finite_numbers(name: str, x: np.ndarray, dtype: torch.dtype) -> None:
    rows, format = cast(x, dtype), book(name)
    scale, _ = format.choose(rows)
    assert bool(format.decode(format.encode(rows, scale), scale, dtype).isfinite().all())


@each_book
@few
@given(x=vectors())
def test_what_was_decoded_is_encoded_as_before(name: str, x: np.ndarray) -> None:
    rows, format = torch.from_numpy(x), book(name)
    scale, _ = format.choose(rows)
    decoded = format.decode(format.encode(rows, scale), scale, torch.float32)
    again = format.decode(format.encode(decoded, scale), scale, torch.float32)
    # Subnormal numbers have too few bits to say which entry they were.
    usual = rows.abs().amax(dim=-1) > 2.0**-100
    assert torch.equal(again[usual], decoded[usual])


@each_book
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-38])
def test_zeros_and_subnormal_numbers_get_a_scale_that_can_be_divided_by(name: str, size: float) -> None:
    format, rows = book(name), torch.full((1, 4), size)
    scale, _ = format.choose(rows)
    assert scale.item() == oracle.SMALLEST_SCALE
    decoded = format.decode(format.encode(rows, scale), scale, torch.float64)
    assert bool(((decoded - rows).abs() <= scale.item()).all())
    if size == 0:
        assert bool((decoded == 0).all())


@each_book
def test_a_table_is_made_once_and_serves_inside_and_outside_of_inference_mode(name: str) -> None:
    format, rows = book(name), torch.randn(3, 16)
    with torch.inference_mode():
        scale, _ = format.choose(rows)
        inside = format.decode(format.encode(rows, scale), scale, torch.float32)
    scale = scale.clone().requires_grad_()
    outside = format.decode(format.encode(rows, scale.detach()), scale, torch.float32)
    outside.sum().backward()
    assert torch.equal(inside, outside)


# ---- in a cache ----------------------------------------------------------------------------------------------------


@each_book
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_decodes_to_nan_and_other_tokens_are_untouched(name: str, odd: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 2, 5, 64)
    spoilt = rows.clone()
    spoilt[0, 1, 3, 20] = odd
    seen = []
    for x in (rows, spoilt):
        plane = Plane(x, 5, book(name), True, Scaling("group", 32))
        plane.write(0, x)
        seen.append(torch.empty_like(x))
        plane.decode_into(seen[-1], 0)
    clean, odd_one = seen
    assert bool(odd_one[0, 1, 3, :32].isnan().all())
    odd_one[0, 1, 3, :32] = clean[0, 1, 3, :32]
    assert torch.equal(odd_one, clean)


# Head size, what the cache is told, and bits per value: 4 or 8, and 16 for each scale.
STORED: list[tuple[str, int, dict[str, Any], float]] = [
    ("nf4", 64, {}, 4.25),
    ("nf4", 128, {}, 4.25),
    ("nf4", 80, {}, 5.0),  # groups of 16: the largest part of 64 that divides it
    ("nf4", 64, {"group_size": 32}, 4.5),
    ("nf4", 128, {"granularity": "token"}, 4.125),
    ("nf4", 64, {"granularity": "channel"}, 4.25),
    ("nf4_rot", 64, {}, 4.25),
    ("fp4", 64, {}, 4.25),
    ("bnb8", 64, {}, 8.25),
    ("bnb8", 128, {}, 8.125),
    ("bnb8", 128, {"granularity": "group"}, 8.25),
    ("bnb8", 64, {"granularity": "channel", "group_size": 16}, 9.0),
]


@pytest.mark.parametrize(("name", "dim", "way", "expected"), STORED, ids=str)
def test_bits_per_value_are_the_bytes_that_are_there(name: str, dim: int, way: dict[str, Any], expected: float) -> None:
    torch.manual_seed(0)
    cache = qkv.QKVCache(None, name, **way)
    cache.update(torch.randn(2, 3, 256, dim), torch.randn(2, 3, 256, dim), 0)
    stats = cache.stats()
    segments = cache.layers[0].store.packed
    assert sum(segment.length for segment in segments) == sum(segment.capacity for segment in segments) == 256
    planes = [plane for segment in segments for plane in segment.planes()]
    counted = sum(tensor.nbytes for plane in planes for tensor in plane.tensors())
    assert stats["bits_per_value"] == counted * 8 / (2 * 2 * 3 * 256 * dim) == expected


@pytest.mark.parametrize(("name", "dim", "way", "expected"), STORED, ids=str)
def test_it_does_not_matter_how_tokens_came(name: str, dim: int, way: dict[str, Any], expected: float) -> None:
    torch.manual_seed(1)
    pair = torch.randn(2, 3, 70, dim), torch.randn(2, 3, 70, dim)
    whole, pieces = (qkv.QKVCache(None, name, **way) for _ in range(2))
    whole.update(*pair, 0)
    for begin, end in [(0, 20), *((i, i + 1) for i in range(20, 70))]:
        pieces.update(*(x[:, :, begin:end] for x in pair), 0)
    for x, one, other in zip(pair, whole.view(0).decode(), pieces.view(0).decode(), strict=True):
        assert torch.equal(one, other)
        error = (one - x).norm() / x.norm()
        assert 0 < error < (0.02 if name == "bnb8" else 0.2)


@each_book
def test_a_scale_per_head_is_refused(name: str) -> None:
    first = "token, group, channel" if name == "bnb8" else "group, token, channel"
    with pytest.raises(ValueError, match=f"format '{name}' has no granularity 'head'; use one of {first}"):
        qkv.QKVCache(None, name, granularity="head")
