"""What fits: the rows of ``qkv plan``, one for each cache, context and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkv.config import CacheConfig
from qkv.limits import NoRoomError
from qkv.model_shape import ModelShape
from qkv.plan import CachePlan, Places

# Bytes of one weight, scales of quantized ones not counted.
WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
# Bytes per second at which two channels of DDR5 are read, about.
DEFAULT_BANDWIDTH = 50e9
# A billion tokens, or a million sequences: no limit is meant.
_MOST_TOKENS, _MOST_ROWS = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Row:
    """What one kind of cache takes. The names are those of the JSON rows of ``qkv plan``.

    Attributes:
        format: the name of the cache.
        context, batch: what is planned: tokens of each sequence, and sequences.
        bits_per_value: bits of a stored number with its share of scales and exact tokens, at the context planned; 0
            where qkv stores no layer.
        bytes_per_token: bytes that one more token of one sequence takes, on the average of the next segment. Layers
            with a window are full once the context is as long, and linear attention takes nothing.
        kv_bytes: bytes allocated at the context and batch planned, the states of linear attention included.
        max_context: the longest context that fits beside the weights and that the cache's limits let come, as all
            shorter ones do, in whole segments of 256 tokens; 0: none of that length; None: neither memory nor a limit
            was named, or a billion tokens fit (with a window: any number).
        max_batch: the most sequences of the context planned that fit; None: as above, or a million fit.
        read_ms_per_token: the time, ms, that reading everything that is stored takes: the least that a decoding step of
            the whole batch can take. Of a file this holds while the system keeps it in memory.
        memory_bytes: those in memory.
        file_bytes: bytes in the file of ``on_full="offload"``, in whole pages.
        reading_bytes: as ``memory_bytes``, while the layer is read of which most lies in the file.
        window: tokens of each sequence that stay with ``on_full="window"``, the first ones included; None: all do.
        refused: whether the limits of the cache do not let the context planned come.
    """

    format: str
    context: int
    batch: int
    bits_per_value: float
    bytes_per_token: float
    kv_bytes: int
    max_context: int | None
    max_batch: int | None
    read_ms_per_token: float
    memory_bytes: int
    file_bytes: int
    reading_bytes: int
    window: int | None
    refused: bool


def plan_row(
    shape: ModelShape,
    name: str,
    cache: str | Path | CacheConfig,
    context: int,
    batch: int = 1,
    free: int | None = None,
    bandwidth: float = DEFAULT_BANDWIDTH,
    static: bool = False,
    **limits: Any,
) -> Row:
    """Plans one kind of cache.

    Args:
        shape: of the model.
        name: what the row is called.
        cache: as :class:`CachePlan` takes it.
        context: tokens of each sequence.
        batch: sequences.
        free: bytes that the cache may take; None: not known.
        bandwidth: bytes per second at which memory is read.
        static: a static layout of ``context`` tokens, or of those of any other context that is tried.
        limits: ``max_tokens``, ``max_bytes``, ``on_full`` and other options of :class:`qkv.QKVCache`.

    Raises:
        ValueError: as :class:`CachePlan`.
    """
    growing = CachePlan(shape, cache, **limits)

    def plan(tokens: int) -> CachePlan:
        return CachePlan(shape, cache, tokens, **limits) if static else growing

    try:
        growing.window(batch)
        period = growing.period
    except NoRoomError:
        return _without_room(shape, name, cache, context, batch, free, bandwidth)
    planned = plan(context).size(context, batch)
    refused = not plan(context).fits(context, batch)
    # What will never be there is not looked for in a file.
    held = Places(planned.allocated, 0, planned.allocated)
    if not refused and growing.config.on_full == "offload":
        held = growing.places(context, batch)
    return Row(
        format=name,
        context=context,
        batch=batch,
        bits_per_value=planned.bits / planned.values if planned.values else 0.0,
        bytes_per_token=_growth(plan, context, batch, period),
        kv_bytes=planned.allocated,
        max_context=_longest(plan, growing, batch, free),
        max_batch=None if free is None else largest(lambda n: plan(context).fits(context, n, free), 1, _MOST_ROWS),
        read_ms_per_token=planned.stored / bandwidth * 1e3,
        memory_bytes=held.memory,
        file_bytes=held.file,
        reading_bytes=held.reading,
        window=growing.window(batch),
        refused=refused,
    )


def _without_room(
    shape: ModelShape,
    name: str,
    cache: str | Path | CacheConfig,
    context: int,
    batch: int,
    free: int | None,
    bandwidth: float,
) -> Row:
    """The row of a cache whose window never has room: sizes are those without limits."""
    config = replace(CacheConfig.of(cache), max_tokens=None, max_bytes=None, on_full=None, offload_folder=None)
    row = plan_row(shape, name, config, context, batch, free, bandwidth)
    return replace(row, max_context=0, max_batch=None if free is None else 0, window=None, refused=True)


def _growth(plan: Callable[[int], CachePlan], context: int, batch: int, period: int) -> float:
    """Bytes per token and sequence of the ``period`` tokens that come next."""
    try:
        later = plan(context + period).nbytes(context + period, batch)
    except ValueError:
        if plan(context).config.on_full != "window":
            raise
        return 0.0  # a table of positions ends
    return (later - plan(context).nbytes(context, batch)) / period / batch


def _longest(plan: Callable[[int], CachePlan], growing: CachePlan, batch: int, free: int | None) -> int | None:
    """The longest context, see :class:`Row`."""
    config = growing.config
    if free is None and config.max_tokens is None and config.max_bytes is None:
        return None
    last = config.max_tokens if config.on_full != "window" else None
    if last is not None and plan(last).fits(last, batch, free):
        return last
    return largest(lambda n: plan(n).fits(n, batch, free), growing.period, _MOST_TOKENS)


def largest(fits: Callable[[int], bool], step: int, limit: int) -> int | None:
    """The largest multiple of ``step`` that ``fits``, where all smaller ones do; 0: none; None: ``limit`` does."""
    if fits(limit):
        return None
    least, most = 0, limit // step
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle * step):
            least = middle
        else:
            most = middle
    return least * step
