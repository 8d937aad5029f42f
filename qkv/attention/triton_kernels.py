"""The Triton kernels of attention over stored codes; triton_decode.py calls them.

Tokens are cut into rows of a table, each at most :data:`CHUNK` tokens of one segment, with the addresses of its planes.
A program takes all queries of one kv head over some of the rows and leaves a partial result, and a second kernel merges
these (Dao et al. 2023, "Flash-Decoding for long-context inference", https://pytorch.org/blog/flash-decoding). However
many segments there are, it is one launch.

Scales per token and per head are applied to scores and to weights, so that codes go into the products as they are:
float16 holds them exactly. Scales per group and per channel are applied to every number. What bounds the speed of the
kernel are instructions for each number: the usual formats are unpacked two numbers at a time, in PTX; Triton's
interpreter and the other formats do the same in steps.
"""

# What Triton compiles has no types, and its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-redef"
# ruff: noqa: N803, N806, SIM300

from __future__ import annotations

import triton
import triton.language as tl

from qkv.formats import triton_encode

# What a plane holds, what shares a scale, how that is stored (a format's `scale_type.native_id`), kinds of masks.
FLOATS, INT8, E4M3, E5M2, AFFINE, TABLE = (tl.constexpr(i) for i in range(6))
NO_SCALE, PER_HEAD, PER_TOKEN, PER_GROUP, PER_CHANNEL = (tl.constexpr(i) for i in range(5))
BFLOAT16, UE5M3, E8M0, E4M3_SCALE = (tl.constexpr(i) for i in range(4))
NO_MASK, BOOL_MASK, ADDED_MASK = (tl.constexpr(i) for i in range(3))

# Most tokens of a row of the table.
CHUNK = tl.constexpr(128)
# A row: six fields of the keys, then of the values, int64. Addresses; then how far a head is from the next: of codes in
# bytes, of rows of floats and of scales in numbers; then the same of a group of channels.
CODES, SCALE, OFFSET, CODES_STRIDE, SCALE_STRIDE, GROUP_STRIDE = (tl.constexpr(i) for i in range(6))
VALUES = tl.constexpr(6)
# The token of the segment that the row begins with, a multiple of CHUNK; those that it shows (from, to); what makes a
# position of a token; and whether the row is one of the residual window, of which the arguments say what it shows.
BEGIN, LOW, HIGH, SHIFT, RESIDUAL = (tl.constexpr(i) for i in range(12, 17))
FIELDS = tl.constexpr(17)

# A side, keys or values, is described by a tuple:
# (kind, bits, granularity, group, scale type, channels, channels padded to a power of two, aligned, native fp8,
# whether it is unpacked in PTX, to float16).
KIND, BITS, GRANULARITY, GROUP, TYPE, DIM, BLOCK, ALIGNED, NATIVE, FAST = (tl.constexpr(i) for i in range(10))

_LOG2E = tl.constexpr(1.4426950408889634)
# A whole number below 2**23 in the low bits of 2**23: quicker than a conversion.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)
_TO_E4M3 = tl.constexpr(2.0**120)  # between the exponents of float32 and float8_e4m3fn
_LARGEST_FLOAT16 = tl.constexpr(65504.0)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Unpacked 4-bit numbers are a part of what they stand for, so that float16 holds any scale.
_PART = tl.constexpr(16.0)

# A byte as the low one of a float16 whose high byte is 0x64 is 1024 plus it. 4 bytes at a time.
_INT8_PTX = tl.constexpr("""{
    .reg .b32 byte, one, less;
    xor.b32 byte, $2, 0x80808080;
    mov.b32 one, 0x64646464;
    mov.b32 less, 0x64806480;
    prmt.b32 $0, byte, one, 0x4140;
    prmt.b32 $1, byte, one, 0x4342;
    sub.rn.f16x2 $0, $0, less;
    sub.rn.f16x2 $1, $1, less;
}""")
# e5m2 is the high byte of a float16.
_E5M2_PTX = tl.constexpr("""{
    .reg .b32 zero;
    mov.b32 zero, 0;
    prmt.b32 $0, $2, zero, 0x1404;
    prmt.b32 $1, $2, zero, 0x3424;
}""")
# e4m3 lies one bit lower, and its exponent is 8 less.
_E4M3_PTX = tl.constexpr("""{
    .reg .b32 zero, more, sign;
    mov.b32 zero, 0;
    mov.b32 more, 0x5C005C00;
    prmt.b32 $0, $2, zero, 0x1404;
    prmt.b32 $1, $2, zero, 0x3424;
    and.b32 sign, $0, 0x80008000;
    shr.u32 $0, $0, 1;
    and.b32 $0, $0, 0x3F803F80;
    or.b32 $0, $0, sign;
    and.b32 sign, $1, 0x80008000;
    shr.u32 $1, $1, 1;
    and.b32 $1, $1, 0x3F803F80;
    or.b32 $1, $1, sign;
    mul.rn.f16x2 $0, $0, more;
    mul.rn.f16x2 $1, $1, more;
}""")
_E4M3_NATIVE_PTX = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# Two codes of each byte, less their zero point, times their scale.
_INT4_PTX = tl.constexpr("""{
    .reg .b32 low, high, one;
    mov.b32 one, 0x64646464;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, one, 0x4140;
    prmt.b32 $1, low, one, 0x4342;
    prmt.b32 $2, high, one, 0x4140;
    prmt.b32 $3, high, one, 0x4342;
    sub.rn.f16x2 $0, $0, $7;
    sub.rn.f16x2 $1, $1, $8;
    sub.rn.f16x2 $2, $2, $7;
    sub.rn.f16x2 $3, $3, $8;
    mul.rn.f16x2 $0, $0, $5;
    mul.rn.f16x2 $1, $1, $6;
    mul.rn.f16x2 $2, $2, $5;
    mul.rn.f16x2 $3, $3, $6;
}""")


