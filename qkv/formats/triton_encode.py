"""Encoding on a GPU, in one kernel: rows of keys or values straight into the codes and scales of a plane.

The same numbers as the formats in Python, bit for bit: divisions are rounded as IEEE 754 says, and a product and a sum
are never made one operation. Nothing waits for the device; where the rows go may be a number in its memory, so that an
append can be part of a CUDA graph.
"""

# What Triton compiles has no types, and its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-redef"
# ruff: noqa: N803

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from qkv.formats.affine import Affine
from qkv.formats.layout import ROWS
from qkv.formats.scale_types import BFLOAT16, UE5M3_SCALE
from qkv.transform import rotation_block

INT8, E4M3, E5M2, AFFINE = (tl.constexpr(i) for i in range(4))
PER_HEAD, PER_TOKEN, PER_GROUP, PER_CHANNEL = (tl.constexpr(i) for i in range(4))

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to whole numbers, ties to even
_LIMIT = tl.constexpr(2.0**126)  # as in affine.py


@triton.jit
def _whole(x):
    """The nearest whole number, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def hadamard(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr):
    """``hadamard`` of transform.py for ``x [ROWS, BLOCK_D]`` in blocks of ``TURNED = 2**STAGES``: the same sums."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS, BLOCK_D // (2 << stage), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, BLOCK_D))
    return x * TURNED**-0.5


@triton.jit
def _symmetric_codes(scaled, KIND: tl.constexpr):
    """Codes of numbers within the largest one: the bytes of int8, float8_e4m3fn or float8_e5m2."""
    if KIND == INT8:
        return _whole(scaled).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        if KIND == E4M3:
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
            small = _whole(tl.abs(scaled) * 512.0).to(tl.int32)
            code = tl.where(tl.abs(scaled) < 0.015625, small, normal)
        else:
            normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - 448  # 448 = (127 - 15) << 2
            small = _whole(tl.abs(scaled) * 65536.0).to(tl.int32)
            code = tl.where(tl.abs(scaled) < 6.103515625e-05, small, normal)
        return (code | sign).to(tl.uint8)


@triton.jit
def _stored(scale, WIDE: tl.constexpr):
    """A scale as it is stored, and as it is loaded: rounded up to bfloat16 (``WIDE``) or ue5m3; NaN stays."""
    bits = scale.to(tl.int32, bitcast=True)
    odd = scale != scale
    if WIDE:
        up = (bits + 0xFFFF) >> 16
        return tl.where(odd, 0x7FC0, up).to(tl.int16), tl.where(odd, scale, (up << 16).to(tl.float32, bitcast=True))
    else:
        byte = ((bits + 0xFFFFF) >> 20) - 856  # 856 = (127 - 20) << 3
        loaded = ((byte + 856) << 20).to(tl.float32, bitcast=True)
        return tl.where(odd, 255, byte).to(tl.uint8), tl.where(odd, scale, loaded)


