"""The block formats MXFP4 and NVFP4, held bit for bit against their specifications in exact arithmetic.

What is called the specification here is written down anew, in fractions, one number at a time: OCP Microscaling Formats
(MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3, and NVIDIA's description of NVFP4. Nothing of qkv takes part.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import qkv
from qkv.formats import get_format
from qkv.formats.scale_types import E4M3_SCALE, E8M0_SCALE

NAMES = ["mxfp4", "nvfp4"]
BLOCK = {"mxfp4": 32, "nvfp4": 16}
each_format = pytest.mark.parametrize("name", NAMES)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
few = settings(max_examples=60, deadline=None)
many = settings(max_examples=300, deadline=None)


# ---- the specifications --------------------------------------------------------------------------------------------


def magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> list[Fraction]:
    """The numbers of the first codes of a floating point format without a sign."""
    values = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        assert exponent < 1 << exponent_bits
        fraction = Fraction(mantissa, 1 << mantissa_bits)
        values.append(
            fraction * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + fraction) * Fraction(2) ** (exponent - bias)
        )
    return values


E2M1 = magnitudes(2, 1, 1, 8)
E4M3 = magnitudes(4, 3, 7, 127)  # 0x7F is NaN


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """The code of the nearest value to ``x >= 0``; of two as near the even code; beyond the last one the last one."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def specified(block: list[float], name: str) -> tuple[int, list[int]]:
    """The byte of the scale and the codes of one block."""
    if not all(math.isfinite(x) for x in block):
        return {"mxfp4": 0xFF, "nvfp4": 0x7F}[name], [0] * len(block)
    exact = [Fraction(x) for x in block]
    top = max(abs(x) for x in exact)
    if name == "mxfp4":
        byte = 0 if top == 0 else max(floor_log2(top) - 2 + 127, 0)
        scale = Fraction(2) ** (byte - 127)
    else:
        byte = nearest(top / 6, E4M3)
        scale = E4M3[byte]
    if scale == 0:
        return byte, [0] * len(block)
    signs = [8 if math.copysign(1, x) < 0 else 0 for x in block]
    return byte, [sign | nearest(abs(x) / scale, E2M1) for sign, x in zip(signs, exact, strict=True)]


# ---- ours ----------------------------------------------------------------------------------------------------------


def encoded(blocks: torch.Tensor, name: str) -> tuple[list[int], list[list[int]]]:
    """Bytes of scales and codes of ``blocks [n, block]``."""
    format = get_format(name)
    scale, offset = format.choose(blocks)
    assert offset is None
    assert scale.dtype == torch.uint8
    return scale.tolist(), format.encode(blocks, scale).tolist()


def decoded(blocks: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    format = get_format(name)
    scale, _ = format.choose(blocks)
    return format.decode(format.encode(blocks, scale), scale, dtype)


def check(blocks: torch.Tensor, name: str) -> None:
    scales, codes = encoded(blocks, name)
    for row, scale, found in zip(blocks.double().tolist(), scales, codes, strict=True):
        assert (scale, found) == specified(row, name)


def a_block(name: str, *numbers: float) -> torch.Tensor:
    """One block that begins with ``numbers``, zeros behind them."""
    return torch.tensor([[*numbers, *[0.0] * (BLOCK[name] - len(numbers))]])


def blocks_of(name: str) -> st.SearchStrategy[np.ndarray]:
    corners = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-124, 2.0**-126, 3.4028235e38, -3e38, 6.0, 448.0 * 6])
    any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
    usual = st.floats(-8, 8, width=32)
    # Multiples of a quarter: halfway between two elements under many a scale.
    quarters = st.integers(-32, 32).map(lambda n: n / 4)
    return arrays(np.float32, (2, BLOCK[name]), elements=st.one_of(usual, quarters, any_size, corners))


@each_format
@many
@given(data=st.data(), dtype=DTYPES)
def test_scales_and_codes_are_those_of_the_specification_bit_for_bit(
    name: str, data: st.DataObject, dtype: torch.dtype
) -> None:
    top = torch.finfo(dtype).max
    check(torch.from_numpy(data.draw(blocks_of(name))).clamp(-top, top).to(dtype), name)


