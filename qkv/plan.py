"""How much memory a cache is going to take, from a model's configuration alone.

Nothing of how memory is allocated is told a second time here. A :class:`qkv.model_shape.ModelShape` says what every
layer hands to its cache. A real :class:`qkv.QKVCache` takes as many such tokens as are planned, on torch's meta device,
where tensors have shapes and no memory, and says how large it is.

Sizes grow evenly once segments are full: a long context is planned as one of a few thousand tokens and a number of
times what a segment brings.

What a plan cannot know are numbers. With a scale per head that is not given, it takes it that no later token exceeds
the scale of the first ones: each time one does, the segment before it is cut short and a new one begins. Sizes are
those on a CPU; elsewhere a segment of one-byte keys may be a few tokens smaller. And they are those between two passes:
in the pass of a prompt, all of it is held, in layers with a window too.

What a cache does when it is full (``max_tokens``, ``max_bytes``, ``on_full``) is decided by the code that decides it
for a cache: the length of a window by its :class:`qkv.limits.Limits`, what moves to a file by a
:class:`qkv.spill.Spill` that writes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import astuple, dataclass
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qkv.cache import QKVCache
from qkv.config import CacheConfig
from qkv.layers import ATTENTION_NAME, QKVLayer, QKVSlidingLayer
from qkv.model_shape import Call, ModelShape
from qkv.planes import Segment
from qkv.room import full_segments, segment_bytes
from qkv.spill import _ALIGNMENT, Spill, _Mapped
from qkv.storage import LARGE_STORE_TOKENS, SEGMENT_TOKENS, SMALL_SEGMENT_TOKENS, LayerStore
from qkv.window import QKVWindowLayer

# A configuration of a model whose attention is qkv's: what a layer hands out is not decoded then, and windows take
# several sequences.
_FUSED = SimpleNamespace(_attn_implementation=ATTENTION_NAME)


@dataclass(frozen=True)
class Size:
    """How large a cache is.

    Attributes:
        allocated: bytes: codes, scales, exact tokens, spare room, and the states of linear attention.
        stored: bytes that a decoding step reads: of the tokens held, without spare room, and those states.
        bits: bits of the tokens held in layers that qkv stores.
        values: numbers held there.
        states: of ``allocated``, bytes that are not in a store of qkv.
        movable: of ``allocated``, bytes of full segments, which ``on_full="offload"`` can move to its file.
        doubtful: bytes that ``max_bytes`` counts on top, since numbers decide whether they are needed.
    """

    allocated: int = 0
    stored: int = 0
    bits: int = 0
    values: int = 0
    states: int = 0
    movable: int = 0
    doubtful: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Size:
        return Size(*(a * times for a in astuple(self)))


@dataclass(frozen=True)
class Places:
    """Where the bytes of a cache are.

    Attributes:
        memory: bytes in memory.
        file: bytes in the file of ``on_full="offload"``, as ``QKVCache.offloaded_bytes()`` counts them: in whole pages.
        reading: bytes in memory while the layer is read of which most lies in the file.
    """

    memory: int
    file: int
    reading: int

    def __add__(self, other: Places) -> Places:
        return Places(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class CachePlan:
    """How large a :class:`qkv.QKVCache` is going to be.

    Args:
        shape: of the model.
        cache: what the cache is to be: the name of a format or set-up, the path of a YAML file, a
            :class:`qkv.CacheConfig`.
        max_cache_len: of a static layout: tokens that may come at most; None: it grows.
        options: as :class:`qkv.QKVCache` takes them, ``max_tokens``, ``max_bytes`` and ``on_full`` among them.

    Attributes:
        config: the :class:`qkv.CacheConfig` of the cache.

    Raises:
        ValueError: as :class:`qkv.QKVCache`.
    """

    def __init__(
        self, shape: ModelShape, cache: str | Path | CacheConfig, max_cache_len: int | None = None, **options: Any
    ):
        self.shape, self.max_cache_len = shape, max_cache_len
        parts = [(shape.calls, max_cache_len)]
        if shape.cross_calls is not None:
            parts.append((shape.cross_calls, None))
        self._parts = [
            _Part(QKVCache(shape.config, cache, max_cache_len=length, **options), calls) for calls, length in parts
        ]
        self.config = self._parts[0].config

    def size(self, context: int, batch: int = 1, steps: int = 0, encoder_tokens: int = 0) -> Size:
        """The size of the cache of ``batch`` sequences of ``context`` tokens.

        Args:
            context: tokens in all that come, at least 1.
            batch: sequences, at least 1.
            steps: how many of the tokens come one by one behind the others, which come in one pass. It changes how
                much spare room there is: segments are as long as is fit when they begin.
            encoder_tokens: tokens of the encoder's output, for a model that has one; 0: as many as it always gives
                (Whisper), or as many as ``context``.

        Raises:
            ValueError: numbers out of range; a format that does not go with the model's heads; of a cache with
                ``on_full="window"``, too few bytes for any window, or more tokens than a table of positions has. Tokens
                that another cache would refuse raise nothing, see :meth:`fits`.
        """
        passes = self._passes(context, batch, steps, encoder_tokens)
        sizes = (part.size(prompt, more, batch) for part, prompt, more in passes)
        return sum(sizes, start=Size())

    def nbytes(self, context: int, batch: int = 1, **more: int) -> int:
        """Bytes that the cache takes, see :meth:`size`: ``QKVCache.nbytes()``, and the states of linear attention."""
        return self.size(context, batch, **more).allocated

    def places(self, context: int, batch: int = 1, steps: int = 0, encoder_tokens: int = 0) -> Places:
        """Where the bytes are after all passes, with the arguments of :meth:`size`.

        Without ``on_full="offload"`` all are in memory. With it the time that this takes grows with ``context``.

        Raises:
            ValueError: as :meth:`size`.
        """
        if self.config.on_full != "offload":
            held = self.nbytes(context, batch, steps=steps, encoder_tokens=encoder_tokens)
            return Places(held, 0, held)
        passes = self._passes(context, batch, steps, encoder_tokens)
        return sum((part.places(prompt, more, batch) for part, prompt, more in passes), start=Places(0, 0, 0))

    def fits(self, context: int, batch: int = 1, free: int | None = None) -> bool:
        """Whether a cache takes so many tokens, and where ``free`` is given, in that many bytes of memory.

        What is read of a file comes into memory a layer at a time: with ``on_full="offload"`` each has to have room
        beside what of the others can not be moved.

        A group of tokens that is not full yet takes more than it will then, and so do tokens that no scale has been
        taken from: fewer tokens have to fit, too.

        Args:
            context, batch: as :meth:`size`; all tokens come in one pass.
            free: bytes of memory; None: not known.

        Raises:
            ValueError: as :meth:`size`, but for a window that is too small, or a table of positions: such do not fit.
        """
        config = self.config
        kept = config.on_full in (None, "error")
        if kept and config.max_tokens is not None and context > config.max_tokens:
            return False
        return all(self._fits(tokens, batch, free) for tokens in (context, *self._larger(context)))

    def _fits(self, tokens: int, batch: int, free: int | None) -> bool:
        """As :meth:`fits`, of just so many tokens."""
        try:
            needed = [part.needed(prompt, batch) for part, prompt, _ in self._passes(tokens, batch, 0, 0)]
        except ValueError:
            if self.config.on_full == "window":
                return False
            raise
        return None not in needed and (free is None or sum(n or 0 for n in needed) <= free)

    def _larger(self, context: int) -> list[int]:
        """Fewer tokens than ``context`` that may take more: where the most of them are exact."""
        found = {n for group in self._parts[0].groups(1) for n in group.exact_most(context)}
        return sorted(found - {context}, reverse=True)

    def window(self, batch: int = 1) -> int | None:
        """Tokens of each sequence that stay, the first ones included; None: nothing leaves layers of full attention.

        Raises:
            ValueError: as :meth:`size`.
        """
        for group in self._parts[0].groups(batch):
            if isinstance(group.layer, QKVWindowLayer):
                return group.layer.window + group.layer.sinks.count
        return None

    @property
    def period(self) -> int:
        """Tokens after which the same happens again, in a context of many."""
        return lcm(*(group.period for part in self._parts for group in part.groups(1)))

    def _passes(self, context: int, batch: int, steps: int, encoder_tokens: int) -> Iterator[tuple[_Part, int, int]]:
        """Each part with the tokens of its first pass, and the number of steps behind it."""
        for name, value, least in (("context", context, 1), ("batch", batch, 1), ("steps", steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if steps > context:
            raise ValueError(f"steps={steps} are more than the {context} tokens of the context")
        encoder_tokens = encoder_tokens or getattr(self.shape.config, "max_source_positions", None) or context
        # Of attention to an encoder there is a second part.
        return zip(self._parts, (context - steps, encoder_tokens), (steps, 0), strict=False)


class _Part:
    """One cache of a model: an encoder-decoder has two.

    Args:
        cache: new; it stays empty.
        calls: for each layer with a cache, what is handed to it.
    """

    def __init__(self, cache: QKVCache, calls: dict[int, tuple[Call, ...]]):
        self._cache, self._calls = cache, calls
        self.config = cache.config
        self._known: dict[int, list[_Group]] = {}

    def groups(self, batch: int) -> list[_Group]:
        """The layers, those that store alike together. How many tokens ``max_bytes`` are depends on the batch."""
        by_bytes = self.config.on_full == "window" and self.config.max_bytes is not None
        key = batch if by_bytes else 0
        if key not in self._known:
            cache = deepcopy(self._cache)
            window = self._window(batch) if by_bytes else None
            for layer in cache.layers:
                if window is not None and isinstance(layer, QKVWindowLayer):
                    layer.set_window(window)
            self._known[key] = _layer_groups(cache, self._calls)
        return self._known[key]

    def _window(self, batch: int) -> int | None:
        """Tokens behind the first ones that ``max_bytes`` let stay: asked of a cache that takes some."""
        cache = deepcopy(self._cache)
        for index, handed in self._calls.items():
            layer = cache.layers[index]
            if isinstance(layer, QKVLayer):
                layer.model_config = _FUSED
            for call in handed:
                if isinstance(layer, QKVLayer) and call.method == "update":
                    assert cache._limits is not None
                    cache._limits.check(cache.layers, index, *call.made(batch, 1))
                call.make(layer, batch, 1)
        windows = [layer.window for layer in cache.layers if isinstance(layer, QKVWindowLayer)]
        return windows[-1] if windows else None

    def size(self, prompt: int, steps: int, batch: int) -> Size:
        """The size after a pass of ``prompt`` tokens and single steps."""
        sizes = (group.size(prompt, steps, batch) * group.count for group in self.groups(batch))
        return sum(sizes, start=Size())

    def needed(self, prompt: int, batch: int) -> int | None:
        """Bytes of memory for a pass of ``prompt`` tokens; None: the limits do not let that many come."""
        size, limit = self.size(prompt, 0, batch), self.config.max_bytes
        if limit is None or self.config.on_full == "window":
            return size.allocated
        if self.config.on_full != "offload":
            return size.allocated if size.allocated + size.doubtful <= limit else None
        stored = size.allocated - size.states
        most = max(group.size(prompt, 0, batch).movable for group in self.groups(batch))
        # While a layer is read, all of it is in memory.
        fits = stored - size.movable + most + size.doubtful <= limit
        return size.states + min(stored, limit) if fits else None

    def places(self, prompt: int, steps: int, batch: int) -> Places:
        """Where the bytes are with ``on_full="offload"``: layers make room in turn, as qkv.limits does it."""
        limit, spill = self.config.max_bytes, _Unwritten()
        assert limit is not None
        of = {index: group for group in self.groups(batch) for index in group.indices}
        stores = {i: layer.store for i, layer in enumerate(self._cache.layers) if isinstance(layer, QKVLayer)}
        running = {id(group): group.passes(prompt, steps, batch) for group in of.values()}
        for n in [prompt] * (prompt > 0) + [1] * steps:
            layers = {key: next(run) for key, run in running.items()}
            for index, group in sorted(of.items(), key=lambda pair: pair[0]):
                layer = layers[id(group)]
                if not isinstance(layer, QKVLayer):
                    continue
                # Layers of a group go on at different times: each has the store as it is when its turn comes.
                now = _snapshot(layer.store)
                if n >= SMALL_SEGMENT_TOKENS:
                    grows = now.nbytes() - stores[index].nbytes()
                    spill.make_room(list(stores.items()), index, limit - max(0, grows))
                stores[index] = now
                spill._bytes.pop(index, None)
                spill.make_room(list(stores.items()), index, limit)
        held = self.size(prompt, steps, batch).allocated
        filed = [spill._count(index, store)[1] for index, store in stores.items()]
        in_file = spill.moved_bytes(list(stores.items()))
        return Places(held - sum(filed), in_file, held - sum(filed) + max(filed, default=0))


def _snapshot(store: LayerStore) -> LayerStore:
    """A store whose size stays as it is when the other goes on."""
    fresh = copy(store)
    fresh.packed = list(store.packed)
    if store._open and store.packed[-1].room:
        fresh.packed[-1] = copy(store.packed[-1])
    return fresh


class _Unwritten(Spill):
    """Decides as the file of a cache does, and writes nothing."""

    def rest(self) -> None:
        self._read = None

    def _written(self, segment: Segment) -> _Mapped:
        sizes = (tensor.untyped_storage().nbytes() for tensor in segment.tensors())
        size = sum(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return _Mapped(segment, segment.key.codes, None, size)  # type: ignore[arg-type]  # nothing is read there


class _Group:
    """Layers of one model that store alike, of which one is planned.

    Attributes:
        layer: one of them, empty.
        indices: which they are.
        period: tokens after which the same happens again.
    """

    def __init__(self, layer: Any, calls: tuple[Call, ...], index: int):
        self.layer, self._calls, self.indices = layer, calls, [index]
        self.period = SEGMENT_TOKENS
        self._even = 0  # tokens from which on sizes grow evenly
        self._known: dict[tuple[int, int, int], Size] = {}
        store = layer.store if isinstance(layer, QKVLayer) else None
        if store is not None:
            config = store.config
            self.period = lcm(SEGMENT_TOKENS, store.group)
            self._even = config.sink_tokens + config.residual_length + store.warm + store.group
            if config.residual_length > 0 or store.group > 1:  # segments are small until then
                self._even += LARGE_STORE_TOKENS
        # A layer of transformers holds as much as its window, which may be none.
        self._even += (getattr(layer, "sliding_window", None) or 0) + 2 * self.period
        if store is not None and store.capacity is not None and not isinstance(layer, QKVSlidingLayer):
            self._even = store.capacity  # one segment for all: nothing to be gained
        if isinstance(layer, QKVWindowLayer):
            self._even += layer.window + layer.sinks.count
            if layer.positions is not None:
                self._even = layer.positions  # more are refused

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.indices)

    def exact_most(self, context: int) -> list[int]:
        """Of fewer than ``context`` tokens those numbers at which the most wait to be encoded.

        Of the first ones, and of the last: for their group to be full, with the last segment full or not.
        """
        if not isinstance(self.layer, QKVLayer):
            return []
        store, residual = self.layer.store, self.layer.store.config.residual_length
        last = context - (context - residual + 1) % store.group
        first = max(store.warm, residual + store.group) - 1
        found = [last, last - store.group, first]
        if isinstance(self.layer, QKVSlidingLayer):  # just behind the beginning of a segment it holds one more
            sinks = store.config.sink_tokens
            found.append(sinks + (context - sinks - 1) // SMALL_SEGMENT_TOKENS * SMALL_SEGMENT_TOKENS + 1)
        return [n for n in found if 0 < n < context]

    def size(self, prompt: int, steps: int, batch: int) -> Size:
        over = max(0, prompt - self._even) // self.period
        if over < 2:
            return self._measured(prompt, steps, batch)
        first = self._measured(prompt - over * self.period, steps, batch)
        second = self._measured(prompt - (over - 1) * self.period, steps, batch)
        return second * over + first * (1 - over)

    def _measured(self, prompt: int, steps: int, batch: int) -> Size:
        key = (prompt, steps, batch)
        if key not in self._known:
            *_, layer = self.passes(prompt, steps, batch)
            self._known[key] = _size_of(layer)
        return self._known[key]

    def passes(self, prompt: int, steps: int, batch: int) -> Iterator[Any]:
        """One of the layers, after a pass of ``prompt`` tokens if there are any, and after each step."""
        layer = deepcopy(self.layer)
        if prompt:
            for call in self._calls:
                call.make(layer, batch, prompt)
            yield layer
        for _ in range(steps):
            for call in self._calls:
                if call.tokens_at is not None or not prompt:
                    call.make(layer, batch, 1)
            yield layer


def _size_of(layer: Any) -> Size:
    """The size of one layer of any kind, on the meta device."""
    states = _state_bytes(layer)
    if not isinstance(layer, QKVLayer):
        held = states + sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor))
        return Size(held, held, states=held)
    store, bits = layer.store, layer.stored_bits()
    return Size(
        allocated=layer.nbytes() + _copied_bytes(layer) + states,
        stored=bits // 8 + states,
        bits=bits,
        values=layer.stored_values(),
        states=states,
        movable=sum(map(segment_bytes, full_segments(store))),
        doubtful=_doubtful_bytes(store),
    )


def _doubtful_bytes(store: LayerStore) -> int:
    """Bytes of a segment that begins if a scale per head has to grow; 0 where there are no such scales."""
    grow = any(head is not None and not head.given for head in (store._key_head, store._value_head))
    return max(map(segment_bytes, store.packed), default=0) if grow else 0


def _copied_bytes(layer: QKVLayer) -> int:
    """Bytes of the keys of the first tokens as they came, complex128, which are not made on the meta device."""
    if not isinstance(layer, QKVWindowLayer) or layer.sinks.turning is None or layer.store.shape is None:
        return 0
    batch, heads, _, _ = layer.store.shape
    return 16 * batch * heads * layer.sinks.length * len(layer.sinks.turning.frequencies)


def _state_bytes(layer: Any) -> int:
    """Bytes of the states of linear attention, which transformers keeps in dictionaries."""
    held = (x for states in vars(layer).values() if isinstance(states, dict) for x in states.values())
    return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))


def _layer_groups(cache: QKVCache, calls: dict[int, tuple[Call, ...]]) -> list[_Group]:
    groups: dict[Any, _Group] = {}
    for index, handed in calls.items():
        layer = cache.layers[index]
        key: tuple[Any, ...] = (type(layer), getattr(layer, "sliding_window", None), handed)
        if isinstance(layer, QKVLayer):
            layer.model_config = _FUSED
            store = layer.store
            given = tuple(x is not None for x in (*store._given, *store._vectors))
            key = (*key, store.config, given)
        if isinstance(layer, QKVWindowLayer):
            turning = layer.sinks.turning
            turned = None if turning is None else len(turning.frequencies)
            key = (*key, layer.window, layer.sinks.count, turned, layer.positions)
        if key in groups:
            groups[key].indices.append(index)
        else:
            groups[key] = _Group(layer, handed, index)
    return list(groups.values())