# Triton is not to compile one kernel for each kind of these.
@triton.jit(do_not_specialize=["offset", "n", "row_b", "row_h", "row_n", "scale_stride", "group_stride"])
def encode(
    rows, codes, scales, offsets, position, centre, multiplier, signs,
    heads, offset, n, row_b, row_h, row_n, code_stride, scale_stride, group_stride, smallest, largest_scale, largest,
    KIND: tl.constexpr, BITS: tl.constexpr, GRANULARITY: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    IS_KEY: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, CENTRED: tl.constexpr,
    MULTIPLIED: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr, POSITION: tl.constexpr,
):  # fmt: skip
    """Program ``(batch * head, block of TOKENS tokens)``; blocks begin at multiples of TOKENS in the plane.

    Args:
        rows: ``[batch, heads, n, DIM]`` of any float type and any strides but the last.
        codes: bytes, of 8 bits rows, of 4 bits the units of formats/layout.py.
        scales: uint8, or int16 for bfloat16; float32 ``[batch, heads]`` where they are per head.
        offsets: int8, of the shape of the scales, for ``AFFINE``.
        position: int32 ``[1]``, where ``POSITION``: read instead of ``offset``.
    """
    if POSITION:
        offset = tl.load(position)
    plane = tl.program_id(0).to(tl.int64)
    b, head = plane // heads, plane % heads
    begin = (offset // TOKENS + tl.program_id(1)) * TOKENS
    t, d = begin + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    live = (t >= offset) & (t < offset + n)
    place = b * row_b + head * row_h + (t - offset)[:, None] * row_n + d[None, :]
    x = tl.load(rows + place, mask=live[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
    if CENTRED:
        x = x - tl.load(centre + head * DIM + d, mask=d < DIM, other=0.0)[None, :]
    if MULTIPLIED:
        x = tl.div_rn(
            x, tl.broadcast_to(tl.load(multiplier + head * DIM + d, mask=d < DIM, other=1.0)[None, :], x.shape)
        )
    if TURNED:
        x = x * tl.load(signs + d, mask=d < DIM, other=0.0)[None, :]
        x = hadamard(x, TOKENS, BLOCK_D, TURNED, STAGES)

    # Vectors that share a scale: [1, TOKENS, BLOCK_D], of which axis 1, or [TOKENS, groups, channels], of which axis 2.
    counts = live[:, None] & (d < DIM)[None, :]
    if GRANULARITY == PER_CHANNEL:
        groups: tl.constexpr = 1
        axis: tl.constexpr = 1
        x = tl.reshape(x, (1, TOKENS, BLOCK_D))
        counts = tl.reshape(counts, (1, TOKENS, BLOCK_D))
        at = (begin // GROUP * DIM + d)[None, None, :]
        there = (d < DIM)[None, None, :]
    else:
        groups: tl.constexpr = BLOCK_D // GROUP if GRANULARITY == PER_GROUP else 1
        axis: tl.constexpr = 2
        x = tl.reshape(x, (TOKENS, groups, BLOCK_D // groups))
        counts = tl.reshape(counts, (TOKENS, groups, BLOCK_D // groups))
        g = tl.arange(0, groups)
        at = (t[:, None] + g[None, :] * group_stride)[:, :, None]
        there = (live[:, None] & (g * (BLOCK_D // groups) < DIM)[None, :])[:, :, None]
    at = at + plane * scale_stride
    if GRANULARITY == PER_HEAD:
        scale = tl.load(scales + plane)
    else:
        odd = tl.max(tl.where(counts & ((x - x) != 0.0), 1, 0), axis=axis, keep_dims=True) > 0
        if KIND == AFFINE:
            # The first one where there is none, so that nothing is made of what is not there.
            low = tl.min(tl.where(counts, x, float("inf")), axis=axis, keep_dims=True)
            high = tl.max(tl.where(counts, x, float("-inf")), axis=axis, keep_dims=True)
            low = tl.minimum(tl.maximum(low, -_LIMIT), _LIMIT)
            high = tl.minimum(tl.maximum(high, -_LIMIT), _LIMIT)
            excess = tl.maximum((high - low) - largest * largest_scale, 0.0) * 0.5
            low = low + excess
            high = high - excess
            needed = tl.maximum(
                tl.div_rn(high - low, tl.full(low.shape, 1.0, tl.float32) * largest),
                tl.div_rn(tl.abs(low), tl.full(low.shape, 127.0, tl.float32)),
            )
        else:
            top = tl.max(tl.where(counts, tl.abs(x), 0.0), axis=axis, keep_dims=True)
            needed = tl.div_rn(top, tl.full(top.shape, 1.0, tl.float32) * largest)
        needed = tl.minimum(tl.maximum(needed, smallest), largest_scale)
        stored, scale = _stored(tl.where(odd, float("nan"), needed), WIDE)
        tl.store(scales + at, stored, mask=there)
    steps = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if KIND == AFFINE:
        zero = _whole(tl.div_rn(low, scale))
        zero = tl.where(odd, 0.0, tl.minimum(tl.maximum(zero, -127.0), 127.0))
        tl.store(offsets + at, zero.to(tl.int8), mask=there)
        steps = tl.minimum(tl.maximum(_whole(steps) - zero, 0.0), largest)
        steps = tl.where(scale != scale, 0.0, steps)
        code = steps.to(tl.uint8)
    else:
        steps = tl.minimum(tl.maximum(steps, -largest), largest)
        steps = tl.where(scale != scale, 0.0, steps)
        code = _symmetric_codes(steps, KIND)
    code = tl.reshape(code, (TOKENS, BLOCK_D))

    base = codes + plane * code_stride
    if BITS == 8:
        tl.store(base + t[:, None] * DIM + d[None, :], code, mask=live[:, None] & (d < DIM)[None, :])
    else:
        tokens: tl.constexpr = 16 if IS_KEY else 2
        channels: tl.constexpr = 2 if IS_KEY else 16
        units: tl.constexpr = (DIM + channels - 1) // channels
        tiles: tl.constexpr = TOKENS // tokens
        tile = begin // tokens + tl.arange(0, tiles)[:, None, None]
        u, j = tl.arange(0, BLOCK_D // channels)[None, :, None], tl.arange(0, 16)[None, None, :]
        byte_at = tile * (units * 16) + u * 16 + j
        if IS_KEY:
            halves = tl.reshape(code, (tiles, 2, 8, BLOCK_D // 2, 2))
            first, second = tl.split(tl.permute(halves, (0, 3, 2, 4, 1)))
            first, second = (
                tl.reshape(first, (tiles, BLOCK_D // 2, 16)), tl.reshape(second, (tiles, BLOCK_D // 2, 16))
            )  # fmt: skip
            # Both tokens of a byte need not be new.
            early = tile * 16 + j // 2 + u * 0
            first_new = (early >= offset) & (early < offset + n)
            second_new = (early + 8 >= offset) & (early + 8 < offset + n)
            live_bytes = (first_new | second_new) & (u < units)
            old = tl.load(base + byte_at, mask=live_bytes, other=0)
            first = tl.where(first_new, first, old & 15)
            second = tl.where(second_new, second, old >> 4)
        else:
            halves = tl.reshape(code, (tiles, 2, BLOCK_D // 16, 2, 8))
            first, second = tl.split(tl.permute(halves, (0, 2, 4, 1, 3)))
            first, second = (
                tl.reshape(first, (tiles, BLOCK_D // 16, 16)), tl.reshape(second, (tiles, BLOCK_D // 16, 16))
            )  # fmt: skip
            token = tile * 2 + j % 2 + u * 0
            live_bytes = (token >= offset) & (token < offset + n) & (u < units)
        tl.store(base + byte_at, first | (second << 4), mask=live_bytes)


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def specialization(plane: Any, n: int) -> dict[str, Any] | None:
    """What the kernel is compiled for, for ``n`` tokens into a :class:`~qkv.planes.Plane`; None: it does not serve."""
    format, scaling = plane.format, plane.scaling
    if format is None or scaling is None:
        return None
    kind = {3: INT8, 4: E4M3, 5: E5M2, 8: AFFINE}.get(format.native_id)
    affine = isinstance(format, Affine)
    if kind is None or format.clip != 1.0 or (format.bits == 8 and plane.layout != ROWS):
        return None
    if format.scale_type is not (UE5M3_SCALE if affine else BFLOAT16):
        return None
    block = _padded(plane.dim)
    granularity, group = scaling.granularity, scaling.group
    if granularity == "group" and group == plane.dim:
        granularity = "token"
    if granularity == "group" and group & (group - 1):
        return None
    number = {"head": PER_HEAD, "token": PER_TOKEN, "group": PER_GROUP, "channel": PER_CHANNEL}[granularity]
    if granularity == "channel":
        tokens = group
    elif format.bits == 4 and plane.is_key:
        tokens = 16
    elif n == 1:
        tokens = 1 if format.bits == 8 else 2
    else:
        tokens = 16
    transform = plane.transform
    turned = rotation_block(plane.dim) if transform is not None and transform.signs is not None else 0
    return {
        "KIND": kind.value,
        "BITS": format.bits,
        "GRANULARITY": number.value,
        "GROUP": group,
        "WIDE": not affine,
        "IS_KEY": plane.is_key,
        "DIM": plane.dim,
        "BLOCK_D": block,
        "TOKENS": tokens,
        "CENTRED": transform is not None and transform.centre is not None,
        "MULTIPLIED": transform is not None and transform.multiplier is not None,
        "TURNED": turned,
        "STAGES": max(0, turned.bit_length() - 1),
    }


def write(plane: Any, offset: int, rows: torch.Tensor, position: torch.Tensor | None = None) -> bool:
    """Encodes ``rows [batch, heads, n, dim]`` into the tokens of a plane from ``offset`` on, as ``Plane.write``.

    Args:
        plane: a :class:`~qkv.planes.Plane` on the device of the rows; it has room.
        position: int32 ``[1]`` on the device, read when the kernel runs instead of ``offset``: for a CUDA graph, which
            is replayed at other places. For one token.

    Returns:
        Whether the kernel serves this format; if not, nothing is done.
    """
    batch, heads, n, _ = rows.shape
    constants = specialization(plane, n)
    if constants is None:
        return False
    if rows.stride(3) != 1:
        rows = rows.contiguous()
    format, transform, scale = plane.format, plane.transform, plane.scale
    wide = scale.view(torch.int16) if scale.dtype == torch.bfloat16 else scale
    held = [
        x if x is not None else rows
        for x in (
            (None, None, None) if transform is None else (transform.centre, transform.multiplier, transform.signs)
        )
    ]
    tokens = constants["TOKENS"]
    blocks = 1 if position is not None else -(-(offset + n) // tokens) - offset // tokens
    smallest = format.scale_type.smallest
    largest_scale = format.scale_type.largest if constants["KIND"] == AFFINE.value else format.largest_scale
    with torch.cuda.device(rows.device) if rows.device.type == "cuda" else nullcontext():
        encode[(batch * heads, blocks)](
            rows, plane.codes, wide, plane.offset if plane.offset is not None else plane.codes,
            position if position is not None else plane.codes, *held,
            heads, offset, n, *rows.stride()[:3], plane.codes.stride(1), scale.stride(1),
            scale.stride(2) if scale.dim() == 4 else 0, smallest, largest_scale, format.largest,
            **constants, POSITION=position is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return True
