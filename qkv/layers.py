"""The cache of one layer: transformers' contract for layers, over a packed store."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from qkv import graph
from qkv.attention import attention
from qkv.config import CacheConfig
from qkv.lazy import PackedTensor
from qkv.native import SlowPathWarning
from qkv.rotary import Rotary
from qkv.storage import LayerStore
from qkv.view import KVView

# The name under which hf.py registers the fused attention.
ATTENTION_NAME = "qkv"


class QKVLayer(CacheLayerMixin):
    """The cache of one attention layer.

    Args:
        config: how to store, already that of this layer.
        model_config: the model's configuration, which tells whether the fused attention is on; None: not known.
        key_scale, value_scale: given static scales, float32 ``[kv_heads]``, or None.
        key_centre, key_multiplier: given equalizing vectors, float32 ``[kv_heads, key_dim]``, or None.
        capacity: tokens that may come at most, for a static layout that ``torch.compile`` sees through; None: no limit.
        rotary: which channels of keys positions turn together, or None.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        config: CacheConfig,
        model_config: Any = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
        capacity: int | None = None,
        key_centre: torch.Tensor | None = None,
        key_multiplier: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ):
        vectors = (key_centre, key_multiplier)
        self.store = LayerStore(config, key_scale, value_scale, self.is_sliding, capacity, *vectors, rotary)
        self.capacity = capacity
        self.is_compileable = capacity is not None
        self.handle = graph.new_handle(self) if capacity is not None else None
        self.offloads = False  # whether the store leaves the device behind each update: views must outlive that
        self.model_config = model_config
        self.said_unfused: list[bool] = []  # not empty: the warning was given; shared by the layers of a cache
        self._view: KVView | None = None  # what `keys` and `values` show, until the next update
        self._pass: KVView | None = None  # what the last `append_now` stored, as its own pass sees it
        self.is_initialized = False
        self.served: str | None = None  # the backend that attended last

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The keys, as :meth:`update` would hand them out: packed or decoded. None while the layer is empty.

        Cross-attention takes the keys and values of the encoder from here at every step.
        """
        return self._stored(is_key=True)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The values, like :attr:`keys`."""
        return self._stored(is_key=False)

    @property
    def fused(self) -> bool:
        """Whether the model's attention takes packed keys and values."""
        return self.model_config is not None and self.model_config._attn_implementation == ATTENTION_NAME

    def _stored(self, is_key: bool) -> torch.Tensor | None:
        if self.store.shape is None:
            return None
        if self.handle is not None and torch.compiler.is_compiling():
            return self._in_graph(*self._like())[0 if is_key else 1]
        if not self.fused:
            return self._whole_view().decode()[0 if is_key else 1]
        if self._view is None or self._view.stale:
            self._view = self._whole_view()
            self._view.on_served = self._set_served
        return PackedTensor(self._view, is_key)

    def _whole_view(self) -> KVView:
        return KVView(self.store)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 while the layer is empty."""
        return self.store.shape[0] if self.store.shape is not None else -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes shapes, dtype and device from tensors ``[batch, kv_heads, any, head_dim]``; stores nothing."""
        self.store.append(key_states[:, :, :0], value_states[:, :, :0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens; gives what attention is to use for all tokens.

        Args:
            key_states, value_states: ``[batch, kv_heads, n, head_dim]``.

        Returns:
            Keys and values ``[batch, kv_heads, length, head_dim]``: ordinary tensors, decoded, or where the model's
            attention takes them packed, :class:`~qkv.lazy.PackedTensor`.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, or more tokens than a static layout has room for; the
                layer is unchanged.
        """
        if self.handle is not None and torch.compiler.is_compiling():
            torch.ops.qkv.append(self.handle, key_states, value_states)
            return self._in_graph(key_states, value_states)
        if self.store.away:
            self.prefetch()
        view = self._append(key_states, value_states)
        self._tell_length()
        return self._hand_out(view)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KVView:
        late = self.store.append(key_states, value_states)
        return KVView(self.store, late, first=self.store.first if self.offloads else None)

    def _tell_length(self) -> None:
        if self.handle is not None:
            self.handle[1] = self.store.length

    # ---- what the operations of graph.py ask, see there -------------------------------------------------------------

    def _in_graph(self, keys_like: torch.Tensor, values_like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.handle is not None
        assert self.capacity is not None
        return graph.handed_out(self.handle, keys_like, values_like, self.capacity, self.fused)

    def _like(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.store.shape is not None
        batch, heads, key_dim, value_dim = self.store.shape
        one = torch.empty(1, dtype=self.store.dtype, device=self.store.device)
        return one.expand(batch, heads, 1, key_dim), one.expand(batch, heads, 1, value_dim)

    def append_now(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Stores new tokens, as :meth:`update`; gives the number of tokens that have come.

        The caller writes it into the handle that the graph has, which may be a copy: elsewhere in the graph the old
        number may still be wanted.
        """
        if self.store.away:
            self.prefetch()
        self._pass = self._append(keys, values)
        self._pass.on_served = self._set_served
        self.is_initialized = True
        return self.store.length

    def attend_now(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        softmax_scale: float,
        causal: bool,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the pass whose tokens were stored last; arguments as :func:`qkv.attention.attention`."""
        view = self._last_pass()
        backend = self.store.config.backend
        return attention(query, view, view.columns(mask), softmax_scale, causal, softcap, sinks, backend)

    def decode_now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, kv_heads, capacity, head_dim]``; zeros where there is no token."""
        return self._decoded(self._last_pass())

    def _last_pass(self) -> KVView:
        if self._pass is None or self._pass.stale:
            self._pass = self._whole_view()
            self._pass.on_served = self._set_served
        return self._pass

    def _decoded(self, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
        self.served = "decoded"
        if self.store.quantized and not self.said_unfused and self.model_config is not None and not self.fused:
            self.said_unfused.append(True)
            _warn_unfused(self.model_config._attn_implementation)
        return view.decode_for_model()

    def _hand_out(self, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        if self.model_config is None or self.fused:
            view.on_served = self._set_served
            return PackedTensor(view, is_key=True), PackedTensor(view, is_key=False)
        return self._decoded(view)

    def _set_served(self, backend: str) -> None:
        self.served = backend

    def get_seq_length(self) -> int:
        """Tokens that have come; while a graph with a static layout is compiled, a tensor of no dimension."""
        if self.handle is not None and torch.compiler.is_compiling():
            return self.handle[1]  # type: ignore[return-value]
        return self.store.length

    def get_max_length(self) -> int:
        """Tokens that may come; -1: there is no limit."""
        return self.capacity if self.capacity is not None else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the mask for ``query_length`` new tokens."""
        return self.capacity if self.capacity is not None else self.store.length + query_length, 0

    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.store.nbytes()

    def stored_bits(self) -> int:
        """Bits of the codes, scales and offsets of the tokens stored, without spare room."""
        return self.store.stored_bits()

    def stored_values(self) -> int:
        """Numbers stored: tokens x heads x (key_dim + value_dim)."""
        return self.store.stored_values()

    def held(self) -> int:
        """Tokens that are held."""
        return self.store.length - self.store.first

    def reset(self) -> None:
        """Forgets all tokens and every scale that was not given."""
        self.store.reset()
        self._view = self._pass = None
        self._tell_length()
        self.is_initialized = False
        self.served = None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number (transformers' convention).

        Raises:
            ValueError: a positive number.
        """
        self.check_crop(tokens_to_remove)
        self.store.crop(max(0, self.store.length + tokens_to_remove))
        self._tell_length()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises what :meth:`crop` would raise, and changes nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")

    def _map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.store.map_batch(function)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rearranges the batch for beam search: row i becomes the old row ``beam_idx[i]``."""
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch ``repeats`` times, copies side by side."""
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows ``indices`` of the batch."""
        self._map_batch(lambda x: x[indices.to(x.device), ...])

    def offload(self) -> None:
        """Moves the stored tokens to the CPU's memory; the next update, or :meth:`prefetch`, fetches them."""
        self.store.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the stored tokens back to the model's device."""
        self.store.move(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> QKVLayer:
        fresh = type(self).__new__(type(self))
        memo[id(self)] = fresh
        # The model's configuration is shared: it says whether the fused attention is on, now and later.
        kept = {"model_config": self.model_config, "_view": None, "_pass": None}
        fresh.__dict__.update({k: kept[k] if k in kept else deepcopy(v, memo) for k, v in self.__dict__.items()})
        fresh._take_new_handle()
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None, "_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_new_handle()

    def _take_new_handle(self) -> None:
        if self.capacity is not None:
            self.handle = graph.new_handle(self, self.store.length)

    def __repr__(self) -> str:
        store = self.store
        names = [f.name if f is not None else "none" for f in (store.key_format, store.value_format)]
        return f"{type(self).__name__}(key={names[0]}, value={names[1]}, tokens={store.length})"


class QKVSlidingLayer(QKVLayer):
    """The cache of an attention layer with a sliding window, or of chunked attention.

    It holds what the next query can see: the last ``sliding_window - 1`` tokens. Tokens leave in front without a copy;
    their memory goes, a segment at a time.

    Args:
        sliding_window: tokens that a query sees, its own included.
        others, more: as :class:`QKVLayer`.
    """

    is_sliding = True

    def __init__(self, *others: Any, sliding_window: int, **more: Any):
        super().__init__(*others, **more)
        self.sliding_window = sliding_window
        self.record_past = False
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)

    def activate_past_recording(self) -> None:
        """From now on tokens leave only when :meth:`crop` is called, so that it can go back beyond the window."""
        self.record_past = True

    def _first_visible(self, length: int) -> int:
        """Position of the first token that the query behind ``length`` tokens sees."""
        return max(0, length - self.sliding_window + 1)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KVView:
        first = self._first_visible(self.store.length)
        late = self.store.append(key_states, value_states)
        view = KVView(self.store, late, first=first)
        if not self.record_past:
            self.store.drop_before(self._first_visible(self.store.length))
        return view

    def _whole_view(self) -> KVView:
        return KVView(self.store, first=self._first_visible(self.store.length))

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window if self.capacity is None else min(self.sliding_window, self.capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the mask for ``query_length`` new tokens.

        In a static layout the mask is as wide as all tokens that may come, so that its shape and offset never change.
        """
        if self.capacity is not None:
            return self.capacity, 0
        first = self._first_visible(self.store.length)
        return self.store.length - first + query_length, first

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, and then those in front that are out of the window.

        Args:
            tokens_to_remove: how many, as a negative number (transformers' convention).

        Raises:
            ValueError: a positive number.
            RuntimeError: the window was full, and tokens that are needed again were not kept; see
                :meth:`activate_past_recording`.
        """
        super().crop(tokens_to_remove)
        self.store.drop_before(self._first_visible(self.store.length))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises what :meth:`crop` would raise, and changes nothing."""
        if self.store.length >= self.sliding_window and not self.record_past:
            raise RuntimeError(
                "a sliding window that was full cannot be cropped: the tokens that would be seen again are gone; call "
                "activate_past_recording before the tokens come that are to be cropped"
            )
        super().check_crop(tokens_to_remove)
        left = max(0, self.store.length + tokens_to_remove)
        if self._first_visible(left) < self.store.first and left > 0:
            raise RuntimeError(
                f"cannot take back {-tokens_to_remove} tokens: the window would reach back to position "
                f"{self._first_visible(left)}, and tokens before {self.store.first} went with the last crop"
            )


def states_nbytes(layer: Any) -> int:
    """Bytes that a layer of any kind holds beside our store. The states of linear attention lie in dictionaries."""
    states = [x for held in vars(layer).values() if isinstance(held, dict) for x in held.values()]
    others = [] if isinstance(layer, QKVLayer) else vars(layer).values()
    return sum(x.nbytes for x in (*states, *others) if isinstance(x, torch.Tensor))


def layer_nbytes(layer: Any) -> int:
    """Bytes that a layer of any kind holds."""
    return states_nbytes(layer) + (layer.nbytes() if isinstance(layer, QKVLayer) else 0)


if TYPE_CHECKING:

    class _Both(QKVLayer, LinearAttentionLayer):  # type: ignore[misc]
        """What a hybrid is. Derived from both here, the classes below would have no order."""
else:
    _Both = object


class _Hybrid(_Both):
    """What a layer of ours and a ``LinearAttentionLayer``, whose states stay as they are, need to be one.

    Args:
        number_of_states: states of the linear attention.
        others, more: as the attention part.
    """

    is_croppable = LinearAttentionLayer.is_croppable

    def __init__(self, *others: Any, number_of_states: int = 1, **more: Any):
        super().__init__(*others, **more)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of the attention part with two positional tensors, of the linear part with keywords."""
        if args:
            super().lazy_initialization(*args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        """Moves both parts to the CPU's memory."""
        LinearAttentionLayer.offload(self)
        super().offload()

    def prefetch(self) -> None:
        """Moves both parts back to the model's device."""
        LinearAttentionLayer.prefetch(self)
        super().prefetch()

    def get_max_length(self) -> int:
        """Tokens that may come; -1: there is no limit, of which transformers' hybrid layers know no other either."""
        return self.capacity if self.capacity is not None else -1

    def reset(self) -> None:
        """Forgets all tokens and states."""
        LinearAttentionLayer.reset(self)
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rearranges the batch of both parts for beam search."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of both parts."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        super().crop(tokens_to_remove)


class QKVHybridLayer(_Hybrid, QKVLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, metaclass]
    """The cache of a layer with both linear attention and full attention."""


class QKVHybridSlidingLayer(  # type: ignore[misc, metaclass]
    _Hybrid, QKVSlidingLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """The cache of a layer with both linear attention and a sliding window."""


def layer_like(plain: Any, **arguments: Any) -> Any:
    """Our layer for a layer of ``DynamicCache``; None where there is nothing of ours for its kind.

    Args:
        plain: a layer of ``DynamicCache``, new.
        arguments: as :class:`QKVLayer`.
    """
    kind = type(plain)  # exactly: what a model derives from these keeps something that we do not know
    if kind is DynamicLayer:
        return QKVLayer(**arguments)
    if kind is DynamicSlidingWindowLayer:
        return QKVSlidingLayer(sliding_window=plain.sliding_window, **arguments)
    if kind is LinearAttentionAndFullAttentionLayer:
        return QKVHybridLayer(**arguments, **{"number_of_states": plain.number_of_states})
    if kind is LinearAttentionAndSlidingWindowAttentionLayer:
        arguments |= {"sliding_window": plain.sliding_window, "number_of_states": plain.number_of_states}
        return QKVHybridSlidingLayer(**arguments)
    return None


def _warn_unfused(implementation: str) -> None:
    warnings.warn(
        f"qkv: the model's attention is {implementation!r}, so one layer at a time is decoded: correct, but slower; "
        "call qkv.enable(model) for attention over the codes",
        SlowPathWarning,
        stacklevel=5,
    )