@each_format
@many
@given(exponent=st.integers(-149, 127), mantissas=st.lists(st.integers(0, 2**23 - 1), min_size=8, max_size=8))
def test_every_exponent_of_float32_is_as_the_specification_says(name: str, exponent: int, mantissas: list[int]) -> None:
    numbers = [np.float32(math.ldexp(1 + m / 2**23, exponent)) * (-1) ** i for i, m in enumerate(mantissas)]
    check(a_block(name, *map(float, numbers)), name)


# Halfway between two elements, what the even one of them is, and the float32 next to it on either side.
TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


@each_format
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-5, 0, 5])
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearer_one(name: str, sign: int, exponent: int) -> None:
    scale = 2.0**exponent
    numbers, expected = [6 * scale], [7]  # makes the scale what it is
    for below, (halfway, even) in enumerate(TIES):
        middle = np.float32(halfway * scale)
        for number, code in (
            (np.nextafter(middle, np.float32(0)), below),
            (middle, even),
            (np.nextafter(middle, np.float32(np.inf)), below + 1),
        ):
            numbers.append(sign * float(number))
            expected.append(code | (8 if sign < 0 else 0))
    if name == "nvfp4":  # 22 numbers, in blocks of 16
        blocks = torch.cat([a_block(name, *numbers[:14]), a_block(name, numbers[0], *numbers[14:])])
        _, codes = encoded(blocks, name)
        found = codes[0][:14] + codes[1][1:9]
    else:
        blocks = a_block(name, *numbers)
        _, codes = encoded(blocks, name)
        found = codes[0][:22]
    assert found == expected
    check(blocks, name)


@each_format
def test_elements_keep_their_sign_down_to_zero(name: str) -> None:
    blocks = a_block(name, 6.0, -0.0, 0.0, -0.25, 0.25, -1e-30)
    assert encoded(blocks, name)[1][0][:6] == [7, 8, 0, 8, 0, 8]
    assert decoded(blocks, name)[0, :6].tolist() == [6.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert decoded(blocks, name)[0, :6].signbit().tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize("largest", [4.0, 5.0, 6.0, 7.0, 7.9999995])
def test_mxfp4_takes_the_exponent_of_the_largest_number_and_saturates_beyond_6(largest: float) -> None:
    scales, codes = encoded(a_block("mxfp4", largest, -largest), "mxfp4")
    assert scales == [127]  # 2**0
    assert codes[0][:2] == ([6, 14] if largest <= 5 else [7, 15])


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (0.0, 0),
        (1e-45, 0),
        (float(np.nextafter(np.float32(2.0**-124), np.float32(0))), 0),  # a quarter of it rounds up in float32
        (2.0**-124, 1),
        (2.0**-123, 2),
        (1.0, 125),
        (3.4028235e38, 252),
        (math.nan, 255),
        (math.inf, 255),
        (-math.inf, 255),
    ],
)
def test_the_scale_of_mxfp4_at_the_ends_of_its_range(largest: float, byte: int) -> None:
    scales, codes = encoded(a_block("mxfp4", largest), "mxfp4")
    assert scales == [byte]
    if not math.isfinite(largest) or largest == 0:
        assert codes == [[0] * 32]


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (6 * 448.0, 0x7E),
        (1e30, 0x7E),  # saturates
        (6 * 2.0**-6, 0x08),  # the smallest normal scale
        (6 * 2.0**-9, 0x01),  # the smallest one
        (6 * 1.5 * 2.0**-10, 0x01),
        (6 * 2.0**-10, 0x00),  # a tie, to the even code
        (0.0, 0x00),
        (math.nan, 0x7F),
        (math.inf, 0x7F),
    ],
)
def test_the_scale_of_nvfp4_at_the_ends_of_its_range(largest: float, byte: int) -> None:
    blocks = a_block("nvfp4", largest, -largest / 2)
    scales, codes = encoded(blocks, "nvfp4")
    assert scales == [byte]
    if byte in (0x00, 0x7F):
        assert codes == [[0] * 16]
    check(blocks, "nvfp4")