@triton.jit
def _pointer(field, kind: tl.constexpr):
    """A field of a row as the address that it is; tensors begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(kind)), 16)


@triton.jit
def _load_scale(row, at, live, SIDE: tl.constexpr):
    """Stored scales as float32; 0 where there is none."""
    if SIDE[TYPE] == BFLOAT16:
        return tl.load(_pointer(row + SCALE, tl.bfloat16) + at, mask=live, other=0.0).to(tl.float32)
    else:
        byte = tl.load(_pointer(row + SCALE, tl.uint8) + at, mask=live, other=0).to(tl.int32)
        if SIDE[TYPE] == UE5M3:
            scale = ((byte + 856) << 20).to(tl.float32, bitcast=True)  # the exponent of float32: 856 = (127 - 20) << 3
            return tl.where(byte == 255, float("nan"), scale)
        elif SIDE[TYPE] == E8M0:
            scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
            return tl.where(byte == 255, float("nan"), scale)
        else:
            scale = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * _TO_E4M3
            return tl.where(byte == 127, float("nan"), scale)


@triton.jit
def _load_zero_point(row, at, live):
    return tl.load(_pointer(row + OFFSET, tl.int8) + at, mask=live, other=0).to(tl.float32)


@triton.jit
def _load_units(row, head, begin, high, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, IS_KEY: tl.constexpr):
    """Packed 4-bit codes in the order in which they lie: bytes ``[BLOCK_N / tokens, BLOCK / channels, 16]``."""
    tokens: tl.constexpr = 16 if IS_KEY else 2
    channels: tl.constexpr = 2 if IS_KEY else 16
    units: tl.constexpr = (SIDE[DIM] + channels - 1) // channels
    away = tl.multiple_of(head * tl.load(row + CODES_STRIDE), 16)
    base = _pointer(row + CODES, tl.uint8) + away
    t = begin // tokens + tl.arange(0, BLOCK_N // tokens)[:, None, None]
    u, j = tl.arange(0, SIDE[BLOCK] // channels)[None, :, None], tl.arange(0, 16)[None, None, :]
    live = (t * tokens < high) & (u < units) & (j >= 0)
    return tl.load(base + (t * (units * 16) + u * 16 + j), mask=live, other=0)


@triton.jit
def _in_order(first, second, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, IS_KEY: tl.constexpr):
    """Numbers of the low and of the high halves of the bytes of :func:`_load_units`, ``[BLOCK_N, BLOCK]``."""
    tokens: tl.constexpr = 16 if IS_KEY else 2
    channels: tl.constexpr = 2 if IS_KEY else 16
    both = tl.reshape(tl.join(first, second), (BLOCK_N // tokens, SIDE[BLOCK] // channels, 8, 2, 2))
    if IS_KEY:  # tile, pair of channels, token, channel, half of the tokens
        both = tl.permute(both, (0, 4, 2, 1, 3))
    else:  # pair of tokens, unit, channel, token, half of the channels
        both = tl.permute(both, (0, 3, 1, 4, 2))
    return tl.reshape(both, (BLOCK_N, SIDE[BLOCK]))


@triton.jit
def _load_codes(row, head, begin, high, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, IS_KEY: tl.constexpr):
    """The codes of the tokens from ``begin`` on, uint8 ``[BLOCK_N, BLOCK]``; ``begin`` is a multiple of 16.

    They lie as rows of bytes, or packed as formats/layout.py says: a unit is 16 tokens of 2 channels for keys, and 2
    tokens of 16 channels for values.
    """
    dim: tl.constexpr = SIDE[DIM]
    block: tl.constexpr = SIDE[BLOCK]
    bits: tl.constexpr = SIDE[BITS]
    away = head * tl.load(row + CODES_STRIDE)
    if SIDE[ALIGNED]:
        away = tl.multiple_of(away, 16)
    base = _pointer(row + CODES, tl.uint8) + away
    tokens: tl.constexpr = 16 if IS_KEY else 2
    channels: tl.constexpr = 2 if IS_KEY else 16
    units: tl.constexpr = (dim + channels - 1) // channels
    if bits == 8:
        n, d = begin + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, block)[None, :]
        return tl.load(base + (n * dim + d), mask=(n < high) & (d < dim), other=0)
    elif bits == 4:
        byte = _load_units(row, head, begin, high, BLOCK_N, SIDE, IS_KEY)
        return _in_order(byte & 15, byte >> 4, BLOCK_N, SIDE, IS_KEY)
    else:
        # Number by number: right, and not quick.
        n, d = begin + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, block)[None, :]
        live = (n < high) & (d < dim)
        unit = n // tokens * units + d // channels
        if IS_KEY:
            i = n % 16 * 2 + d % 2
        else:
            i = d % 16 * 2 + n % 2
        first: tl.constexpr = 4 if bits > 4 else 2
        place = base + unit * (4 * bits)
        code = tl.load(place + i % (4 * first), mask=live, other=0).to(tl.int32)
        code = (code >> (i // (4 * first) * first)) & ((1 << first) - 1)
        if bits > first:
            rest: tl.constexpr = bits - first
            more = tl.load(place + (4 * first + i % (4 * rest)), mask=live, other=0).to(tl.int32)
            code = code | (((more >> (i // (4 * rest) * rest)) & ((1 << rest) - 1)) << first)
        return code.to(tl.uint8)


@triton.jit
def _numbers(code, book, SIDE: tl.constexpr):
    """What codes stand for, without scale and zero point, as float32."""
    if SIDE[KIND] == INT8:
        return ((code ^ 0x80).to(tl.int32) | _MAGIC_BITS).to(tl.float32, bitcast=True) - (_MAGIC + 128.0)
    elif SIDE[KIND] == AFFINE:
        return (code.to(tl.int32) | _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC
    elif SIDE[KIND] == TABLE:
        return tl.load(book + code.to(tl.int32))
    elif SIDE[KIND] == E5M2:
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif SIDE[NATIVE]:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)  # never the code of a NaN: that is in the scale
        return (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * _TO_E4M3


@triton.jit
def _half_numbers(code, SIDE: tl.constexpr):
    """What 8-bit codes stand for, without scale, as float16."""
    if _INTERPRETED:
        return _numbers(code, None, SIDE).to(tl.float16)
    elif SIDE[KIND] == INT8:
        # Not "pure", here and below: else the compiler unpacks later, where every byte is loaded by itself.
        return tl.inline_asm_elementwise(_INT8_PTX, "=&r,=&r,r", [code], tl.float16, is_pure=False, pack=4)
    elif SIDE[KIND] == E5M2:
        return tl.inline_asm_elementwise(_E5M2_PTX, "=&r,=&r,r", [code], tl.float16, is_pure=False, pack=4)
    elif SIDE[NATIVE]:
        return tl.inline_asm_elementwise(_E4M3_NATIVE_PTX, "=&r,=&r,r", [code], tl.float16, is_pure=False, pack=4)
    else:
        return tl.inline_asm_elementwise(_E4M3_PTX, "=&r,=&r,r", [code], tl.float16, is_pure=False, pack=4)


@triton.jit
def _four_bits(row, head, begin, high, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, IS_KEY: tl.constexpr):
    """Keys of 4 bits with a scale per channel, or values with one per group, divided by ``_PART``.

    Returns:
        float16 ``[BLOCK_N, BLOCK]``; how many scales of values are not finite, which count as 0.
    """
    dim: tl.constexpr = SIDE[DIM]
    block: tl.constexpr = SIDE[BLOCK]
    group: tl.constexpr = SIDE[GROUP]
    tokens: tl.constexpr = 16 if IS_KEY else 2
    channels: tl.constexpr = 2 if IS_KEY else 16
    tiles: tl.constexpr = BLOCK_N // tokens
    away = head * tl.load(row + SCALE_STRIDE)
    if IS_KEY:
        groups: tl.constexpr = BLOCK_N // group if group < BLOCK_N else 1
        g = begin // group + tl.arange(0, groups)[:, None, None]
        d = tl.arange(0, block // 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        live = (g * group < high) & (d < dim)
        at = away + (g * dim + d)
    else:
        groups: tl.constexpr = 1 if group == dim else block // group
        n = begin + tl.arange(0, tiles)[:, None, None] * 2 + tl.arange(0, 2)[None, None, :]
        g = tl.arange(0, groups)[None, :, None]
        live = (n < high) & (g * group < dim)
        at = away + g * tl.load(row + GROUP_STRIDE) + n
    scale = _load_scale(row, at, live, SIDE)
    odd = 0
    if not IS_KEY:
        odd = tl.sum(tl.sum(tl.sum((scale != scale).to(tl.int32), axis=2), axis=1), axis=0)
        scale = tl.where(scale != scale, 0.0, scale)
    scale = (scale * (1.0 / _PART)).to(tl.float16)
    zero = (1024.0 - _load_zero_point(row, at, live)).to(tl.float16)
    # A unit, 16 bytes, holds 8 pairs of numbers with the same two scales, in either half of its bytes.
    if IS_KEY:
        scale = tl.broadcast_to(scale[:, None, :, None, :], (groups, tiles // groups, block // 2, 8, 2))
        zero = tl.broadcast_to(zero[:, None, :, None, :], (groups, tiles // groups, block // 2, 8, 2))
    else:
        scale = tl.broadcast_to(scale[:, :, None, None, :], (tiles, groups, block // 16 // groups, 8, 2))
        zero = tl.broadcast_to(zero[:, :, None, None, :], (tiles, groups, block // 16 // groups, 8, 2))
    scale = tl.reshape(scale, (tiles, block // channels, 16))
    zero = tl.reshape(zero, (tiles, block // channels, 16))
    byte = _load_units(row, head, begin, high, BLOCK_N, SIDE, IS_KEY)
    if _INTERPRETED:
        first = ((byte & 15).to(tl.float16) + 1024.0 - zero) * scale
        second = ((byte >> 4).to(tl.float16) + 1024.0 - zero) * scale
    else:
        first, second = tl.inline_asm_elementwise(
            _INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [byte, scale, zero], (tl.float16, tl.float16), is_pure=False, pack=4
        )
    return _in_order(first, second, BLOCK_N, SIDE, IS_KEY), odd


@triton.jit
def _few_scales(row, head, begin, high, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, IS_OFFSET: tl.constexpr):
    """Scales, or zero points, per group or channel, as few as there are for a tile.

    Returns:
        float32 ``[BLOCK_N, groups]`` (per group; where a group is no power of two ``[BLOCK_N, BLOCK]``), or
        ``[groups, BLOCK]`` (per channel).
    """
    dim: tl.constexpr = SIDE[DIM]
    group: tl.constexpr = SIDE[GROUP]
    away = head * tl.load(row + SCALE_STRIDE)
    if SIDE[GRANULARITY] == PER_CHANNEL:
        # A tile begins at a multiple of BLOCK_N: it lies in one group, or groups lie in it.
        tokens: tl.constexpr = group if group < BLOCK_N else BLOCK_N
        g, d = begin // group + tl.arange(0, BLOCK_N // tokens)[:, None], tl.arange(0, SIDE[BLOCK])[None, :]
        live = (g * group < high) & (d < dim)
        at = away + (g * dim + d)
    else:
        n = begin + tl.arange(0, BLOCK_N)[:, None]
        if group == dim:
            live = n < high
            at = away + n
        elif (group & (group - 1)) == 0:
            g = tl.arange(0, SIDE[BLOCK] // group)[None, :]
            live = (n < high) & (g * group < dim)
            at = away + g * tl.load(row + GROUP_STRIDE) + n
        else:
            d = tl.arange(0, SIDE[BLOCK])[None, :]
            live = (n < high) & (d < dim)
            at = away + d // group * tl.load(row + GROUP_STRIDE) + n
    if IS_OFFSET:
        return _load_zero_point(row, at, live)
    else:
        return _load_scale(row, at, live, SIDE)


@triton.jit
def _spread(few, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """What :func:`_few_scales` gives, for every number of a tile (or to be broadcast to it)."""
    group: tl.constexpr = SIDE[GROUP]
    block: tl.constexpr = SIDE[BLOCK]
    if SIDE[GRANULARITY] == PER_CHANNEL:
        if group < BLOCK_N:
            wide = tl.broadcast_to(few[:, None, :], (BLOCK_N // group, group, block))
            return tl.reshape(wide, (BLOCK_N, block))
        else:
            return few
    elif group == SIDE[DIM] or (group & (group - 1)) != 0:
        return few
    else:
        wide = tl.broadcast_to(few[:, :, None], (BLOCK_N, block // group, group))
        return tl.reshape(wide, (BLOCK_N, block))


@triton.jit
def _load_floats(row, head, begin, low, high, FLOAT: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Rows of floats ``[BLOCK_N, BLOCK]`` of type ``FLOAT``."""
    n, d = begin + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, SIDE[BLOCK])[None, :]
    away = head * tl.load(row + CODES_STRIDE)
    if SIDE[ALIGNED]:
        away = tl.multiple_of(away, 16)
    base = _pointer(row + CODES, FLOAT) + away
    return tl.load(base + (n * SIDE[DIM] + d), mask=(n >= low) & (n < high) & (d < SIDE[DIM]), other=0.0)


