"""The older part of a cache on a GPU: full segments whose tensors lie in the CPU's memory.

A full segment is copied there once; nothing of it is copied back, since it never changes. That copy is its home. When a
layer is about to be read, all of it that lies there is copied to the GPU: codes and scales as they are, so attention
reads with the kernels that it always has, and gives the same bits. When another layer is about to be read, those copies
are dropped. At any time one layer is whole on the GPU, and of the others what fits.

Copies to the GPU are queued on the current stream, like the kernels that read them: nothing waits. For that memory at
home is pinned where CUDA is in use. torch takes pinned memory in powers of two, so a process may hold up to twice what
is counted. Where the batch is rearranged, and in a ``copy.deepcopy``, tensors are made anew at home, without being
pinned: they are copied more slowly from then on.

Segments know their home (:attr:`qkv.planes.Segment.home`), so forks, which hold segments together, hold homes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from qkv.planes import Segment
from qkv.room import Room, Stores, segment_bytes
from qkv.storage import LayerStore


def serves(device: torch.device) -> bool:
    """Whether what a cache on this device moves goes to the CPU's memory; else, to a file."""
    return device.type != "cpu"


def to_host(data: torch.Tensor) -> torch.Tensor:
    """A copy of bytes, uint8 ``[n]``, in the CPU's memory. It is there when this returns."""
    pinned = data.device.type == "cuda"
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned).copy_(data)


def to_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of bytes, uint8 ``[n]``, on a device. It is there for what is queued on the current stream after this."""
    return torch.empty(data.shape, dtype=data.dtype, device=device).copy_(data, non_blocking=True)


class HostSpill(Room):
    """The part of one cache in the CPU's memory.

    It is also what its stores ask before they are read, see :attr:`qkv.storage.LayerStore.elsewhere`.
    """

    where = "the CPU's memory"

    def __init__(self) -> None:
        super().__init__()
        self._brought: list[Segment] = []  # what has copies on the device

    def __reduce__(self) -> tuple[type[HostSpill], tuple[()]]:
        return HostSpill, ()  # copied segments are at home

    def moved(self, index: int, store: LayerStore) -> list[Segment]:
        """Segments of a layer whose home is the CPU's memory."""
        return [segment for segment in store.packed if segment.home is not None]

    def moved_bytes(self, stores: Stores) -> int:
        """Bytes whose home is the CPU's memory."""
        return sum(segment_bytes(segment) for i, store in stores for segment in self.moved(i, store))

    def share(self, other: Room, stores: Stores) -> None:
        """Serves forked stores; what they hold elsewhere they know."""
        for _, store in stores:
            store.elsewhere = self

    def make_room(self, stores: Stores, index: int, max_bytes: int) -> None:
        """As :meth:`Room.make_room`; the stores are going to ask this one from now on."""
        self.share(self, stores)
        super().make_room(stores, index, max_bytes)

    def rest(self) -> None:
        """Drops all copies on the device."""
        for segment in self._brought:
            segment.go_home()
        self._brought = []

    def rest_all(self) -> None:
        """As :meth:`rest`: nobody else brings anything."""
        self.rest()

    def bring(self, store: LayerStore, segments: Iterable[Segment]) -> None:
        """Sees to it that segments of a store can be read on its device; drops what others have there."""
        wanted = [segment for segment in segments if segment.home is not None]
        if not wanted and not self._brought:
            return
        kept = set(map(id, wanted))
        for segment in self._brought:
            if id(segment) not in kept:
                segment.go_home()
        away = [segment for segment in wanted if segment.at_home]
        self._brought = wanted
        for segment in away:
            _bring(segment, store.device)
        if away:
            store.kernel_regions = None  # it has the addresses of before

    def take_back(self, store: LayerStore, segment: Segment) -> None:
        """Takes a segment to its store's device to stay: it is going to be written to."""
        if segment.home is None:
            return
        if segment.at_home:
            _bring(segment, store.device)
        segment.home = None

    def _move(self, index: int, segment: Segment) -> None:
        with torch.inference_mode(False), torch.no_grad():
            segment.home = tuple(_copied(tensor, to_host) for tensor in segment.tensors())
        segment.go_home()


def _bring(segment: Segment, device: torch.device) -> None:
    with torch.inference_mode(False), torch.no_grad():
        segment.put([_copied(tensor, lambda data: to_device(data, device)) for tensor in segment.tensors()])


def _copied(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor like another whose bytes ``copy`` has made; with those that kernels may read behind its end."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return copy(flat).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
