"""Number formats: what they promise for any input, and that the compiled codec does the same, bit for bit."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from instruction_sets import INSTRUCTION_SETS, each_instruction_set, using

from qkv.formats import Format, formats, get_format, register
from qkv.formats.base import SMALLEST_SCALE, round_up_to_bfloat16
from qkv.planes import Plane

QUANTIZED = [name for name in formats() if name != "none"]
each_format = pytest.mark.parametrize("name", QUANTIZED)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
NORMAL = 2.0**-126  # the smallest normal float32

few = settings(max_examples=60, deadline=None)
many = settings(max_examples=150, deadline=None)


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


def stored(
    x: torch.Tensor, name: str, is_key: bool = True, scale: torch.Tensor | None = None, offset: int = 0
) -> Plane:
    """A plane that holds ``x [batch, heads, tokens, dim]`` from its token ``offset`` on."""
    batch, heads, n, _ = x.shape
    plane = Plane(x, offset + n, get_format(name), is_key)
    plane.scale = torch.zeros(batch, heads, offset + n, dtype=torch.bfloat16) if scale is None else scale
    plane.write(offset, x)
    return plane


# ---- the definition, against the oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_float8_code_decodes_to_the_number_of_the_ocp_specification(name: str) -> None:
    values = oracle.fp8_values(name)
    codes = torch.arange(len(values), dtype=torch.uint8).view(get_format(name).code_dtype)
    assert codes.float().tolist() == values
    assert max(values) == oracle.LARGEST[name] == get_format(name).largest


@each_format
@many
@given(x=finite(), dtype=DTYPES)
def test_scales_and_codes_equal_the_oracle_for_any_finite_input(name: str, x: np.ndarray, dtype: torch.dtype) -> None:
    format, rows = get_format(name), cast(x, dtype)
    scale = format.choose_scale(rows)
    codes = format.encode(rows, scale).view(torch.uint8)
    decoded = format.decode(format.encode(rows, scale), scale, torch.float64)
    for t, row in enumerate(rows[0, 0].double().numpy()):
        expected = oracle.token_scale(row, name)
        assert scale[0, 0, t].item() == expected
        bytes_ = oracle.encode(row, expected, name)
        np.testing.assert_array_equal(codes[0, 0, t].numpy(), bytes_)
        np.testing.assert_array_equal(decoded[0, 0, t].numpy(), oracle.decode(bytes_, expected, name))


@each_format
def test_numbers_halfway_between_two_codes_go_to_the_even_code(name: str) -> None:
    format = get_format(name)
    values = [float(v) for v in range(128)] if name == "int8" else oracle.fp8_values(name)
    halfway = torch.tensor([(a + b) / 2 for a, b in pairwise(values)])
    codes = format.encode(halfway[None, None, None], torch.ones(1, 1, 1)).view(torch.uint8).flatten()
    expected = [code + code % 2 for code in range(len(halfway))]  # of the codes `code` and `code + 1`, the even one
    assert codes.tolist() == expected


@many
@given(x=st.floats(0, 1.75 * 2.0**127, width=32))
def test_rounding_up_to_bfloat16_gives_the_smallest_one_that_is_not_below(x: float) -> None:
    assert round_up_to_bfloat16(torch.tensor([x])).item() == oracle.bfloat16_up(x)


# ---- bounds --------------------------------------------------------------------------------------------------------


@each_format
@many
@given(x=finite(), dtype=DTYPES)
def test_scale_is_at_least_what_the_largest_number_needs_and_at_most_a_128th_above(
    name: str, x: np.ndarray, dtype: torch.dtype
) -> None:
    format, rows = get_format(name), cast(x, dtype)
    scale = format.choose_scale(rows).double()
    amax = rows.double().abs().amax(dim=-1)
    # Above this the scale is held down so that the largest code does not decode to infinity.
    assume(bool((amax <= 0.99 * oracle.LARGEST_BFLOAT16).all()))
    needed = amax / format.largest
    # The quotient is a float32: it may lie half a unit in its last place, 2^-24, below the true one.
    assert bool((scale >= needed * (1 - 2.0**-24)).all())
    assert bool((scale <= torch.clamp(needed * (1 + 2.0**-7), min=SMALLEST_SCALE)).all())
    assert bool((scale > 0).all())


@each_format
@many
@given(x=finite())
def test_error_is_at_most_half_a_step(name: str, x: np.ndarray) -> None:
    format, rows = get_format(name), cast(x, torch.float32)
    scale = format.choose_scale(rows)
    error = (format.decode(format.encode(rows, scale), scale, torch.float64) - rows).abs()
    wide, size = scale.double().unsqueeze(-1), rows.double().abs()
    if name == "int8":
        half_step = wide.expand_as(rows) / 2
    else:
        # Half of the distance of neighbouring codes: relative to the number, or that of subnormal codes near zero.
        mantissa, least = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}[name]
        half_step = torch.clamp(size, min=0) * 2.0 ** -(mantissa + 1)
        half_step = torch.maximum(half_step, wide * 2.0 ** (least - mantissa - 1))
    # Above 99% of the largest bfloat16 the scale is held down, by at most 2^-7 of the number.
    half_step = torch.where(size > 0.99 * oracle.LARGEST_BFLOAT16, size * 2.0**-6 + half_step, half_step)
    # The division before rounding is a float32: 2^-24 of the number on top.
    assert bool((error <= half_step * (1 + 2.0**-20) + size * 2.0**-23).all())


@each_format
@few
@given(x=finite(), dtype=DTYPES)
def test_any_finite_input_decodes_to_finite_numbers(name: str, x: np.ndarray, dtype: torch.dtype) -> None:
    format, rows = get_format(name), cast(x, dtype)
    scale = format.choose_scale(rows)
    decoded = format.decode(format.encode(rows, scale), scale, dtype)
    assert bool(decoded.isfinite().all())
    compiled = torch.empty_like(rows)
    stored(rows, name).decode_into(compiled, 0)
    assert bool(compiled.isfinite().all())


@each_format
@each_dtype
def test_the_largest_number_of_each_type_decodes_to_itself_within_a_step(name: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    rows = torch.full((1, 1, 1, 5), top, dtype=dtype)
    decoded = torch.empty_like(rows)
    stored(rows, name).decode_into(decoded, 0)
    assert decoded.flatten().double().tolist() == pytest.approx([top] * 5, rel=2.0**-6)


@each_format
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-38], ids=str)
def test_vectors_of_zeros_and_subnormal_numbers_get_a_scale_that_can_be_divided_by(name: str, size: float) -> None:
    format, rows = get_format(name), torch.full((1, 1, 1, 4), size)
    scale = format.choose_scale(rows)
    assert scale.item() >= NORMAL
    decoded = format.decode(format.encode(rows, scale), scale, torch.float64)
    assert bool(((decoded - rows).abs() <= scale.item() / 2).all())


@each_format
@many
@given(x=finite(shape=(1, 64)))
def test_codes_are_monotone(name: str, x: np.ndarray) -> None:
    format, rows = get_format(name), torch.from_numpy(np.sort(x))[None, None]
    scale = format.choose_scale(rows)
    values = format.encode(rows, scale).float().flatten()
    assert bool((values[1:] >= values[:-1]).all())


@each_format
@few
@given(x=finite(), exponent=st.integers(-120, 0))
def test_numbers_beyond_a_given_scale_saturate_and_keep_their_sign(name: str, x: np.ndarray, exponent: int) -> None:
    format, rows = get_format(name), cast(x, torch.float32)
    scale = torch.full((1, 1, 1), 2.0**exponent)
    decoded = format.decode(format.encode(rows, scale), scale, torch.float64)
    limit = format.largest * 2.0**exponent
    beyond = rows.double().abs() > limit
    assert bool(decoded.isfinite().all())
    assert torch.equal(decoded[beyond], torch.sign(rows.double()[beyond]) * limit)


# ---- not a number --------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("isa", [*INSTRUCTION_SETS, "none"])
def test_a_vector_with_a_nan_or_infinity_decodes_to_nan_and_its_neighbours_are_untouched(
    name: str, odd: float, isa: str
) -> None:
    torch.manual_seed(1)
    rows = torch.randn(2, 2, 9, 6)
    spoilt = rows.clone()
    spoilt[1, 0, 4, 3] = odd
    for is_key in (True, False):
        with using(isa):
            clean, seen = torch.empty_like(rows), torch.empty_like(rows)
            stored(rows, name, is_key).decode_into(clean, 0)
            stored(spoilt, name, is_key).decode_into(seen, 0)
        assert bool(seen[1, 0, 4].isnan().all())
        seen[1, 0, 4] = clean[1, 0, 4]
        assert torch.equal(seen, clean)


# ---- the compiled codec --------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, in which a NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@each_instruction_set
@each_format
@each_dtype
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 15, 16, 17, 33, 80])
def test_compiled_codec_equals_the_python_format_bit_for_bit(isa: str, name: str, dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(2, 3, 70, dim, generator=generator)
    # From subnormal to nearly infinite, and some tokens that are not finite.
    rows *= 10.0 ** torch.randint(-44, 38, (2, 3, 70, 1), generator=generator).double()
    top = torch.finfo(dtype).max
    rows = rows.clamp(-top, top).to(dtype)
    rows[0, 1, 5, 0], rows[1, 2, 69, dim - 1] = float("nan"), float("-inf")
    for offset, is_key in ((0, True), (5, True), (0, False), (5, False)):
        with using("none"):
            expected = stored(rows, name, is_key, offset=offset)
        with using(isa):
            found = stored(rows, name, is_key, offset=offset)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(bits(found.scale), bits(expected.scale))
        for out_type in (torch.float32, torch.bfloat16, torch.float16):
            decoded = [torch.empty(2, 3, 70, dim, dtype=out_type) for _ in range(2)]
            with using(isa):
                found.decode_into(decoded[0], offset)
            with using("none"):
                expected.decode_into(decoded[1], offset)
            assert torch.equal(decoded[0].isnan(), decoded[1].isnan())
            assert torch.equal(*(bits(x.nan_to_num(0.0, torch.inf, -torch.inf)) for x in decoded))


@each_instruction_set
@each_format
@many
@given(x=finite(), dtype=DTYPES, scale=st.floats(NORMAL, 2.0**100, width=32), is_key=st.booleans())
def test_compiled_codec_under_a_scale_per_head_equals_the_python_format_bit_for_bit(
    isa: str, name: str, x: np.ndarray, dtype: torch.dtype, scale: float, is_key: bool
) -> None:
    rows = cast(x, dtype)
    given_scale = torch.tensor([[scale]])
    planes, decoded = [], []
    for which in ("none", isa):
        with using(which):
            planes.append(stored(rows, name, is_key, given_scale))
            decoded.append(torch.empty_like(rows))
            planes[-1].decode_into(decoded[-1], 0)
    assert torch.equal(planes[0].codes, planes[1].codes)
    assert torch.equal(bits(decoded[0]), bits(decoded[1]))


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
@pytest.mark.usefixtures("keep_threads")
def test_codes_do_not_depend_on_the_number_of_threads(isa: str, threads: int) -> None:
    torch.manual_seed(3)
    rows = torch.randn(2, 3, 333, 40)
    with using("none"):
        expected = stored(rows, "int8")
    torch.set_num_threads(threads)
    with using(isa):
        found = stored(rows, "int8")
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(bits(found.scale), bits(expected.scale))


# ---- the table of names --------------------------------------------------------------------------------------------


def test_an_unknown_format_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'int9'.*none, int8, fp8_e4m3, fp8_e5m2"):
        get_format("int9")


def test_none_is_the_first_name_and_stands_for_no_format() -> None:
    assert formats()[0] == "none"
    assert get_format("none") is None


@pytest.mark.parametrize("name", ["int8", "none"])
def test_registering_a_name_twice_is_refused(name: str) -> None:
    other = type("Other", (type(get_format("int8")),), {"name": name})
    before = formats()
    with pytest.raises(ValueError, match=f"{name!r} is registered already"):
        register(other)
    assert formats() == before


def test_a_registered_format_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["qkv.formats"]  # the attribute `qkv.formats` is the function
    monkeypatch.setattr(module, "_table", dict(module._table))
    other = register(type("Other", (type(get_format("int8")),), {"name": "other"}))
    assert isinstance(get_format("other"), other)
    assert isinstance(get_format("other"), Format)
    assert "other" in formats()
