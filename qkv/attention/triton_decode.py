"""Triton's kernels on a GPU: attention of a few queries straight over the codes.

Python's part is to lay out addresses and lengths, as in cpu.py. Addresses are in a table in the device's memory, which
changes only when memory is allocated, moved or dropped; lengths are arguments. Nothing waits for the device, and no
shape depends on what is in its memory: a call can be recorded into a CUDA graph, once the table is there (call it once
before). A recording keeps the lengths of its time, unless they are in the device's memory too: see :class:`Lengths`.

On CPU tensors the kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from qkv.attention.dense import late_mask
from qkv.formats.layout import ROWS
from qkv.planes import Plane
from qkv.storage import LayerStore, Run
from qkv.transform import rotation_block, rotation_signs
from qkv.view import KVView

name = "triton"
MAX_QUERIES = 8
# Rows of queries that a program takes at most: queries of all heads that share a kv head.
MOST_ROWS = 64
# Programs for each multiprocessor, where there are tokens enough.
WAVES = 4
_FAR = 1 << 30  # a position behind all others
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_missing: str | None = None
_tried = False


def available() -> str | None:
    """None, or why Triton's kernels cannot be used; imports Triton."""
    global _missing, _tried
    if not _tried:
        _tried = True
        try:
            from qkv.attention import triton_kernels  # noqa: F401
        except (ImportError, AttributeError) as error:
            _missing = f"Triton 3.4 or newer is needed for attention on a GPU, pip install triton ({error})"
    return _missing


def interpreted() -> bool:
    """Whether Triton was imported to run kernels in its interpreter."""
    from qkv.attention import triton_kernels

    return type(triton_kernels.attend).__name__ == "InterpretedFunction"


def supports(query: torch.Tensor, view: KVView) -> str | None:
    """None, or why this attention cannot be served."""
    if query.device != view.device or view.store.away:
        return f"queries are on {query.device}, keys and values elsewhere"
    if query.device.type != "cuda" and not interpreted():
        return f"tensors are on {query.device}; without a GPU the kernels need TRITON_INTERPRET=1"
    if query.device.type == "cuda" and _too_old(query.device) is not None:
        return _too_old(query.device)
    if query.shape[2] > MAX_QUERIES:
        return f"{query.shape[2]} queries; the kernel is for up to {MAX_QUERIES}"
    if query.dtype not in _FLOATS or view.dtype not in _FLOATS:
        return f"queries are {query.dtype}"
    if max(view.shape[2:]) > 256:
        return f"head_dim is {max(view.shape[2:])}; the kernel is for up to 256"
    store = view.store
    for format in (store.key_format, store.value_format):
        if format is not None and (format.native_id is None or format.offset not in (None, "zero_point")):
            return f"the kernel does not read {format.name}"
    for segment in store.packed[:1]:
        for plane in segment.planes():
            if plane.layout is not None and plane.layout.bits == 8 and plane.layout != ROWS:
                return "8-bit codes lie in tiles, as on a CPU"
    return None


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def side(
    plane: Plane | None, dim: int, dtype: torch.dtype, is_key: bool, halves: bool, native_fp8: bool
) -> tuple[Any, ...]:
    """What a kernel is compiled for, of keys or of values: see the constants in triton_kernels.py.

    Args:
        plane: of the packed tokens; None: rows of floats.
        dim: channels.
        dtype: of the floats.
        halves: whether products may be of 16-bit numbers.
        native_fp8: whether the device converts float8_e4m3fn.
    """
    from qkv.attention import triton_kernels as k

    if plane is None or plane.format is None:
        return (
            k.FLOATS.value,
            8,
            k.NO_SCALE.value,
            0,
            0,
            dim,
            _padded(dim),
            dim * dtype.itemsize % 16 == 0,
            False,
            False,
        )
    format, scaling = plane.format, plane.scaling
    assert scaling is not None
    kinds = {3: k.INT8, 4: k.E4M3, 5: k.E5M2, 11: k.TABLE, 12: k.TABLE}
    kind = kinds.get(cast("int", format.native_id), k.AFFINE)
    granularity, group = scaling.granularity, scaling.group
    if granularity == "token" and format.offset is not None:
        granularity, group = "group", dim  # one group: all channels
    number = {"head": k.PER_HEAD, "token": k.PER_TOKEN, "group": k.PER_GROUP, "channel": k.PER_CHANNEL}[granularity]
    if format.bits == 4:
        round_group = granularity == "group" and (group == dim or group & (group - 1) == 0)
        fast = kind == k.AFFINE and (granularity == "channel" if is_key else round_group)
    else:
        fast = kind in (k.INT8, k.E4M3, k.E5M2) and granularity in ("token", "head")
    aligned = format.bits == 4 or (format.bits == 8 and dim % 16 == 0)
    return (
        kind.value, format.bits, number.value, group, format.scale_type.native_id, dim, _padded(dim), aligned,
        native_fp8 and kind == k.E4M3, halves and fast,
    )  # fmt: skip


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _fields(plane: Plane) -> list[int]:
    """The six fields of a plane, see triton_kernels.py."""
    scale = plane.scale
    wide = scale is not None and scale.dim() > 2
    group = scale.stride(2) if wide and scale.dim() == 4 else 0  # type: ignore[union-attr]
    return [
        plane.codes.data_ptr(),
        _address(scale),
        _address(plane.offset),
        plane.codes.stride(1),  # bytes, or numbers of rows of floats
        scale.stride(1) if wide else 1,  # type: ignore[union-attr]
        group,
    ]


