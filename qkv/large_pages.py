"""Memory of large pages for what is read from end to end at every step.

A processor looks up where a page of memory is before it reads it. With pages of 4 KiB that is often more work than the
reading, most of all on virtual machines, where every look-up is two. Linux gives pages of 2 MiB to who asks for them,
in whole and aligned ones; a segment of a cache is smaller, so segments are cut from common mappings here.

What is cut off is a tensor with a storage of its own. When the storage goes, its memory can be taken again; whole pages
that hold nothing go back to the system. Elsewhere than on Linux, where the system has no large pages for who asks, or
with ``QKV_LARGE_PAGES=off``, torch's memory serves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from bisect import insort
from collections import deque
from pathlib import Path
from threading import Lock

import torch

PAGE = 2 << 20
# What is smaller is read with few look-ups anyway, and there is much of it.
LEAST = 16 << 10
# Address space, not memory: a page is taken when it is first written to.
_MAPPING = 16 * PAGE
_ALIGNMENT = 64


def empty(count: int, device: torch.device) -> torch.Tensor:
    """Uninitialized room for ``count`` bytes: uint8 ``[count]``, on the CPU aligned to 64 bytes."""
    if count >= LEAST and device.type == "cpu" and pool.available():
        return pool.take(count)
    return torch.empty(count, dtype=torch.uint8, device=device)


class Pool:
    """Mappings of large pages, and what of them is free. Threads may use it at once.

    Attributes:
        used: bytes that tensors have at present.
        log: if it is not None, the time (nanoseconds, as ``time.time_ns``) and ``used`` are added at every change.
    """

    def __init__(self) -> None:
        self.used = 0
        self.log: list[tuple[int, int]] | None = None
        self._mappings: list[_Mapping] = []
        self._left: deque[tuple[_Mapping, int, int]] = deque()  # blocks whose tensors are gone
        self._lock = Lock()
        self._available: bool | None = None

    def available(self) -> bool:
        """Whether the system has large pages for who asks; looked up once."""
        if self._available is None:
            self._available = os.environ.get("QKV_LARGE_PAGES", "auto") != "off" and _offered()
        return self._available

    def take(self, count: int) -> torch.Tensor:
        """A tensor of ``count`` bytes, whatever they are; only where the pool is available."""
        size = -(-count // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._sweep()
            for mapping in self._mappings:
                place = mapping.take(size)
                if place is not None:
                    break
            else:
                mapping = _Mapping(max(_MAPPING, -(-size // PAGE) * PAGE))
                self._mappings.append(mapping)
                place = mapping.take(size)
                assert place is not None
            self._changed(size)
        # A buffer that torch holds for as long as there is the storage.
        block = (ctypes.c_uint8 * count).from_buffer(mapping.memory, mapping.start + place)
        weakref.finalize(block, self._gone, mapping, place, size).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)

    def _gone(self, mapping: _Mapping, place: int, size: int) -> None:
        self._left.append((mapping, place, size))
        # Whoever holds the lock may be waiting for this call: garbage is collected at any time.
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._left:
            mapping, place, size = self._left.popleft()
            mapping.give(place, size)
            if not mapping.used:
                self._mappings.remove(mapping)  # it goes with the last reference
            self._changed(-size)

    def _changed(self, by: int) -> None:
        self.used += by
        if self.log is not None:
            self.log.append((time.time_ns(), self.used))


class _Mapping:
    """A run of large pages: ``memory`` from ``start`` on, of which ``used`` bytes are taken."""

    def __init__(self, size: int):
        # One page more than asked for, so that whole aligned pages lie within; it is never touched.
        self.memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.start = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % PAGE
        self.memory.madvise(mmap.MADV_HUGEPAGE, self.start, size)
        self.used = 0
        self._free = [(0, size)]  # (place, size), by place; no two touch

    def take(self, size: int) -> int | None:
        """The place of the first free run that is long enough, which is taken; None: there is none."""
        for index, (place, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(place + size, length - size)] if length > size else []
                self.used += size
                return place
        return None

    def give(self, place: int, size: int) -> None:
        """Takes back what :meth:`take` gave."""
        self.used -= size
        insort(self._free, (place, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self._free:
            if merged and sum(merged[-1]) == begin:
                begin, length = merged[-1][0], merged.pop()[1] + length
            merged.append((begin, length))
            if begin <= place < begin + length:
                run = begin, begin + length
        self._free = merged
        # Of the pages that the block touched, those that hold nothing now.
        first = max(-(-run[0] // PAGE), place // PAGE)
        last = min(run[1] // PAGE, -(-(place + size) // PAGE))
        if first < last:
            self.memory.madvise(mmap.MADV_DONTNEED, self.start + first * PAGE, (last - first) * PAGE)


def _offered() -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        kinds = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False
    return "[never]" not in kinds


pool = Pool()
