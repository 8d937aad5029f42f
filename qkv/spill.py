"""The older part of a cache in a file: full segments whose tensors lie in mapped memory.

A full segment never moves, and only attention reads it. Its bytes are written to a file, and the file is mapped:
tensors over the mapping take the place of those in memory, at addresses that do not change, so attention reads them as
before, tile by tile, and the pages come in as it does. Before the tokens of a long pass come to a layer, others make
room for them; behind each update all do. When the next layer is about to be read, the pages of the last one are given
back (``madvise``); the file's contents stay, in the system's own cache of files as long as that has memory to spare.
The file has no name and goes with the process.

A segment that is full is never written again, so forks hold the same mapping: none of them writes a second copy, and
each moves what it fills later to a file of its own. The place in the file is free, and the file gone, when the last
tensor over it is. In the same way the file that a cache was loaded from serves as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from qkv.planes import Plane, Segment
from qkv.storage import LayerStore

_ALIGNMENT = 64


@dataclass
class _Mapped:
    """A segment in a file, with what was made over it: whether that is still what the segment holds is asked here.

    Attributes:
        memory: a mapping that holds all of the segment, and more where it is that of a loaded file.
        size: bytes that the segment takes there.
    """

    segment: Segment
    codes: torch.Tensor
    memory: mmap.mmap
    size: int

    @property
    def live(self) -> bool:
        return self.segment.key.codes is self.codes


class Spill:
    """The file of one cache.

    Args:
        folder: where to make it; None: where temporary files go. It should be on a disk: a file system in memory, as
            /tmp is on some systems, saves nothing.

    Attributes:
        folder: as given.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self._mapped: dict[int, list[_Mapped]] = {}  # by layer
        self._bytes: dict[int, tuple[object, int, int]] = {}  # layer -> what it was counted at, in memory, in the file
        self._read: int | None = None  # the layer that was read last

    def empty(self) -> Spill:
        """A file of its own for a copy of the cache, whose tensors are in memory."""
        return Spill(self.folder)

    def share(self, other: Spill, stores: list[tuple[int, LayerStore]]) -> None:
        """Takes note of what forked stores hold where another cache has moved it: that need not be moved again."""
        for index, store in stores:
            theirs = {id(m.codes): m for m in other._mapped.get(index, ()) if m.live}
            held = [(segment, theirs.get(id(segment.key.codes))) for segment in store.packed]
            self._mapped[index] = [replace(m, segment=segment) for segment, m in held if m is not None]

    def adopt(self, memory: mmap.mmap, stores: list[tuple[int, LayerStore]]) -> None:
        """Takes note of what new stores hold in a file that was mapped to load them; nothing is ever written there."""
        for index, store in stores:
            lying = [segment for segment in store.packed if segment.shared]
            self._mapped[index] = [_Mapped(s, s.key.codes, memory, segment_bytes(s)) for s in lying]

    @property
    def nbytes(self) -> int:
        """Bytes that lie in a file."""
        return sum(m.size for held in self._mapped.values() for m in held if m.live)

    def prune(self, stores: list[tuple[int, LayerStore]]) -> None:
        """Forgets what was taken back since the layers had tokens last."""
        for index, store in stores:
            self._prune(index, store)

    def rest(self) -> None:
        """Gives the pages back that the layer read last has brought in."""
        if self._read is not None:
            _give_back(self._mapped.get(self._read, ()))
            self._read = None

    def rest_all(self) -> None:
        """Gives all pages back, of whichever layer."""
        _give_back(m for held in self._mapped.values() for m in held)

    def make_room(self, stores: list[tuple[int, LayerStore]], index: int, max_bytes: int) -> None:
        """Moves full segments to the file, the oldest of a layer first, until what is in memory is within the limit.

        That is all that was not moved, and of one layer, while it is read, also what was. Layers take turns, the one
        with the least in the file first: then no layer is read that has more there than others.

        Args:
            stores: of all layers, with their index.
            index: the layer that is about to be read.
            max_bytes: the limit. Where all has moved that can, it may be exceeded: that is seen before.
        """
        self._read = index
        self._prune(index, next(store for i, store in stores if i == index))
        counts = [self._count(i, store) for i, store in stores]
        memory, filed = sum(m for m, _ in counts), [f for _, f in counts]
        if memory + max(filed) <= max_bytes:
            return
        left = [self._left(i, store) for i, store in stores]
        changed = set()
        while memory + max(filed) > max_bytes and any(left):
            _, turn = min((f, at) for at, f in enumerate(filed) if left[at])
            segment = left[turn].pop()
            size = segment_bytes(segment)
            self._mapped.setdefault(stores[turn][0], []).append(self._move(segment))
            memory, filed[turn] = memory - size, filed[turn] + size
            changed.add(turn)
        for turn in changed:
            i, store = stores[turn]
            store.version += 1
            store.kernel_regions = None
            self._bytes.pop(i, None)
        if changed:
            _trim()

    def _left(self, index: int, store: LayerStore) -> list[Segment]:
        """Segments of a layer that can move and have not, the oldest last."""
        self._prune(index, store)
        moved = {id(m.segment) for m in self._mapped.get(index, ())}
        return [s for s in reversed(full_segments(store)) if id(s) not in moved and s.length]

    def _count(self, index: int, store: LayerStore) -> tuple[int, int]:
        """Bytes of a layer in memory and in the file, counted anew when the store has changed."""
        known = self._bytes.get(index)
        at = (store.version, len(store.packed))
        if known is None or known[0] != at:
            filed = sum(segment_bytes(m.segment) for m in self._mapped.get(index, ()) if m.live)
            known = self._bytes[index] = (at, store.nbytes() - filed, filed)
        return known[1], known[2]

    def _prune(self, index: int, store: LayerStore) -> None:
        """Forgets segments that are no longer there, or back in memory."""
        held = self._mapped.get(index)
        if not held:
            return
        there = {id(segment) for segment in store.packed}
        kept = [m for m in held if m.live and id(m.segment) in there]
        if len(kept) < len(held):
            self._mapped[index] = kept
            self._bytes.pop(index, None)

    def _move(self, segment: Segment) -> _Mapped:
        tensors = [tensor for plane in segment.planes() for tensor in plane.tensors()]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        offset = self._place(size)
        file = self.open()
        for tensor, start in zip(tensors, starts, strict=True):
            _write(file.fileno(), _whole(tensor), offset + start)
        memory = mmap.mmap(file.fileno(), size, offset=offset)
        # When the last tensor over it is gone, be it a fork's, the place is free.
        weakref.finalize(memory, self._free.append, (offset, size)).atexit = False
        with torch.inference_mode(False):
            made = iter([_over(memory, start, like) for start, like in zip(starts, tensors, strict=True)])
            for plane in segment.planes():
                _replace(plane, [next(made) for _ in plane.tensors()])
        segment._step = None
        return _Mapped(segment, segment.key.codes, memory, size)

    def _place(self, size: int) -> int:
        for i, (offset, room) in enumerate(self._free):
            if room == size:
                del self._free[i]
                return offset
        offset = self._end
        self._end += size
        os.ftruncate(self.open().fileno(), self._end)
        return offset

    def open(self) -> IO[bytes]:
        """The file, which is made where there is none yet.

        Raises:
            ValueError: it cannot be made.
        """
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  # goes with the cache
            except OSError as error:
                raise ValueError(f"no file can be made in offload_folder={self.folder!r}: {error.strerror}") from None
        return self._file


def full_segments(store: LayerStore) -> list[Segment]:
    """The segments that never change again."""
    return store.packed[:-1] if store._open and store.packed[-1].room else store.packed


def _give_back(mapped: Iterable[_Mapped]) -> None:
    for memory in {id(m.memory): m.memory for m in mapped}.values():
        memory.madvise(mmap.MADV_DONTNEED)


def segment_bytes(segment: Segment) -> int:
    """Bytes that a segment has allocated."""
    return sum(t.untyped_storage().nbytes() for plane in segment.planes() for t in plane.tensors())


def _whole(tensor: torch.Tensor) -> memoryview:
    """All bytes behind a tensor, with those that the kernels may read behind its end."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy says so from Python 3.12 on


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _over(memory: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like another over mapped bytes; it keeps the mapping."""
    count = like.untyped_storage().nbytes()
    if count == 0:
        return like
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)
    return flat.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _replace(plane: Plane, tensors: list[torch.Tensor]) -> None:
    plane._native = None
    plane.codes = tensors[0]
    if plane.scale is not None:
        plane.scale = tensors[1]
    if plane.offset is not None:
        plane.offset = tensors[-1]


def _trim() -> None:
    """Lets malloc give back what it no longer needs."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
