"""What happens when a cache is full: how many bytes it is going to take, counted before anything is written.

Bytes are predicted by doing the same on torch's meta device, where tensors have sizes and no numbers. Layers that store
alike are counted once, and nothing is counted while a generous guess says that there is room.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from qkv import host_spill
from qkv.config import CacheConfig
from qkv.layers import QKVLayer, QKVSlidingLayer, layer_nbytes, states_nbytes
from qkv.room import Room, Stores, full_segments, segment_bytes
from qkv.sinks import Sinks
from qkv.spill import Spill
from qkv.storage import RESIDUAL_SLACK, SEGMENT_TOKENS, SMALL_SEGMENT_TOKENS, LayerStore
from qkv.window import QKVWindowLayer

# Segments that are smaller than others, at the beginning; those that end since a scale per head has grown; and bytes of
# one that do not depend on its tokens: 64 behind the codes of keys and of values.
_SMALL_SEGMENTS, _GROWTHS, _SPARE_BYTES = 3, 4, 128
# Of one token: batch, kv_heads, key_dim, value_dim, and the type.
Sizes = tuple[tuple[int, int, int, int], torch.dtype]


class NoRoomError(ValueError):
    """Not even a window of one token fits into ``max_bytes``."""


class Limits:
    """The limits of one cache.

    Args:
        config: of the cache, with ``max_tokens`` or ``max_bytes``.

    Raises:
        ValueError: no file can be made in the folder for it.
    """

    def __init__(self, config: CacheConfig):
        self.max_tokens, self.max_bytes = config.max_tokens, config.max_bytes
        self.on_full = config.on_full or "error"
        self._first: int | None = None  # the layer that a pass begins with
        self._passed: tuple[int, int, tuple[int, int]] | None = None  # tokens, bytes at most, batch and layers known
        self._assumed: Sizes | None = None  # of layers that were not used yet
        self._batch: int | None = None  # sequences for which windows were found; None: not known
        self._seen = -1  # of all layers, when their bytes were last compared with the limit
        self._folder = config.offload_folder
        self.spill: Room | None = None  # on the CPU until tokens come that are elsewhere
        if self.on_full == "offload":
            self.spill = file = Spill(self._folder)
            file.open()  # a folder that is not there shows now

    def check(self, layers: list[Any], index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What is to be done before a layer takes new tokens ``[batch, kv_heads, n, head_dim]``.

        Raises:
            ValueError: the tokens would exceed a limit; no layer has changed; in a first pass all are empty again.
        """
        layer = layers[index]
        if self.spill is not None:
            self.spill.rest()
            self._choose(layers, keys.device)
        if not isinstance(layer, QKVLayer) or keys.dim() != 4 or values.dim() != 4 or keys.shape[2] == 0:
            return
        dtype = torch.promote_types(keys.dtype, values.dtype)  # under autocast the store takes the wider one
        sizes = ((keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3]), dtype)
        if self.on_full == "window":
            shape = layer.store.shape
            if self.max_bytes is not None and shape is None:
                self._set_windows(layers, index, sizes)
            elif self.max_bytes is not None and shape is not None and shape[0] != self._batch:
                self._take_batch(layers, shape[0])
            return
        if self._first is None or layers[self._first].get_seq_length() == 0:
            self._first = index if self._first is None else min(self._first, index)
            if index == self._first:
                self._assumed, self._passed = sizes, None
        n, held = keys.shape[2], int(layer.get_seq_length())
        if self.max_tokens is not None and self.on_full == "error" and held + n > self.max_tokens:
            raise ValueError(
                f"the cache is full: it holds {held} tokens ({_bytes_of(layers)} bytes), {n} more were given, and "
                f"max_tokens={self.max_tokens}; take tokens back with crop() or reset(), or make it with a larger "
                "max_tokens, or with on_full='window' or 'offload'"
            )
        if self.max_bytes is None:
            return
        if index == self._first or (layer.store.shape is None and sizes != self._assumed):
            self._check_bytes(layers, index, n, held, sizes)
        if self.spill is not None and n >= SMALL_SEGMENT_TOKENS:
            # What is about to come has its room before it is there. Of a few tokens it is less than a segment.
            grows = bytes_after(layer, n, sizes).total - layer.store.nbytes()
            self.spill.make_room(_stores(layers), index, self.max_bytes - max(0, grows))

    def after(self, layers: list[Any], index: int) -> None:
        """What is to be done after a layer has taken new tokens: moving full segments to the file.

        In a window whose bytes depend on numbers (scales per head that grow), or on what was cropped, it is leaving out
        more, at the end of the pass.
        """
        assert self.max_bytes is not None or self.spill is None
        if not isinstance(layers[index], QKVLayer) or self.max_bytes is None:
            return
        if self.spill is not None:
            self.spill.make_room(_stores(layers), index, self.max_bytes)
        elif self.on_full == "window":
            self._narrow(layers, index)

    def _choose(self, layers: list[Any], device: torch.device) -> None:
        """Lets segments of a cache on the CPU go to a file, and from any other device to the CPU's memory.

        Raises:
            ValueError: a folder was given for what goes to the CPU's memory; or some layers are on the CPU and some are
                not: then all are empty again.
        """
        at_host = host_spill.serves(device)
        if at_host == isinstance(self.spill, host_spill.HostSpill):
            return
        if at_host and self._folder is not None:
            raise ValueError(
                f"offload_folder={self._folder!r} is for caches on the CPU, and this one is on {device}: there the "
                "older part lies in the CPU's memory; leave offload_folder out"
            )
        held = [store.device for _, store in _stores(layers) if store.shape is not None]
        if any(host_spill.serves(other) != at_host for other in held):
            for layer in layers:
                layer.reset()
            raise ValueError(
                f"with on_full='offload' all layers are on the CPU, or none is: tokens came on {held[0]} and on "
                f"{device}; put the model on one kind of device, or make the cache without on_full"
            )
        self.spill = host_spill.HostSpill() if at_host else Spill(self._folder)

    def _check_bytes(self, layers: list[Any], index: int, n: int, held: int, sizes: Sizes) -> None:
        assert self.max_bytes is not None
        assert self._assumed is not None
        known = (sizes[0][0], sum(isinstance(x, QKVLayer) and x.store.shape is not None for x in layers))
        if self._passed is not None and self._passed[2] == known and held >= self._passed[0]:
            tokens, most, _ = self._passed
            guess = most + _growth(layers, held + n - tokens, sizes)
            if guess <= self.max_bytes:
                return
        began = held == 0 or index != self._first
        counted: dict[Any, tuple[Bytes, Bytes]] = {}
        coming = []
        for i, layer in enumerate(layers):
            if not isinstance(layer, QKVLayer):
                continue
            # In a pass that has begun, some layers have their tokens already.
            more = n if layer.get_seq_length() <= held or i == index else 0
            own = sizes if i == index else self._assumed
            key = (_state(layer), more, own)
            if key not in counted:
                counted[key] = (Bytes.of(layer.store), bytes_after(layer, more, own))
            coming.append(counted[key])
        if self.spill is not None:
            total, where = _most_in_memory(coming), " in memory, where a layer is whole while it is read"
        else:
            total, where = sum(x.total + x.doubtful for _, x in coming) + sum(map(states_nbytes, layers)), ""
        if total > self.max_bytes:
            before = _bytes_of(layers)
            if began and index != self._first:
                for layer in layers:
                    layer.reset()
            raise ValueError(
                f"the cache is full: it holds {held} tokens in {before} bytes, with {n} more it would take {total}"
                f"{where}, and max_bytes={self.max_bytes}; "
                + (_offload_advice(coming, self.spill.where) if self.spill is not None else _ADVICE)
            )
        self._passed = (held + n, total, known)

    def _set_windows(self, layers: list[Any], index: int, sizes: Sizes) -> None:
        """Tells all layers how many tokens stay, as many as ``max_bytes`` allows.

        A layer without tokens is taken to get such as the first one. When it gets others, windows become shorter.
        """
        windows = [layer for layer in layers if isinstance(layer, QKVWindowLayer)]
        first = all(layer.store.shape is None for layer in layers if isinstance(layer, QKVLayer))
        if first:
            self._assumed, self._seen, self._batch = sizes, -1, sizes[0][0]
        window = self._longest(layers, {index: sizes})
        if self.max_tokens is not None and windows:
            window = min(window, self.max_tokens - windows[0].sinks.count)
        if window < 1:
            total = self._bound(layers, {index: sizes})(1)
            for layer in layers:
                layer.reset()
            raise NoRoomError(
                f"a window of one token takes {total} bytes at most, and max_bytes={self.max_bytes}; give more bytes, "
                "or fewer sink_tokens"
            )
        for layer in windows:
            if first or layer._window is None:
                layer.set_window(window)
            else:
                layer.narrow(window)

    def _take_batch(self, layers: list[Any], batch: int) -> None:
        """Makes windows shorter where the batch was rearranged into a larger one, before a pass writes anything."""
        if self._assumed is not None:
            (_, heads, key_dim, value_dim), dtype = self._assumed
            self._assumed = ((batch, heads, key_dim, value_dim), dtype)
        window = self._longest(layers, {})
        if window < 1:
            raise NoRoomError(
                f"the batch is {batch} sequences by now, of which a window of one token takes "
                f"{self._bound(layers, {})(1)} bytes at most, and max_bytes={self.max_bytes}; give more bytes, fewer "
                "sequences, or fewer sink_tokens"
            )
        for layer in layers:
            if isinstance(layer, QKVWindowLayer):
                layer.narrow(window)
        self._batch = batch

    def _bound(self, layers: list[Any], told: dict[int, Sizes]) -> Callable[[int], int]:
        """The most bytes that all layers take, as a function of the window."""
        counted: dict[Any, Callable[[int], int]] = {}
        bounds, states = [], [states_nbytes(layer) for layer in layers]
        for i, layer in enumerate(layers):
            if not states[i]:  # what is not there yet is going to be like what is
                states[i] = max(n for n, other in zip(states, layers, strict=True) if type(other) is type(layer))
            if not isinstance(layer, QKVLayer):
                continue
            sizes = told.get(i) or (
                self._assumed if layer.store.shape is None else (layer.store.shape, layer.store.dtype)
            )
            assert sizes is not None
            key = (_kind(layer), sizes)
            if key not in counted:
                counted[key] = window_bytes(layer, sizes)
            bounds.append(counted[key])
        return lambda window: sum(states) + sum(bound(window) for bound in bounds)

    def _longest(self, layers: list[Any], told: dict[int, Sizes]) -> int:
        """The longest window for which there is room; 0: there is none."""
        assert self.max_bytes is not None
        total = self._bound(layers, told)
        least, most = 0, 1
        while total(most) <= self.max_bytes and most < 1 << 30:
            least, most = most, most * 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if total(middle) <= self.max_bytes else (least, middle)
        return least

    def check_held(self, layers: list[Any]) -> None:
        """Raises ValueError where layers that were loaded hold more than they may."""
        held = max((int(layer.get_seq_length()) for layer in layers if isinstance(layer, QKVLayer)), default=0)
        if self.max_tokens is not None and self.on_full == "error" and held > self.max_tokens:
            raise ValueError(f"it holds {held} tokens, and max_tokens={self.max_tokens}")
        if self.max_bytes is None or self.on_full == "window":
            return
        total, where = _bytes_of(layers), ""
        if self.spill is not None:
            ours = [Bytes.of(layer.store) for layer in layers if isinstance(layer, QKVLayer)]
            total = _most_in_memory([(x, x) for x in ours])
            where = " in memory, where a layer is whole while it is read"
        if total > self.max_bytes:
            raise ValueError(f"its {held} tokens take {total} bytes{where}, and max_bytes={self.max_bytes}")

    def _narrow(self, layers: list[Any], index: int) -> None:
        """Shortens windows that take more than ``max_bytes``, when the last of the layers has had its tokens."""
        assert self.max_bytes is not None
        windows = [i for i, layer in enumerate(layers) if isinstance(layer, QKVWindowLayer)]
        if not windows or index != windows[-1]:
            return
        seen = sum(layer.store.version for layer in layers if isinstance(layer, QKVLayer))
        if seen == self._seen or any(layers[i].record_past for i in windows):
            return
        if _bytes_of(layers) > self.max_bytes:
            window = min(layers[index].window, max(1, self._longest(layers, {})))
            while True:
                for i in windows:
                    layers[i].narrow(window)
                if window == 1 or _bytes_of(layers) <= self.max_bytes:
                    break
                window = max(1, window - SMALL_SEGMENT_TOKENS)
        self._seen = sum(layer.store.version for layer in layers if isinstance(layer, QKVLayer))

    def offloaded_bytes(self, layers: list[Any]) -> int:
        """Bytes that layers have in a file, or in the CPU's memory beside their device."""
        return self.spill.moved_bytes(_stores(layers)) if self.spill is not None else 0

    def share_moved(self, other: Limits, layers: list[Any]) -> None:
        """What the forked ``layers`` of a fork hold where the cache that it is from has moved it counts as moved."""
        if self.spill is not None and other.spill is not None:
            self.spill.share(other.spill, _stores(layers))

    def adopt(self, memory: mmap.mmap, layers: list[Any]) -> None:
        """What loaded layers hold in a mapped file counts as moved."""
        if self.spill is not None:
            self.spill.adopt(memory, _stores(layers))

    def make_room_on(self, device: torch.device, layers: list[Any], index: int) -> None:
        """Moves what the layer ``index`` of a cache that is being loaded, or one before it, has too much on a device.

        Raises:
            ValueError: a folder was given for what goes to the CPU's memory.
        """
        if self.spill is not None and self.max_bytes is not None and isinstance(layers[index], QKVLayer):
            self._choose(layers, device)
            self.spill.make_room(_stores(layers), index, self.max_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Limits:
        fresh = copy(self)
        memo[id(self)] = fresh
        fresh.spill = deepcopy(self.spill, memo)
        return fresh


_ADVICE = (
    "take tokens back with crop() or reset(), or make it with a larger max_bytes, or with on_full='window' or 'offload'"
)


def _offload_advice(coming: list[tuple[Bytes, Bytes]], where: str) -> str:
    still_there = sum(after.still for _, after in coming)
    widest = max(after.movable for _, after in coming)
    return (
        f"{still_there} bytes cannot move to {where} (tokens that are exact, and segments that are not full), and "
        f"{widest} of one layer are read from it; make the cache with a larger max_bytes"
    )


@dataclass(frozen=True)
class Bytes:
    """What one layer takes.

    Attributes:
        total: bytes allocated.
        movable: of these, bytes of full segments, which can move to a file.
        doubtful: bytes that may come on top, since numbers decide whether they do.
    """

    total: int
    movable: int
    doubtful: int = 0

    @classmethod
    def of(cls, store: LayerStore) -> Bytes:
        """Those of a store as it is, in memory or in a file."""
        return cls(store.nbytes(), sum(map(segment_bytes, full_segments(store))))

    @property
    def still(self) -> int:
        """Bytes that stay in memory at most."""
        return self.total - self.movable + self.doubtful


def _most_in_memory(coming: list[tuple[Bytes, Bytes]]) -> int:
    """The most bytes that are in memory at a time when all has moved that can, while layers get their tokens in turn.

    Args:
        coming: of each layer, before and after.
    """
    held = [before for before, _ in coming]
    most = 0
    for i, (_, after) in enumerate(coming):
        held[i] = after
        most = max(most, sum(x.still for x in held) + max(x.movable for x in held))
    return most


def bytes_after(layer: QKVLayer, n: int, sizes: Sizes) -> Bytes:
    """Bytes that a layer is going to have allocated when ``n`` more tokens have come.

    Args:
        sizes: those of the tokens, for a layer that is empty.
    """
    store = on_meta(layer.store)
    shape, dtype = (store.shape, store.dtype) if store.shape is not None else sizes
    batch, heads, key_dim, value_dim = shape
    made = [torch.empty(batch, heads, n, dim, dtype=dtype, device="meta") for dim in (key_dim, value_dim)]
    store.append(made[0], made[1])
    if isinstance(layer, QKVSlidingLayer) and not layer.record_past:
        store.drop_before(layer._first_visible(store.length))
    result = Bytes.of(store)
    grow = [head for head in (store._key_head, store._value_head) if head is not None and not head.given]
    if grow and n and store.packed:
        # A scale that grows begins a segment of its own, and whether it does depends on the numbers.
        return replace(result, doubtful=max(map(segment_bytes, store.packed)))
    return result


def on_meta(store: LayerStore) -> LayerStore:
    """A copy of a store without its numbers."""
    fresh = copy(store)
    for name in ("_key_head", "_value_head"):
        setattr(fresh, name, deepcopy(getattr(store, name)))
    if store.shape is None:
        fresh.packed, fresh._empty = [], []
        return fresh
    fresh.packed = list(store.packed)
    spare = [segment.mapped(_to_meta) for segment in store._empty]
    fresh._replace(_to_meta)
    fresh._empty = spare
    fresh.device = fresh.place = torch.device("meta")
    return fresh


def _to_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def _kind(layer: QKVLayer) -> Any:
    """What sizes depend on before there is a token."""
    store = layer.store
    given = tuple(x is not None for x in (*store._given, *store._vectors))
    sinks = layer.sinks if isinstance(layer, QKVWindowLayer) else None
    turned = sinks is not None and sinks.turning is not None and len(sinks.turning.frequencies)
    return type(layer), getattr(layer, "sliding_window", None), store.config, store.capacity, given, turned


def _state(layer: QKVLayer) -> Any:
    """What the sizes of a layer depend on."""
    store = layer.store
    exact = [None if s is None else (s.start, s.length, s.capacity) for s in (store.sink, store.residual)]
    packed = tuple((s.start, s.length, s.capacity) for s in store.packed)
    said = (store.shape, store.length, store.first, store._open, store._encoded, len(store._empty))
    return (_kind(layer), *said, *exact, packed)


def _growth(layers: list[Any], tokens: int, sizes: Sizes) -> int:
    """A generous guess of the bytes that ``tokens`` more take in all layers: as if nothing were made smaller."""
    (batch, heads, key_dim, value_dim), dtype = sizes
    ours = [layer for layer in layers if isinstance(layer, QKVLayer)]
    waiting = (x.store.config.residual_length + x.store.group + x.store.warm for x in ours)
    room = 2 * SEGMENT_TOKENS + max(waiting, default=0)
    each = max(dtype.itemsize, 4) * 2 * batch * heads * (key_dim + value_dim)
    return len(ours) * each * (tokens + room)


def _exact_places(store: LayerStore) -> tuple[int, int]:
    """Places for exact tokens that a store takes at most: before any token is encoded, and from then on.

    They follow from what ``LayerStore`` allocates: room for what is there and 64 more; of what the first tokens had,
    128 more than are left may be kept.
    """
    residual, warm, group = store.config.residual_length, store.warm, store.group
    waiting = residual + group - 1
    first = max(warm - 1, waiting)
    if first <= 0:
        return 0, 0
    if waiting == 0:
        return first + RESIDUAL_SLACK, 0
    left = max(0, residual + (warm - residual) % group - 1)  # of the tokens that came before, when some are encoded
    kept = min(first + RESIDUAL_SLACK, left + 2 * RESIDUAL_SLACK)
    return first + RESIDUAL_SLACK, max(waiting + RESIDUAL_SLACK, kept)


def window_bytes(layer: QKVLayer, sizes: Sizes) -> Callable[[int], int]:
    """The most bytes that a layer allocates between two passes, as a function of the tokens that stay.

    However tokens come, and wherever segments begin and end: of the first segment all places but one may be hidden, and
    of the last all but one empty. A layer that slides by itself takes the same for any window.

    Args:
        layer: of a cache with ``on_full="window"``; what it holds is not looked at.
        sizes: those of its tokens.
    """
    (batch, heads, key_dim, value_dim), dtype = sizes
    store = LayerStore(layer.store.config, *layer.store._given, True, None, *layer.store._vectors, layer.store._rotary)
    config, exact = store.config, batch * heads * (key_dim + value_dim) * dtype.itemsize
    first_room, window_room = (exact * places for places in _exact_places(store))
    tokens = max(store.warm, config.residual_length + config.sink_tokens + store.group) + 2 * SMALL_SEGMENT_TOKENS
    made = [torch.empty(batch, heads, tokens, dim, dtype=dtype, device="meta") for dim in (key_dim, value_dim)]
    store.append(made[0], made[1])
    segment = max(segment_bytes(s) * SMALL_SEGMENT_TOKENS // s.capacity for s in store.packed)
    beside = [x for x in (store._key_head, store._value_head, *store._transforms) if x is not None]
    fixed = sum(x.nbytes() for x in beside) + exact * config.sink_tokens
    # Small segments, of which a short cache has some, take more for what is not counted by tokens.
    fixed += _SMALL_SEGMENTS * _SPARE_BYTES
    growing = [x for x in (store._key_head, store._value_head) if x is not None and not x.given]
    if growing:  # each keeps what it began with, and closes segments, whose last tile may not be full
        fixed += 4 * batch * heads * len(growing)
        fixed += _GROWTHS * (_SPARE_BYTES + 8 * batch * heads + segment * 16 // SMALL_SEGMENT_TOKENS)
    if isinstance(layer, QKVWindowLayer):
        sinks = Sinks(layer.sinks.count, layer.sinks.turning)
        sinks.append(made[0][:, :, : sinks.count], made[1][:, :, : sinks.count])
        turned = 0 if sinks.turning is None else len(sinks.turning.frequencies)
        fixed += sinks.nbytes() + 16 * batch * heads * sinks.length * turned
    slides = layer.sliding_window - 1 if isinstance(layer, QKVSlidingLayer) else None

    def bound(window: int) -> int:
        stay = window if slides is None else slides
        places = stay + 2 * (SMALL_SEGMENT_TOKENS - 1)
        return fixed + max(first_room, window_room - (-places * segment // SMALL_SEGMENT_TOKENS))

    return bound


def _stores(layers: list[Any]) -> Stores:
    """The stores that are ours, with the index of their layer."""
    return [(i, layer.store) for i, layer in enumerate(layers) if isinstance(layer, QKVLayer)]


def _bytes_of(layers: list[Any]) -> int:
    return sum(map(layer_nbytes, layers))
