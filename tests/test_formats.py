"""Number formats: what they promise for any input, and that the compiled codec does the same, bit for bit."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from instruction_sets import INSTRUCTION_SETS, each_instruction_set, needs_kernels, using

from qkv.formats import Format, formats, get_format, register
from qkv.formats.base import SMALLEST_SCALE, round_up_to_bfloat16
from qkv.formats.scale_types import BFLOAT16, E4M3_SCALE, E8M0_SCALE, UE5M3_SCALE, ScaleType
from qkv.planes import Plane, Scaling
from qkv.transform import Transform, rotation_signs

QUANTIZED = [name for name in formats() if name != "none"]
SYMMETRIC = list(oracle.SYMMETRIC)
AFFINE = [name for name in QUANTIZED if get_format(name).offset == "zero_point"]
PER_HEAD = [name for name in QUANTIZED if "head" in get_format(name).granularities]
PLANES = [(name, granularity) for name in QUANTIZED for granularity in get_format(name).granularities]
each_format = pytest.mark.parametrize("name", QUANTIZED)
each_symmetric = pytest.mark.parametrize("name", SYMMETRIC)


def each_plane(which: Callable[[Format, str], bool]) -> pytest.MarkDecorator:
    """Each format with each of its granularities, as far as they are asked for."""
    found = [(name, granularity) for name, granularity in PLANES if which(get_format(name), granularity)]
    return pytest.mark.parametrize(("name", "granularity"), found, ids=[" ".join(pair) for pair in found])


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
DTYPES = st.sampled_from(FLOATS)
NORMAL = 2.0**-126  # the smallest normal float32

few = settings(max_examples=40, deadline=None)
many = settings(max_examples=100, deadline=None)


def finite(shape: st.SearchStrategy | tuple[int, ...] | None = None) -> st.SearchStrategy[np.ndarray]:
    """Arrays ``[tokens, dim]`` of float32 of any finite size: zeros, subnormals and 3e38 among them."""
    shape = shape if shape is not None else array_shapes(min_dims=2, max_dims=2, max_side=17)
    corners = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 3e38, -3.4028235e38, 1.0, 65504.0])
    any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
    usual = st.floats(-8, 8, width=32)
    return arrays(np.float32, shape, elements=st.one_of(usual, any_size, corners))


def cast(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """``[1, 1, tokens, dim]`` of another type, held within its range."""
    top = torch.finfo(dtype).max
    return torch.from_numpy(x).clamp(-top, top).to(dtype)[None, None]


def sharing(name: str, granularity: str | None, dim: int, group: int | None = None) -> Scaling | None:
    """What shares a scale, with groups as small as they can be; None: the head size does not go with the format."""
    format = get_format(name)
    granularity = granularity or format.granularities[0]
    if granularity == "group" and format.block is not None and dim % format.block:
        return None
    if granularity == "channel":
        group = group or 16
    elif granularity == "group" and format.block is None:
        group = group or (16 if dim % 16 == 0 else dim)
    return Scaling.of(format, granularity, group, dim, "key")


def stored(
    x: torch.Tensor,
    name: str,
    is_key: bool = True,
    scale: torch.Tensor | None = None,
    offset: int = 0,
    scaling: Scaling | None = None,
    transform: Transform | None = None,
) -> Plane:
    """A plane that holds ``x [batch, heads, tokens, dim]`` from its token ``offset`` on; one scale for each token."""
    if scaling is None:
        whole = Scaling("token") if "token" in get_format(name).granularities else Scaling("group", x.shape[3])
        scaling = whole if scale is None else Scaling("head")
    plane = Plane(x, offset + x.shape[2], get_format(name), is_key, scaling, scale, transform)
    plane.write(offset, x)
    return plane


def decoded(plane: Plane, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
    out = torch.empty_like(like)
    plane.decode_into(out, offset)
    return out


# ---- the definition, against the oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_float8_code_decodes_to_the_number_of_the_ocp_specification(name: str) -> None:
    values = oracle.fp8_values(name)
    codes = torch.arange(len(values), dtype=torch.uint8).view(get_format(name).code_dtype)
    assert codes.float().tolist() == values
    assert max(values) == oracle.LARGEST[name] == get_format(name).largest


@many
@given(x=finite(), dtype=DTYPES)
def test_scales_and_codes_equal_the_oracle_for_any_finite_input(x: np.ndarray, dtype: torch.dtype) -> None:
    rows = cast(x, dtype)
    for name in SYMMETRIC:
        note(name)
        format = get_format(name)
        scale = format.choose_scale(rows)
        codes = format.encode(rows, scale)
        numbers = format.decode(codes, scale, torch.float64)[0, 0].numpy()
        for t, row in enumerate(rows[0, 0].double().numpy()):
            expected = oracle.token_scale(row, name)
            assert scale[0, 0, t].item() == expected
            bytes_ = oracle.encode(row, expected, name)
            np.testing.assert_array_equal(codes.view(torch.uint8)[0, 0, t].numpy(), bytes_)
            np.testing.assert_array_equal(numbers[t], oracle.decode(bytes_, expected, name))


def spread(dim: int | None = None) -> st.SearchStrategy[np.ndarray]:
    """Arrays ``[tokens, dim]`` of float32 of one size, from 1e-7 to 1e5, and of any distance from zero."""
    shape = array_shapes(min_dims=2, max_dims=2, max_side=17) if dim is None else (4, dim)
    return st.builds(
        lambda x, distance, exponent: ((x + np.float32(distance)) * np.float32(10.0**exponent)).astype(np.float32),
        arrays(np.float32, shape, elements=st.floats(-1, 1, width=32)),
        st.sampled_from([0.0, 0.0, 0.5, -1.0, 1.0, 3.0, -10.0, 100.0, -1000.0]),
        st.integers(-7, 5),
    )


@many
@given(x=st.one_of(finite(), spread(), spread()), dtype=DTYPES)
def test_scales_zero_points_and_codes_equal_the_oracle_for_any_finite_input(x: np.ndarray, dtype: torch.dtype) -> None:
    rows = cast(x, dtype)
    for name in (name for name in AFFINE if not get_format(name).rotated):
        note(name)
        format, bits = get_format(name), oracle.AFFINE_BITS[name]
        scale, zero_point = format.choose(rows)
        codes = format.encode(rows, scale, zero_point)
        numbers = format.decode(codes, scale, torch.float64, zero_point)[0, 0].numpy()
        assert (scale.dtype, zero_point.dtype, codes.dtype) == (torch.uint8, torch.int8, torch.uint8)
        wide = format.load_scale(scale)
        for t, row in enumerate(rows[0, 0].double().numpy()):
            expected = oracle.affine_scale(row, bits)
            assert (wide[0, 0, t].item(), zero_point[0, 0, t].item()) == expected
            bytes_ = oracle.affine_encode(row, *expected, bits)
            np.testing.assert_array_equal(codes[0, 0, t].numpy(), bytes_)
            np.testing.assert_array_equal(numbers[t], oracle.affine_decode(bytes_, *expected))


def test_the_oracle_knows_every_format_with_a_zero_point_and_every_symmetric_one() -> None:
    """Of the others, code books and block formats, test_codebooks.py and test_mx.py have their own."""
    others = {name for name in QUANTIZED if get_format(name).table is not None}
    assert set(QUANTIZED) - others == set(oracle.FORMATS)
    for name in oracle.FORMATS:
        assert get_format(name).rotated == oracle.rotated(name)


@each_symmetric
def test_numbers_halfway_between_two_codes_go_to_the_even_code(name: str) -> None:
    format = get_format(name)
    values = [float(v) for v in range(128)] if name == "int8" else oracle.fp8_values(name)
    halfway = torch.tensor([(a + b) / 2 for a, b in pairwise(values)])
    codes = format.encode(halfway[None, None, None], torch.ones(1, 1, 1)).view(torch.uint8).flatten()
    expected = [code + code % 2 for code in range(len(halfway))]  # of the codes `code` and `code + 1`, the even one
    assert codes.tolist() == expected


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("zero_point", [-127, -3, 0, 2, 127])
def test_numbers_halfway_between_two_steps_go_to_the_even_number_of_steps(name: str, zero_point: int) -> None:
    format = get_format(name)
    scale = UE5M3_SCALE.store(torch.tensor([0.25]))
    steps = torch.arange(2**format.bits - 1) + zero_point
    codes = format.encode(((steps + 0.5) * 0.25)[None], scale, torch.tensor([zero_point], dtype=torch.int8))
    assert (codes[0].long() + zero_point).tolist() == (steps + steps % 2).tolist()


# ---- scales --------------------------------------------------------------------------------------------------------


@many
@given(x=st.floats(0, 1.75 * 2.0**127, width=32))
def test_rounding_up_to_bfloat16_gives_the_smallest_one_that_is_not_below(x: float) -> None:
    assert round_up_to_bfloat16(torch.tensor([x])).item() == oracle.bfloat16_up(x)


def between(type: ScaleType) -> st.SearchStrategy[float]:
    """Scales that the type can be asked for, those between two of its own among them."""
    return st.floats(type.smallest, type.largest, width=32) | st.builds(
        lambda exponent, part: min(max(2.0**exponent * (1 + part / 32), type.smallest), type.largest),
        st.integers(-20, 11),
        st.integers(0, 31),
    )


@many
@given(x=between(UE5M3_SCALE))
def test_a_scale_of_one_byte_is_the_smallest_that_is_not_below_and_at_most_an_eighth_above(x: float) -> None:
    found = UE5M3_SCALE.load(UE5M3_SCALE.store(torch.tensor([x]))).item()
    assert found == oracle.ue5m3_up(x)
    assert x <= found <= x * (1 + 2.0**-3)


@many
@given(x=between(E8M0_SCALE))
def test_a_power_of_two_is_the_largest_that_is_not_above(x: float) -> None:
    found = E8M0_SCALE.load(E8M0_SCALE.store(torch.tensor([x]))).item()
    assert found <= x < 2 * found
    assert np.frexp(found)[0] == 0.5


@many
@given(x=between(E4M3_SCALE))
def test_a_scale_of_e4m3_is_the_nearest_one(x: float) -> None:
    found = E4M3_SCALE.load(E4M3_SCALE.store(torch.tensor([x]))).item()
    assert abs(found - x) == min(abs(value - x) for value in oracle.fp8_values("fp8_e4m3"))


ONE_BYTE = {
    "ue5m3": (UE5M3_SCALE, oracle.UE5M3),
    "e8m0": (E8M0_SCALE, [2.0 ** (code - 127) for code in range(255)]),
    "e4m3": (E4M3_SCALE, oracle.fp8_values("fp8_e4m3")),
}


@pytest.mark.parametrize("name", ONE_BYTE)
def test_every_code_of_a_scale_stands_for_its_number_and_is_what_that_number_is_stored_as(name: str) -> None:
    type, values = ONE_BYTE[name]
    codes = torch.arange(256, dtype=torch.uint8)[: len(values) + 1]  # e4m3: no scale is negative
    found = type.load(codes)
    assert found.dtype == torch.float32
    assert found[:-1].tolist() == values
    assert bool(found[-1].isnan())
    assert torch.equal(type.store(found), codes)
    assert (found[0].item(), found[-2].item()) == (type.smallest, type.largest)
    assert type.bits == 8


def test_every_scale_that_is_a_bfloat16_is_stored_as_itself() -> None:
    scales = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(BFLOAT16.store(BFLOAT16.load(scales)), scales)
    assert BFLOAT16.bits == 16


@pytest.mark.parametrize("type", [BFLOAT16, UE5M3_SCALE, E8M0_SCALE, E4M3_SCALE], ids=lambda type: type.name)
def test_a_nan_of_any_pattern_is_stored_as_the_same_nan(type: ScaleType) -> None:
    patterns = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000 - 2**32, -1, 0xFF800001 - 2**32]
    stored_as = type.store(torch.tensor(patterns, dtype=torch.int32).view(torch.float32))
    assert bool(type.load(stored_as).isnan().all())
    if type is not E4M3_SCALE:  # torch keeps the sign of a NaN in float8
        assert len(set(bits(stored_as).tolist())) == 1


# ---- bounds --------------------------------------------------------------------------------------------------------


@many
@given(x=finite(), dtype=DTYPES)
def test_scale_is_at_least_what_the_largest_number_needs_and_at_most_a_128th_above(
    x: np.ndarray, dtype: torch.dtype
) -> None:
    rows = cast(x, dtype)
    amax = rows.double().abs().amax(dim=-1)
    # Above this the scale is held down so that the largest code does not decode to infinity.
    assume(bool((amax <= 0.99 * oracle.LARGEST_BFLOAT16).all()))
    for name in SYMMETRIC:
        note(name)
        format = get_format(name)
        scale = format.choose_scale(rows).double()
        needed = amax / format.largest
        # The quotient is a float32: it may lie half a unit in its last place, 2^-24, below the true one.
        assert bool((scale >= needed * (1 - 2.0**-24)).all())
        assert bool((scale <= torch.clamp(needed * (1 + 2.0**-7), min=SMALLEST_SCALE)).all())
        assert bool((scale > 0).all())


@many
@given(x=finite())
def test_error_is_at_most_half_a_step(x: np.ndarray) -> None:
    rows = cast(x, torch.float32)
    size = rows.double().abs()
    for name in SYMMETRIC:
        note(name)
        format = get_format(name)
        scale = format.choose_scale(rows)
        error = (format.decode(format.encode(rows, scale), scale, torch.float64) - rows).abs()
        wide = scale.double().unsqueeze(-1)
        if name == "int8":
            half_step = wide.expand_as(rows) / 2
        else:
            # Half of the distance of neighbouring codes: relative to the number, or that of subnormal codes near zero.
            mantissa, least = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}[name]
            half_step = torch.maximum(size * 2.0 ** -(mantissa + 1), wide * 2.0 ** (least - mantissa - 1))
        # Above 99% of the largest bfloat16 the scale is held down, by at most 2^-7 of the number.
        half_step = torch.where(size > 0.99 * oracle.LARGEST_BFLOAT16, size * 2.0**-6 + half_step, half_step)
        # The division before rounding is a float32: 2^-24 of the number on top.
        assert bool((error <= half_step * (1 + 2.0**-20) + size * 2.0**-23).all())


@many
@given(x=st.one_of(spread(), finite()), dtype=DTYPES)
def test_with_a_zero_point_the_step_is_what_the_range_or_the_low_end_needs_and_the_error_half_of_it(
    x: np.ndarray, dtype: torch.dtype
) -> None:
    rows = cast(x, dtype)
    wide = rows.double()
    low, high = wide.amin(dim=-1), wide.amax(dim=-1)
    for name in AFFINE:
        note(name)
        format = get_format(name)
        scale, zero_point = format.choose(rows)
        step = format.load_scale(scale).double()
        needed = torch.maximum((high - low) / (2**format.bits - 1), low.abs() / 127)
        within = needed <= UE5M3_SCALE.largest  # beyond that, numbers saturate
        # Differences and quotients are float32.
        assert bool((step >= needed * (1 - 2.0**-22))[within].all())
        limit = torch.clamp(needed * (1 + 2.0**-3), min=UE5M3_SCALE.smallest)
        assert bool((step <= limit * (1 + 2.0**-22)).all())
        numbers = format.decode(format.encode(rows, scale, zero_point), scale, torch.float64, zero_point)
        assert bool(numbers.isfinite().all())
        bound = step.unsqueeze(-1) / 2 * (1 + 2.0**-20) + wide.abs() * 2.0**-22
        assert bool(((numbers - wide).abs() <= bound)[within].all())


@pytest.mark.parametrize("name", AFFINE)
@each_dtype
def test_a_constant_vector_comes_back_within_a_225th(name: str, dtype: torch.dtype) -> None:
    """Its step is 1/127 of it, or up to an eighth more; half of that is the error."""
    format = get_format(name)
    for value in (0.0, 1.0, -1.0, 0.37, -300.0, 60000.0):
        rows = torch.full((1, 1, 1, 7), value, dtype=dtype)
        scale, zero_point = format.choose(rows)
        numbers = format.decode(format.encode(rows, scale, zero_point), scale, torch.float64, zero_point)
        assert len(set(numbers.flatten().tolist())) == 1
        assert numbers[0, 0, 0, 0].item() == pytest.approx(rows[0, 0, 0, 0].item(), rel=1 / 225, abs=0)


@few
@given(x=finite(), dtype=DTYPES)
def test_any_finite_input_decodes_to_finite_numbers(x: np.ndarray, dtype: torch.dtype) -> None:
    rows = cast(x, dtype)
    for name in QUANTIZED:
        note(name)
        format = get_format(name)
        scale, offset = format.choose(rows)
        assert bool(format.decode(format.encode(rows, scale, offset), scale, dtype, offset).isfinite().all())
        if INSTRUCTION_SETS:
            assert bool(decoded(stored(rows, name), rows).isfinite().all())


@pytest.mark.parametrize("name", [name for name in QUANTIZED if get_format(name).scale_type is BFLOAT16])
@each_dtype
def test_the_largest_number_of_each_type_decodes_to_itself_within_a_step(name: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    rows = torch.full((1, 1, 1, 5), top, dtype=dtype)
    assert decoded(stored(rows, name), rows).flatten().double().tolist() == pytest.approx([top] * 5, rel=2.0**-6)


@each_format
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-38], ids=str)
def test_vectors_of_zeros_and_subnormal_numbers_come_back_as_zeros_or_almost(name: str, size: float) -> None:
    format, rows = get_format(name), torch.full((1, 1, 1, 4), size)
    scale, offset = format.choose(rows)
    step = format.load_scale(scale).item()
    assert step >= 0.0
    if format.block is None:  # these have the scales that their specifications say
        assert step >= NORMAL
    numbers = format.decode(format.encode(rows, scale, offset), scale, torch.float64, offset)
    assert bool(((numbers - rows).abs() <= max(step / 2, rows.max().item())).all())
    if size == 0.0:
        assert not bool(numbers.any())


@few
@given(x=st.one_of(finite(shape=(1, 64)), spread(64).map(lambda x: x[:1])))
def test_decoded_numbers_are_in_the_order_of_what_was_encoded(x: np.ndarray) -> None:
    rows = torch.from_numpy(np.sort(x))[None, None]
    for name in QUANTIZED:
        note(name)
        format = get_format(name)
        scale, offset = format.choose(rows)
        values = format.decode(format.encode(rows, scale, offset), scale, torch.float64, offset).flatten()
        assert bool((values[1:] >= values[:-1]).all())


@few
@given(x=finite(), exponent=st.integers(-120, 0))
def test_numbers_beyond_a_given_scale_saturate_and_keep_their_sign(x: np.ndarray, exponent: int) -> None:
    rows = cast(x, torch.float32)
    scale = torch.full((1, 1, 1), 2.0**exponent)
    for name in PER_HEAD:
        note(name)
        format = get_format(name)
        numbers = format.decode(format.encode(rows, scale), scale, torch.float64)
        limit = format.largest * 2.0**exponent
        beyond = rows.double().abs() > limit
        assert bool(numbers.isfinite().all())
        assert torch.equal(numbers[beyond], torch.sign(rows.double()[beyond]) * limit)


# ---- not a number --------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_gets_the_scale_nan_and_codes_as_zeros_do(name: str, odd: float) -> None:
    format = get_format(name)
    rows = torch.zeros(3, 16)
    zero = format.encode(rows, *format.choose(rows))
    rows[1] = torch.randn(16)
    rows[1, 5] = odd
    scale, offset = format.choose(rows)
    assert format.load_scale(scale).isnan().tolist() == [False, True, False]
    codes = format.encode(rows, scale, offset)
    assert torch.equal(codes.view(torch.uint8), zero.view(torch.uint8))
    numbers = format.decode(codes, scale, torch.float32, offset)
    assert numbers.isnan().all(dim=-1).tolist() == [False, True, False]


@each_plane(lambda format, granularity: granularity != "head")  # that scale is chosen elsewhere, see head_scale.py
def test_a_nan_or_infinity_spoils_what_shares_its_scale_and_nothing_else(name: str, granularity: str) -> None:
    scaling = sharing(name, granularity, 64)
    rows = torch.randn(1, 2, 48, 64, generator=torch.Generator().manual_seed(1))
    spoilt = torch.zeros(1, 2, 48, 64, dtype=torch.bool)
    group = (
        slice(37 // scaling.group * scaling.group, (37 // scaling.group + 1) * scaling.group) if scaling.group else 0
    )
    spoilt[0, 1][{"token": (20,), "group": (20, group), "channel": (slice(16, 32), 37)}[granularity]] = True
    for isa in [*INSTRUCTION_SETS, "none"]:
        for odd in (float("nan"), float("-inf")):
            odd_rows = rows.clone()
            odd_rows[0, 1, 20, 37] = odd
            for is_key in (True, False):
                with using(isa):
                    clean = decoded(stored(rows, name, is_key, scaling=scaling), rows)
                    seen = decoded(stored(odd_rows, name, is_key, scaling=scaling), rows)
                assert torch.equal(seen.isnan(), spoilt), isa
                assert torch.equal(seen[~spoilt], clean[~spoilt]), isa


# ---- the compiled codec --------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, in which a NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def varied(tokens: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows ``[2, 2, tokens, dim]`` whose size and distance from zero change from place to place; some are not finite.

    From subnormal to nearly infinite in the first row of the batch, of everyday sizes in the second.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = (2, 2, -(-tokens // 4), -(-dim // 8))
    size = torch.cat(
        [torch.randint(low, high, (1, *blocks[1:]), generator=generator) for low, high in ((-44, 38), (-3, 3))]
    )
    distance = torch.randn(blocks, generator=generator) * torch.randint(0, 5, blocks, generator=generator) ** 3
    size, distance = (
        x.repeat_interleave(4, dim=2).repeat_interleave(8, dim=3)[:, :, :tokens, :dim] for x in (size, distance)
    )
    rows = (torch.randn(2, 2, tokens, dim, generator=generator).double() + distance) * 10.0 ** size.double()
    top = torch.finfo(dtype).max
    rows = rows.clamp(-top, top).to(dtype)
    rows[0, 1, 5, 0], rows[1, 0, tokens - 1, dim - 1] = float("nan"), float("-inf")
    return rows


def assert_same_planes(found: Plane, expected: Plane, where: str) -> None:
    for x, y in zip(found.tensors(), expected.tensors(), strict=True):
        assert torch.equal(bits(x), bits(y)), where


def in_parts(plane: Plane, offset: int, rows: torch.Tensor) -> list[torch.Tensor]:
    """What the tokens decode to: all of them in the type that they came in, and some in the middle in another one."""
    other = FLOATS[(FLOATS.index(rows.dtype) + 1) % 3]
    return [decoded(plane, rows, offset), decoded(plane, rows[:, :, 3:-5].to(other), offset + 3)]


def assert_same_numbers(found: list[torch.Tensor], expected: list[torch.Tensor], where: str) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan()), where
        assert torch.equal(*(bits(x.nan_to_num(0.0, torch.inf, -torch.inf)) for x in (x, y))), where


DIMS = (1, 7, 8, 24, 64, 80, 96, 128)


@needs_kernels
@each_plane(lambda format, granularity: not format.rotated)  # without their rotation they are as those
def test_compiled_codec_equals_the_python_format_bit_for_bit(name: str, granularity: str) -> None:
    tokens, places = (48, (0, 32)) if granularity == "channel" else (37, (0, 5))
    scale = torch.tensor([[1e-30, 0.01], [0.02, 3.0]]) if granularity == "head" else None
    for (i, dim), (j, dtype) in itertools.product(enumerate(DIMS), enumerate(FLOATS)):
        scaling = sharing(name, granularity, dim)
        if scaling is None:
            continue  # a format with blocks that do not divide this head size
        is_key, offset = (i + j) % 2 == 0, places[(i + j) // 2 % 2]
        rows = varied(tokens, dim, dtype, seed=dim + j)
        if scale is not None:
            rows = rows.nan_to_num(0.0)  # the store gives such tokens a scale of NaN
        with using("none"):
            expected = stored(rows, name, is_key, scale, offset, scaling)
            numbers = in_parts(expected, offset, rows)
        for isa in INSTRUCTION_SETS:
            where = f"{isa} {dtype} {dim} {'keys' if is_key else 'values'} from {offset} on"
            with using(isa):
                found = stored(rows, name, is_key, scale, offset, scaling)
                assert_same_planes(found, expected, where)
                assert_same_numbers(in_parts(found, offset, rows), numbers, where)


def transform_of(dim: int, rotated: bool, way: str) -> Transform:
    """The way of the keys of two heads, or of the values: rotated, centred, or equalized, the latter rotated or not."""
    generator = torch.Generator().manual_seed(dim)
    centre = 3 * torch.randn(2, dim, generator=generator)
    multiplier = (2 * torch.randn(2, dim, generator=generator)).exp()
    signs = rotation_signs(dim) if rotated else None
    vectors = {"rotated": (), "centred": (centre,), "equalized": (centre, multiplier)}[way]
    return Transform(signs, *vectors)


@needs_kernels
@each_plane(lambda format, granularity: True)
def test_compiled_codec_equals_the_python_format_also_behind_a_transform(name: str, granularity: str) -> None:
    tokens, offset = (48, 16) if granularity == "channel" else (37, 5)
    scale = torch.tensor([[1e-3, 0.01], [0.02, 3.0]]) if granularity == "head" else None
    rotated = get_format(name).rotated
    for i, dim in enumerate((1, 8, 24, 64, 80, 96, 128)):
        scaling = sharing(name, granularity, dim)
        if scaling is None:
            continue
        dtype, way = FLOATS[i % 3], ("equalized", "rotated" if rotated else "centred")[i % 2]
        transform = transform_of(dim, rotated, way)
        for is_key in (True, False) if way == "rotated" else (True,):
            rows = varied(tokens, dim, dtype, seed=dim)
            rows = rows.nan_to_num(0.0).clamp(-6e4, 6e4) if scale is not None else rows
            with using("none"):
                expected = stored(rows, name, is_key, scale, offset, scaling, transform)
                numbers = in_parts(expected, offset, rows)
            for isa in INSTRUCTION_SETS:
                where = f"{isa} {dtype} {dim} {way}"
                with using(isa):
                    found = stored(rows, name, is_key, scale, offset, scaling, transform)
                    assert_same_planes(found, expected, where)
                    assert_same_numbers(in_parts(found, offset, rows), numbers, where)


@needs_kernels
@many
@given(x=finite(), dtype=DTYPES, scale=st.floats(NORMAL, 2.0**100, width=32), is_key=st.booleans())
def test_compiled_codec_under_a_scale_per_head_equals_the_python_format_bit_for_bit(
    x: np.ndarray, dtype: torch.dtype, scale: float, is_key: bool
) -> None:
    rows = cast(x, dtype)
    given_scale = torch.tensor([[scale]])
    for name in PER_HEAD:
        planes, numbers = [], []
        for isa in ("none", *INSTRUCTION_SETS):
            with using(isa):
                planes.append(stored(rows, name, is_key, given_scale))
                numbers.append(decoded(planes[-1], rows))
            assert torch.equal(planes[0].codes, planes[-1].codes), f"{name} {isa}"
            assert torch.equal(bits(numbers[0]), bits(numbers[-1])), f"{name} {isa}"


@each_instruction_set
@each_format
def test_compiled_codec_takes_strided_rows(isa: str, name: str) -> None:
    torch.manual_seed(2)
    wide = torch.randn(2, 20, 3, 24)  # [batch, tokens, heads, ..]: as a projection gives them
    sliced = wide.transpose(1, 2)[..., :8]
    every_third = wide.transpose(1, 2)[..., ::3]
    for rows in (sliced, every_third):
        with using(isa):
            assert torch.equal(stored(rows, name).codes, stored(rows.contiguous(), name).codes)


@each_instruction_set
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "granularity"), [("int8", "token"), ("int4", "group"), ("int3", "channel"), ("int4_rot", "group")]
)
@pytest.mark.usefixtures("keep_threads")
def test_codes_do_not_depend_on_the_number_of_threads(isa: str, threads: int, name: str, granularity: str) -> None:
    torch.manual_seed(3)
    rows = torch.randn(2, 3, 336, 40)
    way: dict[str, Any] = {
        "scaling": sharing(name, granularity, 40),
        "transform": Transform(rotation_signs(40)) if get_format(name).rotated else None,
    }
    with using("none"):
        expected = stored(rows, name, **way)
    torch.set_num_threads(threads)
    with using(isa):
        assert_same_planes(stored(rows, name, **way), expected, isa)


# ---- the table of names --------------------------------------------------------------------------------------------


def test_an_unknown_format_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'int9'.*none, int8, fp8_e4m3, fp8_e5m2, int2, int3"):
        get_format("int9")


def test_none_is_the_first_name_and_stands_for_no_format() -> None:
    assert formats()[0] == "none"
    assert get_format("none") is None


def derived(base: str, **members: Any) -> type[Format]:
    """A class of a format like the one named ``base``."""
    return type("Other", (type(get_format(base)),), members)


@pytest.mark.parametrize("name", ["int8", "none", "int4_rot"])
def test_registering_a_name_twice_is_refused(name: str) -> None:
    before = formats()
    with pytest.raises(ValueError, match=f"{name!r} is registered already"):
        register(derived("int8", name=name))
    assert formats() == before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (derived("int8", name=""), "needs a `name`"),
        (derived("int8", name="other", bits=7), r"stored in 8 bits.*or in 2, 3, 4, 5, 6 bits.*they are 7 bits"),
        (derived("int8", name="other", bits=4), "code_dtype torch.uint8; they are 4 bits of torch.int8"),
        (derived("int8", name="other", code_dtype=torch.int16), "a type of one byte"),
        (derived("int4", name="other", bits=3, levels=15), r"below 8; they are torch.uint8, up to 1\d"),
        (derived("int8", name="other", largest=300.0), "stand for themselves"),
        (derived("int4", name="other", decode=lambda self, codes, *more: codes * 1e3), "came back .* away"),
    ],
    ids=["no name", "7 bits", "signed", "two bytes", "codes too large", "largest too large", "decodes to others"],
)
def test_a_format_that_is_not_what_it_says_is_refused(kind: type[Format], message: str) -> None:
    before = formats()
    with pytest.raises(ValueError, match=message):
        register(kind)
    assert formats() == before


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_a_registered_format_is_found_by_its_name(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["qkv.formats"]  # the attribute `qkv.formats` is the function
    monkeypatch.setattr(module, "_table", dict(module._table))
    other = register(derived(base, name="other"))
    assert isinstance(get_format("other"), other)
    assert isinstance(get_format("other"), Format)
    assert "other" in formats()
