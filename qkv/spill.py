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

from qkv.planes import Segment
from qkv.room import Room, Stores, segment_bytes
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


class Spill(Room):
    """The file of one cache.

    Args:
        folder: where to make it; None: where temporary files go. It should be on a disk: a file system in memory, as
            /tmp is on some systems, saves nothing.

    Attributes:
        folder: as given.
    """

    where = "the file"

    def __init__(self, folder: str | Path | None = None):
        super().__init__()
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self._mapped: dict[int, list[_Mapped]] = {}  # by layer
        self._read: int | None = None  # the layer that was read last

    def __reduce__(self) -> tuple[type[Spill], tuple[str | Path | None]]:
        return Spill, (self.folder,)  # a copy has a file of its own, and its tensors are in memory

    def share(self, other: Room, stores: Stores) -> None:
        """Takes note of what forked stores hold where another cache has moved it: that need not be moved again."""
        if not isinstance(other, Spill):
            return
        for index, store in stores:
            theirs = {id(m.codes): m for m in other._mapped.get(index, ()) if m.live}
            held = [(segment, theirs.get(id(segment.key.codes))) for segment in store.packed]
            self._mapped[index] = [replace(m, segment=segment) for segment, m in held if m is not None]

    def adopt(self, memory: mmap.mmap, stores: Stores) -> None:
        """Takes note of what new stores hold in a file that was mapped to load them; nothing is ever written there."""
        for index, store in stores:
            lying = [segment for segment in store.packed if segment.shared]
            self._mapped[index] = [_Mapped(s, s.key.codes, memory, segment_bytes(s)) for s in lying]

    def moved(self, index: int, store: LayerStore) -> list[Segment]:
        """Segments that a layer holds in a file; forgets those that are no longer there, or back in memory."""
        held = self._mapped.get(index)
        if not held:
            return []
        there = {id(segment) for segment in store.packed}
        kept = [m for m in held if m.live and id(m.segment) in there]
        if len(kept) < len(held):
            self._mapped[index] = kept
            self._bytes.pop(index, None)
        return [m.segment for m in kept]

    def moved_bytes(self, stores: Stores) -> int:
        """Bytes that layers hold in a file."""
        for index, store in stores:
            self.moved(index, store)
        return sum(m.size for held in self._mapped.values() for m in held if m.live)

    def rest(self) -> None:
        """Gives the pages back that the layer read last has brought in."""
        if self._read is not None:
            _give_back(self._mapped.get(self._read, ()))
            self._read = None

    def rest_all(self) -> None:
        """Gives all pages back, of whichever layer."""
        _give_back(m for held in self._mapped.values() for m in held)

    def make_room(self, stores: Stores, index: int, max_bytes: int) -> None:
        """As :meth:`Room.make_room`."""
        self._read = index
        super().make_room(stores, index, max_bytes)

    def _moved_some(self) -> None:
        _trim()

    def _move(self, index: int, segment: Segment) -> None:
        self._mapped.setdefault(index, []).append(self._written(segment))

    def _written(self, segment: Segment) -> _Mapped:
        """Writes a segment to the file, and lets it hold what lies there."""
        tensors = segment.tensors()
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
            segment.put([_over(memory, start, like) for start, like in zip(starts, tensors, strict=True)])
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


def _give_back(mapped: Iterable[_Mapped]) -> None:
    for memory in {id(m.memory): m.memory for m in mapped}.values():
        memory.madvise(mmap.MADV_DONTNEED)


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


def _trim() -> None:
    """Lets malloc give back what it no longer needs."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
