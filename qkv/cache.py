"""The cache that users pass as ``past_key_values``: transformers' Cache contract over packed stores."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticCache

from qkv.config import CacheConfig
from qkv.layers import QKVLayer, layer_like
from qkv.rotary import rotary_of
from qkv.scales import KINDS, Scales, load_scales
from qkv.view import KVView


class QKVCache(DynamicCache):
    """A key/value cache that stores keys and values in a number format of few bits.

    Pass it as ``past_key_values`` to ``generate`` or to the model. After ``qkv.enable(model)`` attention reads the
    codes directly; without it a layer is decoded at a time. Layers without keys and values (linear attention) are kept
    as transformers keeps them; ``stats()`` says so. It is a ``DynamicCache`` so that code that asks for one takes it,
    and so that it can be a part of an ``EncoderDecoderCache``; nothing of that class's storage is used.

    An encoder-decoder model wants two, as with transformers' caches: ``EncoderDecoderCache(QKVCache(config),
    QKVCache(config))``.

    Args:
        config: the model's configuration (``model.config``); None: layers are made as they are used, all plain.
        format: a format name (see :func:`qkv.formats`), the path of a YAML file, or a :class:`qkv.CacheConfig`.
        key_format, value_format, granularity, key_granularity, value_granularity, group_size, key_group_size,
            value_group_size, equalize, residual_length, sink_tokens, prefill, backend, layers: as in
            :class:`qkv.CacheConfig`; what is given here replaces what ``format`` brings.
        scales: static scales for granularity ``head``: the path of a safetensors file, such as ``qkv calibrate``
            writes, or a mapping of names to tensors: ``layers.<i>.key_scale`` and ``layers.<i>.value_scale``, float
            ``[kv_heads]``; ``layers.<i>.key_centre`` and ``layers.<i>.key_multiplier``, float ``[kv_heads, key_dim]``.
        max_cache_len: tokens that may come at most, for a static layout: memory is taken once, and ``torch.compile``
            sees a model with this cache as one graph for all lengths. None: it grows.
        offloading, offload_only_non_sliding: as in ``DynamicCache``: layers wait in the CPU's memory while others
            compute. For models on a GPU.

    Raises:
        ValueError: values that are not allowed, or that do not go together; scales of another model or format.
    """

    def __init__(
        self,
        config: Any = None,
        format: str | Path | CacheConfig = "int8",
        *,
        key_format: str | None = None,
        value_format: str | None = None,
        granularity: str | None = None,
        key_granularity: str | None = None,
        value_granularity: str | None = None,
        group_size: int | None = None,
        key_group_size: int | None = None,
        value_group_size: int | None = None,
        equalize: bool | None = None,
        residual_length: int | None = None,
        sink_tokens: int | None = None,
        scales: str | Path | Mapping[str, torch.Tensor] | None = None,
        prefill: str | None = None,
        backend: str | None = None,
        layers: Mapping[int, Mapping[str, Any]] | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ):
        changes: dict[str, Any] = {
            "key_format": key_format,
            "value_format": value_format,
            "granularity": granularity,
            "key_granularity": key_granularity,
            "value_granularity": value_granularity,
            "group_size": group_size,
            "key_group_size": key_group_size,
            "value_group_size": value_group_size,
            "equalize": equalize,
            "residual_length": residual_length,
            "sink_tokens": sink_tokens,
            "scales": str(scales) if isinstance(scales, (str, Path)) else None,
            "prefill": prefill,
            "backend": backend,
            "layers": layers,
        }
        self.config = replace(CacheConfig.of(format), **{k: v for k, v in changes.items() if v is not None})
        given = scales if isinstance(scales, Mapping) else self.config.scales
        self._scales = load_scales(given) if given is not None else Scales()
        self._model_config: Any = None
        self._said_unfused: list[bool] = []
        self.max_cache_len = _checked_length(max_cache_len, config)
        offload: dict[str, Any] = {
            "offloading": offloading,
            "offload_only_non_sliding": offload_only_non_sliding,
        }
        if offloading and not torch.cuda.is_available():
            raise ValueError("offloading moves layers from a GPU to the CPU's memory, and there is no GPU here")
        if config is None:
            self._check_layer_indices(None)
            # Tries the description out, so that a mistake in it shows here and not in the first update.
            self._new_layer(0)
            Cache.__init__(self, layers=[], **offload)
            return
        if not hasattr(config, "get_text_config"):
            raise ValueError(
                f"the first argument is the model's configuration, model.config, not {type(config).__name__}; the "
                'format comes second: QKVCache(model.config, "int8")'
            )
        self._model_config = config.get_text_config(decoder=True)
        head_dim = vars(self._model_config).get("head_dim")  # as an attribute, some models' configurations refuse it
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"the model's head_dim is {head_dim}; it must be at least 1")
        kinds = DynamicCache(config=config).layers
        # What is not ours: of transformers' own kind for the layout.
        others = kinds if max_cache_len is None else StaticCache(config, max_cache_len).layers
        self._check_layer_indices(len(kinds))
        made = [self._new_layer(i, kind) or others[i] for i, kind in enumerate(kinds)]
        Cache.__init__(self, layers=made, **offload)
        for layer in self.layers:
            if isinstance(layer, QKVLayer):
                layer.offloads = offloading

    def _check_layer_indices(self, count: int | None) -> None:
        self._scales.check_purpose(self._model_config, self.config)
        for index in self.config.layers:
            if count is not None and index >= count:
                raise ValueError(f"layers: there is no layer {index}; the model has layers 0 to {count - 1}")
        known = {f"layers.{i}.{kind}" for i in range(count or 0) for kind in KINDS}
        for name in self._scales:
            if count is not None and name not in known:
                raise ValueError(f"scales: {name!r} belongs to no layer of this model, which has {count}")

    def _new_layer(self, index: int, plain: Any = None) -> Any:
        """Our layer for a layer of ``DynamicCache``, or None; where that layer is None, one of plain attention."""
        arguments = {
            "config": self.config.for_layer(index),
            "model_config": self._model_config,
            "key_scale": self._scales.get(f"layers.{index}.key_scale"),
            "value_scale": self._scales.get(f"layers.{index}.value_scale"),
            "key_centre": self._scales.get(f"layers.{index}.key_centre"),
            "key_multiplier": self._scales.get(f"layers.{index}.key_multiplier"),
            "capacity": self.max_cache_len,
            "rotary": rotary_of(self._model_config, index),
        }
        layer = QKVLayer(**arguments) if plain is None else layer_like(plain, **arguments)
        if isinstance(layer, QKVLayer):
            layer.said_unfused = self._said_unfused
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens of one layer, see :meth:`QKVLayer.update`.

        Args:
            key_states, value_states: ``[batch, kv_heads, n, head_dim]``.
            layer_idx: the layer.
        """
        while self._model_config is None and len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer(len(self.layers)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, in all layers or in none.

        Args:
            tokens_to_remove: how many, as a negative number (transformers' convention). 0 lets recorded windows go
                back to their size.

        Raises:
            ValueError: a positive number.
            RuntimeError: a layer has not kept what would be needed; see ``activate_past_recording``.
        """
        for layer in self.layers:
            if isinstance(layer, QKVLayer):
                layer.check_crop(tokens_to_remove)
            if isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.record_past:
                raise RuntimeError(
                    "a layer with linear attention cannot be cropped: call activate_past_recording before the tokens "
                    "come that are to be cropped"
                )
        super().crop(tokens_to_remove)

    def view(self, layer_idx: int) -> KVView:
        """The stored tokens of one layer, as attention takes them.

        Raises:
            ValueError: the layer is not stored by qkv, or does not exist.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if not isinstance(layer, QKVLayer):
            raise ValueError(f"layer {layer_idx} is not one that qkv stores")
        return layer._whole_view()

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, sinks, residual window, spare room, and the layers that qkv leaves alone."""
        return sum(_nbytes(layer) for layer in self.layers)

    def stats(self) -> dict[str, Any]:
        """What is stored, and what served.

        Returns:
            ``tokens`` (int, that have come), ``bytes`` (as :meth:`nbytes`), ``bits_per_value`` (codes, scales, sinks
            and residual window of the tokens stored in the layers of qkv; 0 while empty), and ``layers``, for each
            layer ``layer``,
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
                row |= {"tokens": _length(layer), "bytes": _nbytes(layer), "backend": "untouched"}
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
                    "tokens": store.length - store.first,
                    "bytes": store.nbytes(),
                    "backend": layer.served,
                }
            )
        return {
            "tokens": max((_length(layer) for layer in self.layers), default=0),
            "bytes": self.nbytes(),
            "bits_per_value": bits / values if values else 0.0,
            "layers": rows,
        }

    def __iter__(self) -> Any:
        for layer in self.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> QKVCache:
        fresh = type(self).__new__(type(self))
        memo[id(self)] = fresh
        shared = ("_model_config", "config", "_scales")
        fresh.__dict__.update({k: v if k in shared else deepcopy(v, memo) for k, v in self.__dict__.items()})
        return fresh


def _checked_length(max_cache_len: int | None, config: Any) -> int | None:
    if max_cache_len is None:
        return None
    if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
        raise ValueError(f"max_cache_len must be a number of tokens, at least 1, or None, not {max_cache_len!r}")
    if config is None:
        raise ValueError("max_cache_len needs the model's configuration: QKVCache(model.config, max_cache_len=...)")
    return max_cache_len


def _nbytes(layer: Any) -> int:
    """Bytes that a layer of any kind holds. The states of linear attention lie in dictionaries."""
    states = [x for held in vars(layer).values() if isinstance(held, dict) for x in held.values()]
    others = [] if isinstance(layer, QKVLayer) else vars(layer).values()
    own: int = layer.store.nbytes() if isinstance(layer, QKVLayer) else 0
    return own + sum(x.nbytes for x in (*states, *others) if isinstance(x, torch.Tensor))


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