@triton.jit
def _to(x, COMPUTE: tl.constexpr):
    """As type ``COMPUTE``, rounded to the nearest."""
    if COMPUTE == tl.bfloat16 and _INTERPRETED:  # which cuts off where a GPU rounds
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)
    return x.to(COMPUTE)


@triton.jit
def _keys_or_values(
    row, head, begin, low, high, book, FLOAT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
    SIDE: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, and the scales of its tokens where those are not in it yet.

    Returns:
        Numbers ``[BLOCK_N, BLOCK]`` of type ``COMPUTE``; scales float32 ``[BLOCK_N]``; how many of the values' scales
        (or numbers, of floats) are not finite. These count as 0 in values, so that they spoil no other row.
    """
    n = begin + tl.arange(0, BLOCK_N)
    ones = tl.full([BLOCK_N], 1.0, tl.float32)
    odd = 0
    if SIDE[KIND] == FLOATS:
        x = _load_floats(row, head, begin, low, high, FLOAT, BLOCK_N, SIDE)
        if not IS_KEY:
            wide = x.to(tl.float32)
            finite = (wide - wide) == 0.0
            odd = tl.sum(tl.sum((~finite).to(tl.int32), axis=1), axis=0)
            x = tl.where(finite, wide, 0.0)
        return _to(x, COMPUTE), ones, odd
    elif SIDE[FAST] and SIDE[BITS] == 4:
        x, odd = _four_bits(row, head, begin, high, BLOCK_N, SIDE, IS_KEY)
        return x, ones * _PART, odd
    else:
        code = _load_codes(row, head, begin, high, BLOCK_N, SIDE, IS_KEY)
        if SIDE[FAST]:
            x = _half_numbers(code, SIDE)
        else:
            x = _numbers(code, book, SIDE)
        if SIDE[GRANULARITY] == PER_HEAD:
            return _to(x, COMPUTE), ones * tl.load(_pointer(row + SCALE, tl.float32) + head), odd
        elif SIDE[GRANULARITY] == PER_TOKEN:
            away = head * tl.load(row + SCALE_STRIDE)
            return _to(x, COMPUTE), _load_scale(row, away + n, n < high, SIDE), odd
        else:
            scale = _few_scales(row, head, begin, high, BLOCK_N, SIDE, False)
            if not IS_KEY:
                odd = tl.sum(tl.sum((scale != scale).to(tl.int32), axis=1), axis=0)
                scale = tl.where(scale != scale, 0.0, scale)
            if SIDE[KIND] == AFFINE:
                x = x + _spread(_few_scales(row, head, begin, high, BLOCK_N, SIDE, True), BLOCK_N, SIDE)
            x = x * _spread(scale, BLOCK_N, SIDE)
            if COMPUTE == tl.float16:
                x = tl.clamp(x, -_LARGEST_FLOAT16, _LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
            return _to(x, COMPUTE), ones, odd


@triton.jit
def _not_finite(row, head, begin, low, high, FLOAT: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """Where values are not finite: 1, elsewhere 0, float32 ``[BLOCK_N, BLOCK]``."""
    if SIDE[KIND] == FLOATS:
        x = _load_floats(row, head, begin, low, high, FLOAT, BLOCK_N, SIDE).to(tl.float32)
        return tl.where((x - x) == 0.0, 0.0, 1.0)
    else:
        few = _few_scales(row, head, begin, high, BLOCK_N, SIDE, False)
        return tl.broadcast_to(_spread(tl.where(few != few, 1.0, 0.0), BLOCK_N, SIDE), (BLOCK_N, SIDE[BLOCK]))


@triton.jit
def _queries(query, strides, b, head, i, live, SIDE: tl.constexpr, COMPUTE: tl.constexpr):
    """Queries ``[rows, BLOCK]``, and what their scores are to be multiplied with, float32 ``[rows]``."""
    d = tl.arange(0, SIDE[BLOCK])[None, :]
    place = b * strides[0] + head * strides[1] + i * strides[2]
    x = tl.load(query + place[:, None] + d, mask=live[:, None] & (d < SIDE[DIM]), other=0.0).to(tl.float32)
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    if COMPUTE == tl.float16:
        # Equalized ones may be larger than float16 holds: a power of two aside.
        top = tl.max(tl.abs(x), axis=1)
        exponent = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where((exponent > 0.0) & (exponent < float("inf")), exponent, 1.0)
        x = x / factor[:, None]
    return _to(x, COMPUTE), factor


@triton.jit
def _dot(a, b, sum_, PRECISION: tl.constexpr):
    if _INTERPRETED:  # which does not multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum_)
    else:
        return tl.dot(a, b, sum_, input_precision=PRECISION)


@triton.jit
def _over_rows(
    q, factor, bias, table, first_row, last_row, packed_end, residual_low, residual_end, first_position, causal_end,
    mask, mask_place, mask_stride, live_rows, head, softmax_scale, softcap, key_book, value_book,
    FLOAT: tl.constexpr, COMPUTE: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of some queries over some rows of the table: sum of weighted values, maximum, sum of weights."""
    rows: tl.constexpr = q.shape[0]
    WEIGHTS: tl.constexpr = tl.float16 if VALUE[FAST] else COMPUTE
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    VALUE_BLOCK: tl.constexpr = VALUE[BLOCK]  # by itself: within a shape Triton 3.7 takes it for no constant
    sum_ = tl.zeros([rows, VALUE_BLOCK], tl.float32)
    for step in range(first_row * STEPS, last_row * STEPS):
        row = table + step // STEPS * FIELDS
        begin = tl.multiple_of(tl.load(row + BEGIN), CHUNK).to(tl.int32) + step % STEPS * BLOCK_N
        begin = tl.multiple_of(begin, BLOCK_N)
        low, high = tl.load(row + LOW).to(tl.int32), tl.load(row + HIGH).to(tl.int32)
        shift = tl.load(row + SHIFT).to(tl.int32)
        if PACKED:
            high = tl.minimum(high, packed_end - shift)
        else:
            residual = tl.load(row + RESIDUAL) != 0
            shift = tl.where(residual, packed_end - residual_low, shift)
            low = tl.where(residual, tl.maximum(low, residual_low), low)
            high = tl.where(residual, tl.minimum(high, residual_end), high)
        low = tl.maximum(low, first_position - shift)
        high = tl.minimum(high, begin + BLOCK_N)
        n = begin + tl.arange(0, BLOCK_N)
        position = n + shift
        k, key_scale, _ = _keys_or_values(
            row, head, begin, low, high, key_book, FLOAT, q.dtype, BLOCK_N, KEY, True
        )  # fmt: skip
        v, value_scale, odd = _keys_or_values(
            row + VALUES, head, begin, low, high, value_book, FLOAT, WEIGHTS, BLOCK_N, VALUE, False
        )  # fmt: skip
        scores = _dot(q, tl.trans(k), None, PRECISION)
        scores = (scores * (factor[:, None] * key_scale[None, :]) + bias[:, None]) * softmax_scale
        if SOFTCAP:
            # tanh by its definition, exact enough where it is multiplied by the cap.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / softcap)) + 1.0))
        seen = ((n >= low) & (n < high))[None, :] & (position[None, :] < causal_end[:, None])
        if MASK != NO_MASK:
            column = (position - first_position).to(tl.int64) * mask_stride
            there = seen & live_rows[:, None]
            if MASK == BOOL_MASK:
                seen = seen & (tl.load(mask + mask_place[:, None] + column[None, :], mask=there, other=0) != 0)
            else:
                added = tl.load(mask + mask_place[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
                seen = seen & (added != float("-inf"))
                scores = scores + added
        scores = tl.where(seen, scores * _LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, axis=1)
        sum_ = sum_ * shrink[:, None]
        top = new_top
        if (VALUE[GRANULARITY] == PER_TOKEN) or (VALUE[GRANULARITY] == PER_HEAD):
            # A token of weight 0 adds nothing, also where its scale is not a number.
            if WEIGHTS == tl.float16:
                # Scales may be smaller than what float16 holds well: that of the tile aside.
                largest = tl.max(tl.where(value_scale == value_scale, value_scale, 0.0), axis=0)
                largest = tl.where(largest > 0.0, largest, 1.0)
                weights = tl.where(weights != 0.0, weights * (value_scale / largest)[None, :], 0.0)
                sum_ += _dot(_to(weights, WEIGHTS), v, None, PRECISION) * largest
            else:
                weights = tl.where(weights != 0.0, weights * value_scale[None, :], 0.0)
                sum_ = _dot(_to(weights, WEIGHTS), v, sum_, PRECISION)
        else:
            sum_ = _dot(_to(weights, WEIGHTS), v, sum_, PRECISION)
            if odd > 0:
                bad = _not_finite(row + VALUES, head, begin, low, high, FLOAT, BLOCK_N, VALUE).to(WEIGHTS)
                hit = _dot(tl.where(weights != 0.0, 1.0, 0.0).to(WEIGHTS), bad, None, PRECISION)
                sum_ = tl.where(hit != 0.0, float("nan"), sum_)
    if VALUE[FAST] and VALUE[BITS] == 4:
        sum_ = sum_ * _PART
    return sum_, top, total


# Of these numbers Triton would compile a kernel for each kind: those that are 1, multiples of 16, and others.
_CHANGING = [
    "n_packed", "n_exact", "exact_at", "packed_splits", "splits", "packed_end", "residual_low", "residual_end",
    "first_position", "end_position", "mask_b", "mask_h", "mask_i", "rows",
]  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def attend(
    query, folded, bias, table, lengths, mask, key_book, value_book, part_sum, part_top, part_total,
    kv_heads, q_len, heads, n_packed, n_exact, exact_at, packed_splits, splits,
    packed_end, residual_low, residual_end, first_position, end_position,
    query_b, query_h, query_i, folded_b, folded_h, folded_i, mask_b, mask_h, mask_i, mask_n, softmax_scale, softcap,
    FLOAT: tl.constexpr, COMPUTE: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr,
    FOLDED_BIAS: tl.constexpr, LENGTHS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_FLOATS: tl.constexpr, VALUE_FLOATS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention: program ``(batch * kv head, block of queries, split)``.

    Args:
        query: ``[batch, heads, q_len, key_dim]``; ``folded``: the same as quantized keys want it.
        bias: float32 ``[batch, heads, q_len]``, the product with the centre of the keys, where ``FOLDED_BIAS``.
        table: int64 ``[rows, FIELDS]``: ``n_packed`` rows of codes; from ``exact_at`` on ``n_exact`` rows of floats.
        lengths: where ``LENGTHS``, int32 ``[4]`` in the device's memory: packed_end, residual_low, residual_end,
            end_position; the arguments of these names are not used then.
        mask: uint8 or float, of any strides.
        part_sum: float32 ``[splits, batch, heads, q_len, value_dim]``; part_top, part_total: without value_dim.
        packed_end: position behind the last packed token.
        residual_low, residual_end: tokens of its segment that the residual window shows.
        first_position, end_position: of the tokens shown.
    """
    b, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    split = tl.program_id(2)
    if LENGTHS:
        packed_end, residual_low = tl.load(lengths), tl.load(lengths + 1)
        residual_end, end_position = tl.load(lengths + 2), tl.load(lengths + 3)
    group = heads // kv_heads
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = r < group * q_len
    head, i = kv_head * group + r // q_len, r % q_len
    plane = tl.program_id(0).to(tl.int64)
    causal_end = tl.zeros([ROWS], tl.int32) + end_position
    if CAUSAL:
        causal_end = causal_end - q_len + i + 1
    mask_place = b.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h + i.to(tl.int64) * mask_i
    place = (b * heads + head) * q_len + i
    out = (split * (tl.num_programs(0) // kv_heads) * heads * q_len).to(tl.int64) + place
    d = tl.arange(0, VALUE[BLOCK])[None, :]
    there = live[:, None] & (d < VALUE[DIM])
    if split < packed_splits:
        per_split = tl.cdiv(n_packed, packed_splits)
        q, factor = _queries(
            folded, (folded_b, folded_h, folded_i), b, head, i, live, KEY, tl.float16 if KEY[FAST] else COMPUTE
        )
        added = tl.zeros([ROWS], tl.float32)
        if FOLDED_BIAS:
            added = tl.load(bias + place, mask=live, other=0.0)
        sum_, top, total = _over_rows(
            q, factor, added, table, split * per_split, tl.minimum((split + 1) * per_split, n_packed), packed_end,
            residual_low, residual_end, first_position, causal_end, mask, mask_place, mask_n, live, plane,
            softmax_scale, softcap, key_book, value_book, FLOAT, COMPUTE, MASK, SOFTCAP, BLOCK_N, STEPS, KEY, VALUE,
            True, PRECISION,
        )  # fmt: skip
        tl.store(part_top + out, top, mask=live)
        tl.store(part_total + out, total, mask=live)
        tl.store(part_sum + out[:, None] * VALUE[DIM] + d, sum_, mask=there)
    elif EXACT:
        per_split = tl.cdiv(n_exact, splits - packed_splits)
        first = exact_at + (split - packed_splits) * per_split
        exact_q, factor = _queries(query, (query_b, query_h, query_i), b, head, i, live, KEY, COMPUTE)
        sum_, top, total = _over_rows(
            exact_q, factor, tl.zeros([ROWS], tl.float32), table, first,
            tl.minimum(first + per_split, exact_at + n_exact), packed_end, residual_low, residual_end,
            first_position, causal_end, mask, mask_place, mask_n, live, plane, softmax_scale, softcap, key_book,
            value_book, FLOAT, COMPUTE, MASK, SOFTCAP, BLOCK_N, STEPS, KEY_FLOATS, VALUE_FLOATS, False, PRECISION,
        )  # fmt: skip
        tl.store(part_top + out, top, mask=live)
        tl.store(part_total + out, total, mask=live)
        tl.store(part_sum + out[:, None] * VALUE[DIM] + d, sum_, mask=there)


@triton.jit
def fold(
    query, folded, bias, multiplier, centre, signs, kv_heads, heads, q_len, query_b, query_h, query_i,
    MULTIPLIED: tl.constexpr, CENTRED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries as quantized keys want them: program ``batch * head``.

    Args:
        query: ``[batch, heads, q_len, dim]``, any float type; folded: float32, contiguous.
        bias: float32 ``[batch, heads, q_len]``, where ``CENTRED``.
        multiplier, centre: float32 ``[kv_heads, dim]``; signs: float32 ``[dim]``, where ``TURNED``.
    """
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv_head = head // (heads // kv_heads)
    i, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    live = (i < q_len)[:, None] & (d < DIM)[None, :]
    place = b.to(tl.int64) * query_b + head * query_h + i[:, None] * query_i + d[None, :]
    x = tl.load(query + place, mask=live, other=0.0).to(tl.float32)
    out = tl.program_id(0).to(tl.int64) * q_len + i
    if CENTRED:
        c = tl.load(centre + kv_head * DIM + d, mask=d < DIM, other=0.0)
        tl.store(bias + out, tl.sum(x * c[None, :], axis=1), mask=i < q_len)
    if MULTIPLIED:
        x = x * tl.load(multiplier + kv_head * DIM + d, mask=d < DIM, other=0.0)[None, :]
    if TURNED:
        x = x * tl.load(signs + d, mask=d < DIM, other=0.0)[None, :]
        x = triton_encode.hadamard(x, ROWS, BLOCK_D, TURNED, STAGES)
    tl.store(folded + out[:, None] * DIM + d[None, :], x, mask=live)


@triton.jit(do_not_specialize=_CHANGING)
def merge(
    part_sum, part_top, part_total, sinks, signs, out, heads, q_len, packed_splits, splits, rows,
    SINKS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Partial results made one: program ``(batch * heads + head) * q_len + query``; ``out [batch, q_len, heads, dim]``.

    What came of rotated values is rotated back, once.
    """
    pid = tl.program_id(0)
    b, head, i = pid // (heads * q_len), pid // q_len % heads, pid % q_len
    d = tl.arange(0, BLOCK_D)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        top = sink
    for start in range(0, splits, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        top = tl.maximum(top, tl.max(tl.load(part_top + s * rows + pid, mask=s < splits, other=float("-inf")), axis=0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    if SINKS:
        total = tl.exp2(sink - safe)
    turned = tl.zeros([BLOCK_D], tl.float32)
    plain = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        at = s.to(tl.int64) * rows + pid
        weight = tl.exp2(tl.load(part_top + at, mask=s < splits, other=float("-inf")) - safe)
        total += tl.sum(weight * tl.load(part_total + at, mask=s < splits, other=0.0), axis=0)
        live = (s < splits)[:, None] & (d < DIM)[None, :]
        x = tl.load(part_sum + at[:, None] * DIM + d[None, :], mask=live, other=0.0) * weight[:, None]
        if TURNED:
            packed = (s < packed_splits)[:, None]
            turned += tl.sum(tl.where(packed, x, 0.0), axis=0)
            plain += tl.sum(tl.where(packed, 0.0, x), axis=0)
        else:
            plain += tl.sum(x, axis=0)
    if TURNED:
        back = tl.reshape(
            triton_encode.hadamard(tl.reshape(turned, (1, BLOCK_D)), 1, BLOCK_D, TURNED, STAGES), (BLOCK_D,)
        )
        plain += back * tl.load(signs + d, mask=d < DIM, other=0.0)
    result = plain / tl.where(total == 0.0, 1.0, total)
    place = ((b * q_len + i) * heads + head).to(tl.int64) * DIM
    tl.store(out + place + d, _to(result, out.dtype.element_ty), mask=d < DIM)
