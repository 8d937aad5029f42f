"""The cache that users pass as ``past_key_values``: transformers' Cache contract over packed stores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from qkv.config import CacheConfig
from qkv.lazy import PackedTensor
from qkv.native import SlowPathWarning
from qkv.scales import load_scales
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
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        config: CacheConfig,
        model_config: Any = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ):
        self.store = LayerStore(config, key_scale, value_scale)
        self.model_config = model_config
        self.is_initialized = False
        self.served: str | None = None  # the backend that attended last

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The keys, decoded: a new tensor at every access. None while the layer is empty."""
        return KVView(self.store).decode()[0] if self.store.shape is not None else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The values, decoded: a new tensor at every access. None while the layer is empty."""
        return KVView(self.store).decode()[1] if self.store.shape is not None else None

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
            ValueError: shapes, dtypes or devices that do not fit; the layer is unchanged.
        """
        late = self.store.append(key_states, value_states)
        self.is_initialized = True
        view = KVView(self.store, late)
        if self.model_config is None or self.model_config._attn_implementation == ATTENTION_NAME:
            view.on_served = self._set_served
            return PackedTensor(view, is_key=True), PackedTensor(view, is_key=False)
        self.served = "decoded"
        if self.store.quantized:
            _warn_unfused(self.model_config._attn_implementation)
        return view.decode()

    def _set_served(self, backend: str) -> None:
        self.served = backend

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.store.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the mask for ``query_length`` new tokens."""
        return self.store.length + query_length, 0

    def reset(self) -> None:
        """Forgets all tokens and every scale that was not given."""
        self.store.reset()
        self.is_initialized = False
        self.served = None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number (transformers' convention).

        Raises:
            ValueError: a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        self.store.crop(max(0, self.store.length + tokens_to_remove))

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
        self._map_batch(lambda x: x[indices, ...])

    def offload(self) -> None:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a qkv cache layer cannot be moved to another device yet")

    def prefetch(self) -> None:
        """Nothing is ever offloaded, so there is nothing to fetch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> QKVLayer:
        from copy import deepcopy

        fresh = type(self).__new__(type(self))
        memo[id(self)] = fresh
        # The model's configuration is shared: it says whether the fused attention is on, now and later.
        fresh.__dict__.update({k: v if k == "model_config" else deepcopy(v, memo) for k, v in self.__dict__.items()})
        return fresh

    def __repr__(self) -> str:
        store = self.store
        names = [f.name if f is not None else "none" for f in (store.key_format, store.value_format)]
        return f"QKVLayer(key={names[0]}, value={names[1]}, tokens={store.length})"


