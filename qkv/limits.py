"""What happens when a cache is full: how many bytes it is going to take, counted before anything is written.

Bytes are predicted by doing the same on torch's meta device, where tensors have sizes and no numbers. Layers that store
alike are counted once, and nothing is counted while a generous guess says that there is room.
"""

from __future__ import annotations

import mmap
from copy import copy, deepcopy
from typing import Any

import torch

from qkv.config import CacheConfig
from qkv.layers import QKVLayer, QKVSlidingLayer, layer_nbytes, states_nbytes
from qkv.sinks import Sinks
from qkv.spill import Spill
from qkv.storage import SEGMENT_TOKENS, SMALL_SEGMENT_TOKENS, LayerStore
from qkv.window import QKVWindowLayer

# Of one token: batch, kv_heads, key_dim, value_dim, and the type.
Sizes = tuple[tuple[int, int, int, int], torch.dtype]


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
        self.spill = Spill(config.offload_folder) if self.on_full == "offload" else None
        if self.spill is not None:
            self.spill.open()  # a folder that is not there shows now

    def check(self, layers: list[Any], index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What is to be done before a layer takes new tokens ``[batch, kv_heads, n, head_dim]``.

        Raises:
            ValueError: the tokens would exceed a limit; no layer has changed; in a first pass all are empty again.
        """
        layer = layers[index]
        if self.spill is not None:
            self.spill.rest()
            if keys.device.type != "cpu":
                raise ValueError(
                    f"on_full='offload' is for caches on the CPU, and the keys are on {keys.device}; there, "
                    "QKVCache(..., offloading=True) moves whole layers to the CPU's memory"
                )
        if not isinstance(layer, QKVLayer) or keys.dim() != 4 or values.dim() != 4 or keys.shape[2] == 0:
            return
        sizes = ((keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3]), keys.dtype)
        if self.spill is not None and self.max_bytes is not None:
            self.spill.check(index, layer.store, self.max_bytes)
        if self.on_full == "window":
            if isinstance(layer, QKVWindowLayer) and layer._window is None:
                self._set_windows(layers, sizes)
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
        if self.max_bytes is None or self.on_full != "error":
            return
        if index == self._first or (layer.store.shape is None and sizes != self._assumed):
            self._check_bytes(layers, index, n, held, sizes)

    def after(self, layers: list[Any], index: int) -> None:
        """What is to be done after a layer has taken new tokens: moving full segments to the file."""
        if self.spill is not None and isinstance(layers[index], QKVLayer):
            assert self.max_bytes is not None
            self.spill.make_room(_stores(layers), index, self.max_bytes)

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
        total = 0
        counted: dict[Any, int] = {}
        for i, layer in enumerate(layers):
            total += states_nbytes(layer)
            if not isinstance(layer, QKVLayer):
                continue
            # In a pass that has begun, some layers have their tokens already.
            more = n if layer.get_seq_length() <= held or i == index else 0
            own = sizes if i == index else self._assumed
            key = (_state(layer), more, own)
            if key not in counted:
                counted[key] = bytes_after(layer, more, own)
            total += counted[key]
        if total > self.max_bytes:
            before = _bytes_of(layers)
            if began and index != self._first:
                for layer in layers:
                    layer.reset()
            raise ValueError(
                f"the cache is full: it holds {held} tokens in {before} bytes, with {n} more it would take {total}, "
                f"and max_bytes={self.max_bytes}; take tokens back with crop() or reset(), or make it with a larger "
                "max_bytes, or with on_full='window' or 'offload'"
            )
        self._passed = (held + n, total, known)

    def _set_windows(self, layers: list[Any], sizes: Sizes) -> None:
        """Tells all layers how many tokens stay, as many as ``max_bytes`` allows."""
        assert self.max_bytes is not None

        def total(window: int) -> int:
            counted: dict[Any, int] = {}
            result = 0
            for layer in layers:
                result += states_nbytes(layer)
                if not isinstance(layer, QKVLayer):
                    continue
                key = _state(layer)
                if key not in counted:
                    counted[key] = _window_bytes(layer, window, sizes)
                result += counted[key]
            return result

        least, most = 0, 1
        while total(most) <= self.max_bytes and most < 1 << 30:
            least, most = most, most * 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if total(middle) <= self.max_bytes else (least, middle)
        if self.max_tokens is not None:
            sinks = next(layer.sinks.count for layer in layers if isinstance(layer, QKVWindowLayer))
            least = min(least, self.max_tokens - sinks)
        if least < 1:
            raise ValueError(
                f"a window of one token takes {total(1)} bytes, and max_bytes={self.max_bytes}; give more bytes, or "
                "fewer sink_tokens"
            )
        for layer in layers:
            if isinstance(layer, QKVWindowLayer):
                layer.set_window(least)

    def offloaded_bytes(self, layers: list[Any]) -> int:
        """Bytes that layers have in a file."""
        if self.spill is None:
            return 0
        self.spill.prune(_stores(layers))
        return self.spill.nbytes

    def share_file(self, other: Limits, layers: list[Any]) -> None:
        """What the forked ``layers`` of a fork hold in the file of the cache that it is from counts as moved."""
        if self.spill is not None and other.spill is not None:
            self.spill.share(other.spill, _stores(layers))

    def adopt(self, memory: mmap.mmap, layers: list[Any]) -> None:
        """What loaded layers hold in a mapped file counts as moved."""
        if self.spill is not None:
            self.spill.adopt(memory, _stores(layers))

    def __deepcopy__(self, memo: dict[int, Any]) -> Limits:
        fresh = copy(self)
        memo[id(self)] = fresh
        fresh.spill = self.spill.empty() if self.spill is not None else None
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "spill": self.spill.empty() if self.spill is not None else None}


def bytes_after(layer: QKVLayer, n: int, sizes: Sizes) -> int:
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
    total = store.nbytes()
    grow = [head for head in (store._key_head, store._value_head) if head is not None and not head.given]
    if grow and n and store.packed:
        # A scale that grows begins a segment of its own, and whether it does depends on the numbers.
        total += max(sum(t.untyped_storage().nbytes() for p in s.planes() for t in p.tensors()) for s in store.packed)
    return total


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


def _state(layer: QKVLayer) -> Any:
    """What the sizes of a layer depend on."""
    store = layer.store
    exact = [None if s is None else (s.start, s.length, s.capacity) for s in (store.sink, store.residual)]
    packed = tuple((s.start, s.length, s.capacity) for s in store.packed)
    given = tuple(x is not None for x in (*store._given, *store._vectors))
    kind = (type(layer), getattr(layer, "sliding_window", None), store.config, store.capacity, given)
    said = (store.shape, store.length, store.first, store._open, store._encoded, len(store._empty))
    return (kind, *said, *exact, packed)


def _growth(layers: list[Any], tokens: int, sizes: Sizes) -> int:
    """A generous guess of the bytes that ``tokens`` more take in all layers: as if nothing were made smaller."""
    (batch, heads, key_dim, value_dim), dtype = sizes
    ours = [layer for layer in layers if isinstance(layer, QKVLayer)]
    waiting = (x.store.config.residual_length + x.store.group + x.store.warm for x in ours)
    room = 2 * SEGMENT_TOKENS + max(waiting, default=0)
    each = max(dtype.itemsize, 4) * 2 * batch * heads * (key_dim + value_dim)
    return len(ours) * each * (tokens + room)


def _window_bytes(layer: QKVLayer, window: int, sizes: Sizes) -> int:
    """The most bytes that a layer allocates between two passes when it is full."""
    (batch, heads, key_dim, value_dim), dtype = sizes
    store = deepcopy(layer.store)
    store.reset()
    tokens = layer.sliding_window if isinstance(layer, QKVSlidingLayer) else window
    tokens += SMALL_SEGMENT_TOKENS  # hidden in front of the window, in a segment that is used
    made = [torch.empty(batch, heads, tokens, dim, dtype=dtype, device="meta") for dim in (key_dim, value_dim)]
    store.append(made[0], made[1])
    total = store.nbytes()
    if isinstance(layer, QKVWindowLayer):
        sinks = Sinks(layer.sinks.count, layer.sinks.turning)
        sinks.append(made[0][:, :, : sinks.count], made[1][:, :, : sinks.count])
        turned = 0 if sinks.turning is None else len(sinks.turning.frequencies)
        total += sinks.nbytes() + 16 * batch * heads * sinks.length * turned
    return total


def _stores(layers: list[Any]) -> list[tuple[int, LayerStore]]:
    """The stores that are ours, with the index of their layer."""
    return [(i, layer.store) for i, layer in enumerate(layers) if isinstance(layer, QKVLayer)]


def _bytes_of(layers: list[Any]) -> int:
    return sum(map(layer_nbytes, layers))
