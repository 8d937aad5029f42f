"""Making room: which full segments of a cache move elsewhere, and when.

A full segment never changes and only attention reads it, one layer at a time. Where it goes is the matter of what is
derived from :class:`Room`: a mapped file (spill.py), or from a GPU the CPU's memory (host_spill.py).
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod

from qkv.planes import Segment
from qkv.storage import LayerStore

# The stores of all layers, with the index of their layer.
Stores = list[tuple[int, LayerStore]]


class Room(ABC):
    """Moves full segments of one cache elsewhere.

    A copy (``copy.deepcopy``, pickle) begins with nothing moved: what it needs to know it finds in the stores, or is
    told by :meth:`share`.

    Attributes:
        where: where segments go, in words.
    """

    where: str

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[object, int, int]] = {}  # layer -> what it was counted at, here, elsewhere

    @abstractmethod
    def moved(self, index: int, store: LayerStore) -> list[Segment]:
        """Segments that a layer holds elsewhere."""

    @abstractmethod
    def moved_bytes(self, stores: Stores) -> int:
        """Bytes that layers hold elsewhere."""

    @abstractmethod
    def share(self, other: Room, stores: Stores) -> None:
        """Takes note of what forked stores hold where another cache has moved it: that need not be moved again."""

    def adopt(self, memory: mmap.mmap, stores: Stores) -> None:  # noqa: B027  # there is nothing to do for most
        """Takes note of what new stores hold in a file that was mapped to load them; nothing is ever written there."""

    @abstractmethod
    def rest(self) -> None:
        """Gives back what the layer read last has brought here."""

    @abstractmethod
    def rest_all(self) -> None:
        """Gives back what any layer has brought here, and whoever else reads what was moved."""

    @abstractmethod
    def _move(self, index: int, segment: Segment) -> None:
        """Moves a full segment of a layer."""

    def _moved_some(self) -> None:  # noqa: B027  # there is nothing to do for most
        """Called when segments have moved."""

    def make_room(self, stores: Stores, index: int, max_bytes: int) -> None:
        """Moves full segments, the oldest of a layer first, until what is here is within the limit.

        That is all that was not moved, and of one layer, while it is read, also what was. Layers take turns, the one
        with the least elsewhere first: then no layer is read that has more there than others.

        Args:
            stores: of all layers, with their index.
            index: the layer that is about to be read.
            max_bytes: the limit. Where all has moved that can, it may be exceeded: that is seen before.
        """
        self.moved(index, next(store for i, store in stores if i == index))
        counts = [self._count(i, store) for i, store in stores]
        here, gone = sum(h for h, _ in counts), [g for _, g in counts]
        if here + max(gone) <= max_bytes:
            return
        left = [self._left(i, store) for i, store in stores]
        changed = set()
        while here + max(gone) > max_bytes and any(left):
            _, turn = min((g, at) for at, g in enumerate(gone) if left[at])
            segment = left[turn].pop()
            size = segment_bytes(segment)
            self._move(stores[turn][0], segment)
            here, gone[turn] = here - size, gone[turn] + size
            changed.add(turn)
        for turn in changed:
            i, store = stores[turn]
            store.version += 1
            store.kernel_regions = None
            self._bytes.pop(i, None)
        if changed:
            self._moved_some()

    def _left(self, index: int, store: LayerStore) -> list[Segment]:
        """Segments of a layer that can move and have not, the oldest last."""
        moved = set(map(id, self.moved(index, store)))
        return [s for s in reversed(full_segments(store)) if id(s) not in moved and s.length]

    def _count(self, index: int, store: LayerStore) -> tuple[int, int]:
        """Bytes of a layer here and elsewhere, counted anew when the store has changed."""
        known = self._bytes.get(index)
        at = (store.version, len(store.packed))
        if known is None or known[0] != at:
            gone = sum(map(segment_bytes, self.moved(index, store)))
            known = self._bytes[index] = (at, store.nbytes() - gone, gone)
        return known[1], known[2]


def full_segments(store: LayerStore) -> list[Segment]:
    """The segments that never change again."""
    return store.packed[:-1] if store._open and store.packed[-1].room else store.packed


def segment_bytes(segment: Segment) -> int:
    """Bytes that a segment has allocated, wherever they are."""
    return sum(t.untyped_storage().nbytes() for t in segment.tensors())