def test_numbers_beyond_the_largest_scale_of_nvfp4_saturate_at_2688() -> None:
    blocks = a_block("nvfp4", 1e30, -3000.0, 2688.0)
    assert decoded(blocks, "nvfp4")[0, :3].tolist() == [2688.0, -2688.0, 2688.0]


# ---- against others ------------------------------------------------------------------------------------------------


def test_e8m0_bytes_stand_for_the_numbers_of_torchs_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = E8M0_SCALE.load(codes)
    assert values[:255].double().tolist() == [2.0 ** (i - 127) for i in range(255)]
    assert bool(values[255].isnan())
    torch.testing.assert_close(values, codes.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(E8M0_SCALE.store(values), codes)


@many
@given(x=st.floats(2.0**-127, 2.0**127, width=32))
def test_e8m0_stores_the_power_of_two_below(x: float) -> None:
    stored = E8M0_SCALE.load(E8M0_SCALE.store(torch.tensor([x])))
    assert stored.item() == 2.0 ** floor_log2(Fraction(x))


def test_e4m3_scales_are_torchs_type() -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    assert E4M3_SCALE.load(codes).double().tolist() == [float(x) for x in E4M3]
    assert torch.equal(E4M3_SCALE.store(E4M3_SCALE.load(codes)), codes)
    assert E4M3_SCALE.store(torch.tensor([math.nan])).item() == 0x7F


def test_transformers_decodes_mxfp4_weights_to_the_same_numbers() -> None:
    """gpt-oss is stored so: two codes in a byte, the first in the low bits, and a byte for each 32."""
    other = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers' own decoding of MXFP4")
    torch.manual_seed(0)
    blocks = torch.randn(1, 5, 3, 32) * 10.0 ** torch.randint(-4, 4, (1, 5, 3, 1))
    format = get_format("mxfp4")
    scale, _ = format.choose(blocks)
    codes = format.encode(blocks, scale)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    theirs = other.convert_moe_packed_tensors(packed, scale, dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2).unflatten(-1, (3, 32)), format.decode(codes, scale, torch.float32))


# ---- what follows from it ------------------------------------------------------------------------------------------


@each_format
@few
@given(data=st.data())
def test_what_was_decoded_is_encoded_as_before(name: str, data: st.DataObject) -> None:
    format, blocks = get_format(name), torch.from_numpy(data.draw(blocks_of(name)))
    scale, _ = format.choose(blocks)
    codes = format.encode(blocks, scale)
    again = format.encode(format.decode(codes, scale, torch.float32), scale)
    assert torch.equal(again, codes)