def _rows_of(run: Run, position: int, end: int | None = None, residual: bool = False) -> list[list[int]]:
    """The rows of the table for a run whose first token is at ``position``, up to the token ``end`` of its segment."""
    from qkv.attention.triton_kernels import CHUNK

    chunk: int = CHUNK.value
    fields = [*_fields(run.segment.key), *_fields(run.segment.value)]
    low, high = run.offset, run.offset + run.length if end is None else end
    return [
        [*fields, begin, max(low, begin), min(high, begin + chunk), position - run.offset, int(residual)]
        for begin in range(low // chunk * chunk, high, chunk)
    ]


def _on_device(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=torch.int64)
        if device.type != "cuda":
            return table
        return table.pin_memory().to(device, non_blocking=True)


class _Table:
    """The rows of a store's segments, good as long as none of them is moved: tokens may come, and leave the window."""

    moving = True  # for cpu.py, should it be asked about the same store: this is no array of its regions

    def __init__(self, store: LayerStore):
        self.version = store.version
        rows: list[list[int]] = []
        exact: list[list[int]] = []
        position = store.first
        for segment in store.segments():
            run = Run(segment, segment.start, segment.length)
            if segment is store.residual:
                exact += _rows_of(Run(segment, 0, segment.capacity), 0, residual=True)
            elif segment is store.sink:
                exact += _rows_of(run, position)
            else:  # room that is not used yet counts: only the last one has some
                rows += _rows_of(run, position, segment.capacity if segment is store.packed[-1] else None)
            position += segment.length
        self.first_positions = [row[-2] + row[-4] for row in rows]
        self.exact = len(exact)
        self.tensor = _on_device([*rows, *exact], store.device)

    def packed(self, end: int) -> int:
        """Rows of packed tokens, the last of them before the position ``end``."""
        return bisect_left(self.first_positions, end)


@dataclass(frozen=True)
class _Rows:
    """The table of a call: ``packed`` rows, room up to ``exact_at``, ``exact`` rows of floats."""

    tensor: torch.Tensor
    packed: int
    exact_at: int
    exact: int
    lengths: tuple[int, int, int]  # packed_end, residual_low, residual_end


def _rows(view: KVView, everything: bool = False) -> _Rows:
    view.check()
    store = view.store
    floats_only = not store.quantized
    plain = view.late is None and not view.runs_changed
    if plain and not (floats_only and (store.sink is not None or store.residual is not None)):
        table = store.kernel_regions
        if not isinstance(table, _Table) or table.version != store.version:
            table = store.kernel_regions = _Table(store)
        lengths = lengths_of(store)
        packed = len(table.first_positions)
        used = packed if everything else table.packed(lengths[0])
        return _Rows(table.tensor, used, packed, table.exact, lengths[:3])
    runs = list(view.runs())
    if view.late is not None:
        runs.append(Run(view.late.segment, 0, view.late.segment.length))
    rows: list[list[int]] = []
    exact: list[list[int]] = []
    position = view.first
    for run in runs:
        is_exact = run.segment.key.format is None and run.segment.value.format is None and not floats_only
        (exact if is_exact else rows).extend(_rows_of(run, position))
        position += run.length
    tensor = _on_device([*rows, *exact], view.device)
    return _Rows(tensor, len(rows), len(rows), len(exact), (_FAR, 0, 0))


def lengths_of(store: LayerStore) -> tuple[int, int, int, int]:
    """Position behind the last packed token; tokens of its segment that the residual window shows; the end."""
    residual = store.residual
    left, right = (residual.start, residual.start + residual.length) if residual is not None else (0, 0)
    return store.length - (right - left), left, right, store.length


class Lengths:
    """The lengths of a store in the device's memory, so that a recorded call finds those of its replay.

    Attributes:
        tensor: int32 ``[4]``, see :func:`lengths_of`. Whoever replays a recording says with :meth:`set`, before, how
            much the store holds. Its table must not change: that is so in a static layout.
    """

    def __init__(self, store: LayerStore):
        self.tensor = torch.tensor(lengths_of(store), dtype=torch.int32).to(store.device)

    def set(self, lengths: Sequence[int]) -> None:
        self.tensor.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def _too_old(device: torch.device) -> str | None:
    """None, or why the kernels cannot run on this GPU."""
    if torch.version.hip is not None:
        return "parts of the kernels are written for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    return f"the GPU is of compute capability {capability}; (8, 0) is needed" if capability < (8, 0) else None


@lru_cache
def _native_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def _book(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache
def _rotation(dim: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return rotation_signs(dim, device)


def _stages(plane: Plane | None) -> tuple[int, int]:
    """The channels that are rotated together, and the logarithm of that; 0: no rotation."""
    if plane is None or plane.transform is None or plane.transform.signs is None:
        return 0, 0
    block = rotation_block(plane.dim)
    return block, block.bit_length() - 1


def block_n(key_block: int, value_block: int, compute: torch.dtype) -> int:
    """Tokens of a tile: as many as registers hold."""
    if compute == torch.float32:
        return 16 if max(key_block, value_block) > 128 else 32
    return 32 if max(key_block, value_block) > 128 else 64


def registers(in_block: int, key: tuple[Any, ...], value: tuple[Any, ...]) -> dict[str, int]:
    """Warps of a program of ``in_block`` rows of queries, and registers of a thread where the compiler takes too few.

    Left alone it makes room for one more program, and spills where numbers are unpacked from 4 bits.
    """
    warps = 8 if in_block * max(key[6], value[6]) > 2048 else 4
    return {"num_warps": warps, **({"maxnreg": 255} if 4 in (key[1], value[1]) else {})}


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    lengths: Lengths | None = None,
) -> torch.Tensor:
    """Attention over a view; arguments and result as in :func:`qkv.attention.attention`.

    Args:
        lengths: of the view's store, for a call that is recorded into a CUDA graph and replayed when more tokens have
            come; the view must be of all tokens of a store of a static layout. None: those of now.
    """
    # Triton launches on the current device.
    with torch.cuda.device(query.device) if query.device.type == "cuda" else nullcontext():
        return _attend(query, view, mask, softmax_scale, causal, softcap, sinks, lengths)


def _attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    lengths: Lengths | None,
) -> torch.Tensor:
    import triton

    from qkv.attention import triton_kernels as k

    batch, heads, q_len, _ = query.shape
    _, kv_heads, _, value_dim = view.shape
    device = query.device
    if query.stride(3) != 1:
        query = query.contiguous()
    end = view.first + view.length
    if view.late is not None:
        mask, causal = late_mask(view, mask, q_len, 0, q_len, causal), False
        end += view.late.segment.length
    rows = _rows(view, everything=lengths is not None)
    planes = next(((s.key, s.value) for s in view.store.packed), (None, None))
    compute = query.dtype if query.dtype == view.dtype else torch.float32
    native = _native_fp8(device)
    halves = compute != torch.float32
    (key, exact_key), (value, exact_value) = (
        tuple(side(x, n, view.dtype, is_key, halves, native) for x in (plane, None))
        for plane, n, is_key in zip(planes, view.shape[2:], (True, False), strict=True)
    )
    folded, bias = _folded(query, planes[0], kv_heads)

    in_block = min(MOST_ROWS, _padded(heads // kv_heads * q_len))
    blocks = -(-heads // kv_heads * q_len // in_block)
    wanted = max(1, WAVES * _multiprocessors(device) // (batch * kv_heads * blocks))
    per_split = -(-(rows.packed + rows.exact) // wanted)
    packed_splits, exact_splits = -(-rows.packed // per_split), -(-rows.exact // per_split)
    splits = packed_splits + exact_splits
    n = batch * heads * q_len
    parts = torch.empty(splits * n * (value_dim + 2), dtype=torch.float32, device=device)
    sums, tops, totals = parts.split([splits * n * value_dim, splits * n, splits * n])

    kind, mask_strides = k.NO_MASK, (0, 0, 0, 0)
    if mask is not None:
        kind = k.BOOL_MASK if mask.dtype == torch.bool else k.ADDED_MASK
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask_strides = mask.expand(batch, heads, q_len, mask.shape[3]).stride()  # type: ignore[assignment]
    types = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    language = triton.language
    books = [
        _book(p.format.table, device) if p is not None and p.format is not None and p.format.table is not None else sums
        for p in planes
    ]
    tokens = block_n(key[6], value[6], compute)
    out = torch.empty(batch, q_len, heads, value_dim, dtype=query.dtype, device=device)
    turned, stages = _stages(planes[1])
    k.attend[(batch * kv_heads, blocks, splits)](
        query, folded, bias, rows.tensor, lengths.tensor if lengths is not None else rows.tensor,
        mask if mask is not None else sums, *books, sums, tops, totals,
        kv_heads, q_len, heads, rows.packed, rows.exact, rows.exact_at, packed_splits, splits,
        *rows.lengths, view.first, end,
        *query.stride()[:3], *folded.stride()[:3], *mask_strides, softmax_scale, softcap or 0.0,
        FLOAT=getattr(language, types[view.dtype]), COMPUTE=getattr(language, types[compute]),
        MASK=kind.value, SOFTCAP=softcap is not None, CAUSAL=causal and q_len > 1 and mask is None,
        FOLDED_BIAS=bias is not folded, LENGTHS=lengths is not None, EXACT=rows.exact > 0, ROWS=in_block,
        BLOCK_N=tokens, STEPS=k.CHUNK.value // tokens, KEY=key, VALUE=value,
        KEY_FLOATS=exact_key, VALUE_FLOATS=exact_value, PRECISION="ieee",
        num_stages=2, **registers(in_block, key, value),
    )  # fmt: skip
    k.merge[(n,)](
        sums, tops, totals, sinks.contiguous() if sinks is not None else sums,
        _rotation(value_dim, device) if turned else sums, out, heads, q_len, packed_splits, splits, n,
        SINKS=sinks is not None, DIM=value_dim, BLOCK_D=_padded(value_dim), TURNED=turned, STAGES=stages, AT_ONCE=16,
        num_warps=4,
    )  # fmt: skip
    return out


def _folded(query: torch.Tensor, plane: Plane | None, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The query as the keys of a plane want it, and what is added to scores; the query twice: nothing is to be done."""
    transform = plane.transform if plane is not None else None
    if transform is None:
        return query, query
    from qkv.attention import triton_kernels as k

    batch, heads, q_len, dim = query.shape
    folded = torch.empty(batch, heads, q_len, dim, dtype=torch.float32, device=query.device)
    centre, multiplier, signs = transform.centre, transform.multiplier, transform.signs
    bias = folded.new_empty(batch, heads, q_len) if centre is not None else folded
    turned, stages = _stages(plane)
    k.fold[(batch * heads,)](
        query, folded, bias, multiplier if multiplier is not None else folded, centre if centre is not None else folded,
        signs if signs is not None else folded, kv_heads, heads, q_len, *query.stride()[:3],
        MULTIPLIED=multiplier is not None, CENTRED=centre is not None, DIM=dim, BLOCK_D=_padded(dim),
        ROWS=1 << (q_len - 1).bit_length(), TURNED=turned, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return folded, bias