class QKVCache(Cache):
    """A key/value cache that stores keys and values in a number format of few bits.

    Pass it as ``past_key_values`` to ``generate`` or to the model. After ``qkv.enable(model)`` attention reads the
    codes directly; without it a layer is decoded at a time. Layers that are not plain attention (sliding windows,
    linear attention) are kept as transformers keeps them, unquantized; ``stats()`` says so.

    Args:
        config: the model's configuration (``model.config``); None: layers are made as they are used, all plain.
        format: a format name (see :func:`qkv.formats`), the path of a YAML file, or a :class:`qkv.CacheConfig`.
        key_format, value_format, granularity, group_size, residual_length, sink_tokens, prefill, backend, layers: as in
            :class:`qkv.CacheConfig`; what is given here replaces what ``format`` brings.
        scales: static scales for granularity ``head``: the path of a safetensors file, or a mapping of names to
            tensors: ``layers.<i>.key_scale`` and ``layers.<i>.value_scale``, float ``[kv_heads]``.

    Raises:
        ValueError: values that are not allowed, or that do not go together.
    """

    def __init__(
        self,
        config: Any = None,
        format: str | Path | CacheConfig = "int8",
        *,
        key_format: str | None = None,
        value_format: str | None = None,
        granularity: str | None = None,
        group_size: int | None = None,
        residual_length: int | None = None,
        sink_tokens: int | None = None,
        scales: str | Path | Mapping[str, torch.Tensor] | None = None,
        prefill: str | None = None,
        backend: str | None = None,
        layers: Mapping[int, Mapping[str, Any]] | None = None,
    ):
        changes: dict[str, Any] = {
            "key_format": key_format,
            "value_format": value_format,
            "granularity": granularity,
            "group_size": group_size,
            "residual_length": residual_length,
            "sink_tokens": sink_tokens,
            "scales": str(scales) if isinstance(scales, (str, Path)) else None,
            "prefill": prefill,
            "backend": backend,
            "layers": layers,
        }
        self.config = replace(CacheConfig.of(format), **{k: v for k, v in changes.items() if v is not None})
        given = scales if isinstance(scales, Mapping) else self.config.scales
        self._scales = load_scales(given) if given is not None else {}
        if config is None:
            self._check_layer_indices(None)
            # Tries the description out, so that a mistake in it shows here and not in the first update.
            self._new_layer(0, None)
            self._model_config = None
            super().__init__(layers=[])
            return
        self._model_config = config.get_text_config(decoder=True)
        _check_model(self._model_config)
        plain = DynamicCache(config=config)
        self._check_layer_indices(len(plain.layers))
        # Layers of other kinds keep their own class, untouched.
        made = [
            self._new_layer(i, self._model_config) if _is_plain_attention(layer) else layer
            for i, layer in enumerate(plain.layers)
        ]
        super().__init__(layers=made)

    def _check_layer_indices(self, count: int | None) -> None:
        for index in self.config.layers:
            if count is not None and index >= count:
                raise ValueError(f"layers: there is no layer {index}; the model has layers 0 to {count - 1}")
        known = {f"layers.{i}.{kind}_scale" for i in range(count or 0) for kind in ("key", "value")}
        for name in self._scales:
            if count is not None and name not in known:
                raise ValueError(f"scales: {name!r} belongs to no layer of this model, which has {count}")

    def _new_layer(self, index: int, model_config: Any) -> QKVLayer:
        key_scale, value_scale = (self._scales.get(f"layers.{index}.{kind}_scale") for kind in ("key", "value"))
        return QKVLayer(self.config.for_layer(index), model_config, key_scale, value_scale)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens of one layer, see :meth:`QKVLayer.update`.

        Args:
            key_states, value_states: ``[batch, kv_heads, n, head_dim]``.
            layer_idx: the layer.
        """
        while self._model_config is None and len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer(len(self.layers), None))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def view(self, layer_idx: int) -> KVView:
        """The stored tokens of one layer, as attention takes them.

        Raises:
            ValueError: the layer is not stored by qkv, or does not exist.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if not isinstance(layer, QKVLayer):
            raise ValueError(f"layer {layer_idx} is not one that qkv stores")
        return KVView(layer.store)

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, sinks, residual window, spare room, and the layers that qkv leaves alone."""
        return sum(
            layer.store.nbytes() if isinstance(layer, QKVLayer) else _plain_nbytes(layer) for layer in self.layers
        )

    def stats(self) -> dict[str, Any]:
        """What is stored, and what served.

        Returns:
            ``tokens`` (int), ``bytes`` (as :meth:`nbytes`), ``bits_per_value`` (codes, scales, sinks and residual
            window of the tokens stored in the layers of qkv; 0 while empty), and ``layers``, for each layer ``layer``,
            ``key_format``, ``value_format``, ``granularity``, ``tokens``, ``bytes`` and ``backend``: what attended
            last: ``cpu`` (compiled kernel), ``dense`` (one layer decoded, then torch's attention; prompts),
            ``reference``, ``decoded`` (the model's own attention got decoded tensors), ``untouched`` (a layer that qkv
            leaves as it is), or None.
        """
        rows: list[dict[str, Any]] = []
        bits, values = 0, 0
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, QKVLayer):
                row = {"layer": index, "key_format": "none", "value_format": "none", "granularity": None}
                row |= {"tokens": _plain_length(layer), "bytes": _plain_nbytes(layer), "backend": "untouched"}
                rows.append(row)
                continue
            store = layer.store
            bits += store.stored_bits()
            values += store.stored_values()
            granularity = store.key_granularity
            if store.value_granularity != granularity:
                granularity = f"{store.key_granularity}/{store.value_granularity}"
            rows.append(
                {
                    "layer": index,
                    "key_format": store.key_format.name if store.key_format is not None else "none",
                    "value_format": store.value_format.name if store.value_format is not None else "none",
                    "granularity": granularity,
                    "tokens": store.length,
                    "bytes": store.nbytes(),
                    "backend": layer.served,
                }
            )
        return {
            "tokens": max((row["tokens"] for row in rows), default=0),
            "bytes": self.nbytes(),
            "bits_per_value": bits / values if values else 0.0,
            "layers": rows,
        }

    def __iter__(self) -> Any:
        for layer in self.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> QKVCache:
        from copy import deepcopy

        fresh = type(self).__new__(type(self))
        memo[id(self)] = fresh
        shared = ("_model_config", "config", "_scales")
        fresh.__dict__.update({k: v if k in shared else deepcopy(v, memo) for k, v in self.__dict__.items()})
        return fresh


def _is_plain_attention(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return type(layer) is DynamicLayer


def _check_model(config: Any) -> None:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and getattr(config, "num_attention_heads", None):
        head_dim = config.hidden_size // config.num_attention_heads
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"the model's head_dim is {head_dim}; it must be at least 1")


def _plain_nbytes(layer: Any) -> int:
    return sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor))


def _plain_length(layer: Any) -> int:
    return int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0


def _warn_unfused(implementation: str) -> None:
    warnings.warn(
        f"qkv: the model's attention is {implementation!r}, so one layer at a time is decoded: correct, but slower; "
        "call qkv.enable(model) for attention over the codes",
        SlowPathWarning,
        stacklevel=5,
    )