@each_format
@few
@given(data=st.data(), dtype=DTYPES)
def test_any_finite_block_decodes_to_finite_numbers(name: str, data: st.DataObject, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    blocks = torch.from_numpy(data.draw(blocks_of(name))).clamp(-top, top).to(dtype)
    assert bool(decoded(blocks, name, dtype).isfinite().all())


@few
@given(data=st.data())
def test_the_error_of_mxfp4_is_at_most_a_quarter_of_the_largest_number(data: st.DataObject) -> None:
    """Half of the widest step, from 4 to 6 scales, or what is beyond 6: at most 2 of a largest number of up to 8."""
    blocks = torch.from_numpy(data.draw(blocks_of("mxfp4")))
    error = (decoded(blocks, "mxfp4").double() - blocks).abs().amax(dim=-1)
    top = blocks.double().abs().amax(dim=-1)
    assert bool((error <= (top / 4).clamp(min=2.0**-129)).all())


@few
@given(data=st.data())
def test_the_error_of_nvfp4_is_at_most_a_fifth_of_the_largest_number(data: st.DataObject) -> None:
    """Half of the widest step is 1 of 6, and the scale is off by up to a 16th; within the range of normal scales."""
    blocks = torch.from_numpy(data.draw(blocks_of("nvfp4")))
    top = blocks.double().abs().amax(dim=-1)
    error = (decoded(blocks, "nvfp4").double() - blocks).abs().amax(dim=-1)
    normal = (top >= 6 * 2.0**-6) & (top <= 6 * 448)
    assert bool((error <= top / 5)[normal].all())


@each_format
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_decodes_to_nan_and_its_neighbours_are_untouched(name: str, odd: float) -> None:
    torch.manual_seed(0)
    blocks = torch.randn(3, BLOCK[name])
    clean = decoded(blocks, name)
    blocks[1, 5] = odd
    seen = decoded(blocks, name)
    assert bool(seen[1].isnan().all())
    assert torch.equal(seen[[0, 2]], clean[[0, 2]])


# ---- in a cache ----------------------------------------------------------------------------------------------------


def filled(name: str, n: int, dim: int, **changes: Any) -> qkv.QKVCache:
    torch.manual_seed(0)
    cache = qkv.QKVCache(None, name, **changes)
    cache.update(torch.randn(2, 3, n, dim), torch.randn(2, 3, n, dim), 0)
    return cache


@each_format
@pytest.mark.parametrize(("dim", "what"), [(16, "16"), (80, "80"), (64, "")])
def test_a_head_size_without_whole_blocks_is_refused_and_nothing_is_stored(name: str, dim: int, what: str) -> None:
    if dim % BLOCK[name] == 0:
        assert filled(name, 5, dim).stats()["tokens"] == 5
        return
    cache = qkv.QKVCache(None, name)
    message = f"{name} has blocks of {BLOCK[name]} channels, and keys have head_dim={what}, which is no multiple of"
    with pytest.raises(ValueError, match=message):
        cache.update(torch.zeros(1, 1, 3, dim), torch.zeros(1, 1, 3, dim), 0)
    assert cache.stats()["tokens"] == 0
    cache.update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 3, 64), 0)


@each_format
@pytest.mark.parametrize("size", [16, 32, 64])
def test_another_group_size_than_the_block_is_refused(name: str, size: int) -> None:
    if size == BLOCK[name]:
        assert filled(name, 5, 64, group_size=size).stats()["tokens"] == 5
        return
    with pytest.raises(ValueError, match=rf"{name} has blocks of {BLOCK[name]} channels; group_size={size} for keys"):
        filled(name, 5, 64, group_size=size)


@each_format
@pytest.mark.parametrize("granularity", ["token", "head", "channel"])
def test_another_granularity_than_the_blocks_is_refused(name: str, granularity: str) -> None:
    with pytest.raises(ValueError, match=f"format '{name}' has no granularity '{granularity}'; use one of group"):
        qkv.QKVCache(None, name, granularity=granularity)


@each_format
def test_a_cache_holds_the_codes_of_each_block_however_tokens_came(name: str) -> None:
    torch.manual_seed(0)
    pair = torch.randn(2, 3, 70, 64), torch.randn(2, 3, 70, 96)
    cache = qkv.QKVCache(None, name)
    for begin, end in [(0, 50), *((i, i + 1) for i in range(50, 70))]:
        cache.update(*(x[:, :, begin:end] for x in pair), 0)
    for x, shown in zip(pair, cache.view(0).decode(), strict=True):
        assert torch.equal(shown, decoded(x.unflatten(3, (-1, BLOCK[name])), name).flatten(3))


@each_format
def test_bits_per_value_are_the_bytes_that_are_there(name: str) -> None:
    stats = (cache := filled(name, 256, 64)).stats()
    (segment,) = cache.layers[0].store.packed
    assert segment.capacity == 256
    counted = sum(tensor.nbytes for plane in segment.planes() for tensor in plane.tensors())
    assert stats["bits_per_value"] == counted * 8 / (2 * 2 * 3 * 256 * 64) == 4 + 8 / BLOCK[name]
    assert stats["bytes"] == counted + 2 * 64  # spare bytes behind the codes of a plane
    assert stats["layers"][0]["granularity"] == "group"
