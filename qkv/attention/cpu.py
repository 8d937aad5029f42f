"""The compiled CPU kernel: attention of a few queries straight over the codes.

Python's part is to lay out addresses and lengths. The addresses of a store's segments change only when memory is
allocated, so they are kept between steps.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch

from qkv import native
from qkv.attention.dense import late_mask
from qkv.storage import LayerStore, Run
from qkv.view import KVView

name = "cpu"
MAX_QUERIES = 8


def available() -> str | None:
    """None, or why there is no compiled kernel."""
    return None if native.library() is not None else native.status()


def supports(query: torch.Tensor, view: KVView) -> str | None:
    """None, or why this attention cannot be served."""
    if query.device.type != "cpu" or view.device.type != "cpu":
        return f"tensors are on {view.device}, not on the CPU"
    if query.shape[2] > MAX_QUERIES:
        return f"{query.shape[2]} queries; the kernel is for up to {MAX_QUERIES}"
    if query.dtype not in native.FLOAT_IDS or view.dtype not in native.FLOAT_IDS:
        return f"queries are {query.dtype}"
    for format in (view.store.key_format, view.store.value_format):
        if format is not None and format.native_id is None:
            return f"the kernel does not read {format.name}"
    return None


class _Regions:
    """The array of regions of a store, brought up to date at every step."""

    def __init__(self, store: LayerStore):
        self.version = store.version
        self.runs = store.runs()
        self.array = _region_array(self.runs)
        # What moves while the version stays: the last packed segment grows, and so does the residual window, whose
        # first tokens leave.
        self.residual = store.residual
        self.waiting = self.residual is not None and self.residual.length > 0
        self.grows = len(self.runs) - (2 if self.waiting else 1)

    def fits(self, store: LayerStore) -> bool:
        residual = store.residual
        if self.version != store.version or self.residual is not residual:
            return False
        return residual is None or self.waiting == (residual.length > 0)

    def refresh(self) -> None:
        if self.grows >= 0:
            self.array[self.grows].length = self.runs[self.grows].segment.length
        if self.waiting:
            assert self.residual is not None
            region = self.array[self.grows + 1]
            region.skip, region.length = self.residual.start, self.residual.length


def _region_array(runs: list[Run]) -> Any:
    array = (native.Region * max(1, len(runs)))()
    for region, run in zip(array, runs, strict=False):
        region.key = run.segment.key.native()
        region.value = run.segment.value.native()
        region.skip = run.offset
        region.length = run.length
    return array


def _regions(view: KVView) -> tuple[Any, int]:
    view.check()
    store = view.store
    if view.runs_changed or view.late is not None:
        runs = list(view.runs())
        if view.late is not None:
            runs.append(Run(view.late.segment, 0, view.late.segment.length))
        return _region_array(runs), len(runs)
    cached = cast("_Regions | None", store.kernel_regions)
    if cached is None or not cached.fits(store):
        cached = _Regions(store)
        store.kernel_regions = cached
    else:
        cached.refresh()
    return cached.array, len(cached.runs)


def _arguments(store: LayerStore, batch: int, heads: int, kv_heads: int, *rest: Any) -> native.Attend:
    """The kernel's arguments with the sizes filled in; kept with the store, since they rarely change."""
    sizes = (batch, heads, kv_heads, *rest)
    kept = cast("tuple[tuple[Any, ...], native.Attend] | None", store.kernel_call)
    if kept is not None and kept[0] == sizes:
        return kept[1]
    q_len, key_dim, value_dim, dtype = rest
    args = native.Attend(
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        q_len=q_len,
        key_dim=key_dim,
        value_dim=value_dim,
        query_dtype=native.FLOAT_IDS[dtype],
    )
    store.kernel_call = (sizes, args)
    return args


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over a view; arguments and result as in :func:`qkv.attention.attention`."""
    lib = native.library()
    if lib is None:
        raise RuntimeError(native.status())
    if query.dtype == torch.float16:
        return attend(query.float(), view, mask, softmax_scale, causal, softcap, sinks).half()
    batch, heads, q_len, key_dim = query.shape
    _, kv_heads, _, value_dim = view.shape
    if query.stride(3) != 1:
        query = query.contiguous()
    if view.late is not None:
        mask, causal = late_mask(view, mask, q_len, 0, q_len, causal), False
    regions, count = _regions(view)
    out = torch.empty(batch, q_len, heads, value_dim, dtype=query.dtype, device=query.device)
    args = _arguments(view.store, batch, heads, kv_heads, q_len, key_dim, value_dim, query.dtype)
    args.query = query.data_ptr()
    args.out = out.data_ptr()
    args.regions = ctypes.addressof(regions)
    args.n_regions = count
    args.softmax_scale = softmax_scale
    args.softcap = softcap or 0.0
    args.causal = causal and q_len > 1 and mask is None
    args.threads = torch.get_num_threads()
    args.mask_kind = native.MASK_NONE
    args.mask = args.sinks = None
    args.query_stride[:] = query.stride()[:3]
    keep = []  # what the addresses point to must live until the call is over
    if mask is not None:
        wide = mask if mask.dtype == torch.bool else mask.float()
        wide = wide.expand(batch, heads, q_len, wide.shape[-1])
        args.mask = wide.data_ptr()
        args.mask_kind = native.MASK_BOOL if wide.dtype == torch.bool else native.MASK_F32
        args.mask_stride[:] = wide.stride()
        keep.append(wide)
    if sinks is not None:
        logits = sinks.float().contiguous()
        args.sinks = logits.data_ptr()
        keep.append(logits)
    code = lib.qkv_attend(args)
    if code != 0:
        raise RuntimeError(f"the compiled attention kernel refused its arguments (code {code})")
    return out
