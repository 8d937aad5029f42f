"""The cache that users pass as ``past_key_values``: transformers' Cache contract over packed stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
)

from qkv.config import CacheConfig
from qkv.layers import QKVLayer, layer_like, layer_nbytes
from qkv.limits import Limits
from qkv.rotary import rotary_of
from qkv.saved import load, save
from qkv.scales import KINDS, Scales, load_scales
from qkv.sinks import SINK_TOKENS, Turning
from qkv.turning import positions_of, turning_of
from qkv.view import KVView
from qkv.window import QKVWindowLayer


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
        max_tokens, max_bytes, on_full, offload_folder: what the cache may hold, and what happens when it is full, as in
            :class:`qkv.CacheConfig`. With ``on_full="window"`` and no other number, 4 ``sink_tokens`` stay.
        max_cache_len: tokens that may come at most, for a static layout: memory is taken once, and ``torch.compile``
            sees a model with this cache as one graph for all lengths. None: it grows.
        offloading, offload_only_non_sliding: as in ``DynamicCache``: layers wait in the CPU's memory while others
            compute. For models on a GPU.

    Attributes:
        config: the :class:`qkv.CacheConfig`.
        loaded_token_ids: of a cache that came out of a file the token ids there, int64 ``[batch, tokens]``; else None.

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
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        on_full: str | None = None,
        offload_folder: str | Path | None = None,
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
            "max_tokens": max_tokens,
            "max_bytes": max_bytes,
            "on_full": on_full,
            "offload_folder": offload_folder,
        }
        described = CacheConfig.of(format)
        if (on_full or described.on_full) == "window" and not described.sink_tokens and sink_tokens is None:
            changes["sink_tokens"] = SINK_TOKENS
        self.config = replace(described, **{k: v for k, v in changes.items() if v is not None})
        given = scales if isinstance(scales, Mapping) else self.config.scales
        self._scales = load_scales(given) if given is not None else Scales()
        self._model_config: Any = None
        self._said_unfused: list[bool] = []
        self._turnings: list[Turning] = []
        limited = self.config.max_tokens is not None or self.config.max_bytes is not None
        self._limits = Limits(self.config) if limited else None
        self.loaded_token_ids: torch.Tensor | None = None
        self.max_cache_len = _checked_length(max_cache_len, config)
        offload: dict[str, Any] = {
            "offloading": offloading,
            "offload_only_non_sliding": offload_only_non_sliding,
        }
        if offloading and not torch.cuda.is_available():
            raise ValueError("offloading moves layers from a GPU to the CPU's memory, and there is no GPU here")
        if self.config.on_full in ("window", "offload"):
            self._check_on_full(config, offloading)
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
        if self.config.on_full == "window":
            layer = self._window_layer(index, plain, arguments)
        else:
            layer = QKVLayer(**arguments) if plain is None else layer_like(plain, **arguments)
        if isinstance(layer, QKVLayer):
            layer.said_unfused = self._said_unfused
        return layer

    def _check_on_full(self, config: Any, offloading: bool) -> None:
        on_full = self.config.on_full
        if offloading or self.max_cache_len is not None:
            raise ValueError(f"on_full={on_full!r} goes with neither offloading nor max_cache_len")
        if on_full != "window":
            return
        if config is None:
            raise ValueError("on_full='window' needs the model's configuration: QKVCache(model.config, ...)")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("on_full='window' is for decoders; of an encoder's output nothing can be left out")
        for index, changes in self.config.layers.items():
            if changes.get("sink_tokens", self.config.sink_tokens) != self.config.sink_tokens:
                raise ValueError(f"layers[{index}]: with on_full='window', all layers keep the same sink_tokens")

    def _window_layer(self, index: int, plain: Any, arguments: dict[str, Any]) -> Any:
        """As :meth:`_new_layer`, of a cache with ``on_full="window"``. A layer that slides by itself goes on to."""
        if type(plain) is not DynamicLayer:
            layer = layer_like(plain, **arguments)
            if isinstance(layer, QKVLayer) and not layer.is_sliding:
                raise ValueError(f"on_full='window' does not serve layers such as {type(plain).__name__}")
            return layer
        turning = turning_of(self._model_config, index)
        if turning is not None:
            # Layers that are turned alike share what they compute in each step.
            turning = next((held for held in self._turnings if held.same(turning)), turning)
            self._turnings.append(turning)
        return QKVWindowLayer(
            **arguments,
            max_tokens=self.config.max_tokens if self.config.max_bytes is None else None,
            turning=turning,
            positions=positions_of(self._model_config),
        )

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
        if self._limits is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._limits.check(self.layers, layer_idx, key_states, value_states)
        handed = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._limits.after(self.layers, layer_idx)
        return handed

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

    def save(self, path: str | Path, token_ids: Any = None, model: Any = None) -> None:
        """Writes the cache to one safetensors file, from which :meth:`load` makes it again; saved.py describes it.

        The file appears whole or not at all: it is written beside ``path`` and renamed. The cache stays as it is.

        Args:
            path: where to.
            token_ids: the tokens that the cache holds, whole numbers ``[batch, tokens]`` or ``[tokens]``, or None. They
                are not looked at; :attr:`loaded_token_ids` gives them back.
            model: the model that the keys and values are from, or None. A fingerprint of its weights is written down,
                so that a model of the same shape can be told from it.

        Raises:
            ValueError: token ids of another length than the cache, layers of a kind that cannot be saved, or a file
                that cannot be written.
        """
        save(self, path, token_ids, model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: Any = None,
        format: str | Path | CacheConfig | None = None,
        *,
        model: Any = None,
        verify: bool = True,
        device: torch.device | str | None = None,
    ) -> QKVCache:
        """The cache that :meth:`save` wrote, which goes on as that one would, bit for bit.

        The file is mapped into memory and its full segments are used where they lie: the system reads them when they
        are first attended to, and can drop them again when memory is short. The sinks, the residual window and the last
        segment, which take tokens, are copied; in a static layout (``max_cache_len``) so are all tokens. Nothing is
        ever written to the file. It may be replaced or removed while the cache lives, as :meth:`save` does it; but it
        must not be shortened or written to in place: where a page of a mapped file is gone, a process that reads it is
        ended by the system (SIGBUS), and no library can prevent that.

        Args:
            path: the file.
            config: the model's configuration; None for a cache that was made without one.
            format: what is expected, as in :class:`QKVCache`, or None: whatever the file holds. Everything must agree
                but ``backend`` and the limits (``max_tokens``, ``max_bytes``, ``on_full``, ``offload_folder``), which
                are taken from here. Of a cache with ``on_full="window"`` the limits must agree too: its tokens are
                those that they left. With ``on_full="offload"`` what lies in the file counts as offloaded.
            model: the model that is going to use it, or None: its weights must be those that the file was saved with.
            verify: whether the checksum of all tensors is checked, which reads the whole file (about 3 GB/s). The
                header's is always checked, and the size of the file.
            device: where the model computes; None: the CPU. On others everything is copied.

        Returns:
            The cache; :attr:`loaded_token_ids` holds the token ids of the file, int64 ``[batch, tokens]``, or None.

        Raises:
            ValueError: no saved cache, one of another version, model, format or rotation than is wanted, or a file that
                is damaged.
        """
        return load(cls, path, config, format, model, verify, device)

    def fork(self, n: int = 1) -> list[QKVCache]:
        """Caches that begin with the tokens of this one and go on by themselves, as copies of it would.

        What is full is not copied: the forks and this cache hold those segments together, and none of them writes there
        again. The last segment of each layer (up to 256 tokens), sinks and residual window are copied; so is all of a
        static layout without a sliding window, and what qkv leaves as it is. What rearranges the batch
        (``reorder_cache`` and the like) copies all of the cache it is called on. :meth:`nbytes` of a fork counts what
        it holds, the shared part too; :func:`qkv.nbytes` counts a set of caches, and what they share once. With
        ``on_full="offload"`` each has ``max_bytes`` of its own; what lies in the file, or in the CPU's memory, is
        shared, and what a fork moves later it moves for itself.

        Args:
            n: how many, at least 1.

        Returns:
            ``n`` new caches; this one can be used as before.

        Raises:
            ValueError: n is no whole number of at least 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"fork takes the number of caches to make, at least 1, not {n!r}")
        made = []
        for _ in range(n):
            ours = (layer for layer in self.layers if isinstance(layer, QKVLayer))
            with torch.inference_mode(False), torch.no_grad():
                memo: dict[int, Any] = {id(layer.store): layer.store.fork() for layer in ours}
                fresh = deepcopy(self, memo)
            if self._limits is not None and fresh._limits is not None:
                fresh._limits.share_moved(self._limits, fresh.layers)
            made.append(fresh)
        return made

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, sinks, residual window, spare room, and the layers that qkv leaves alone.

        What is shared with forks, or lies in a mapped file, counts like everything else; see :func:`qkv.nbytes`.
        """
        return sum(layer_nbytes(layer) for layer in self.layers)

    def offloaded_bytes(self) -> int:
        """Of :meth:`nbytes`, those that ``on_full="offload"`` has elsewhere.

        That is in a file: its own, a fork's, or the one loaded. Of a cache on a GPU it is in the CPU's memory, and the
        copies on the GPU of the layer that was read last count in neither number.
        """
        return self._limits.offloaded_bytes(self.layers) if self._limits is not None else 0

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
                row |= {"tokens": _length(layer), "bytes": layer_nbytes(layer), "backend": "untouched"}
                rows.append(row)
                continue
            store = layer.store
            bits += layer.stored_bits()
            values += layer.stored_values()
            granularity = store.key_granularity
            if store.value_granularity != granularity:
                granularity = f"{store.key_granularity}/{store.value_granularity}"
            rows.append(
                {
                    "layer": index,
                    "key_format": store.key_format.name if store.key_format is not None else "none",
                    "value_format": store.value_format.name if store.value_format is not None else "none",
                    "granularity": granularity,
                    "tokens": layer.held(),
                    "bytes": layer.nbytes(),
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


def nbytes(caches: Iterable[QKVCache]) -> int:
    """Bytes that caches hold together: what forks share counts once.

    For one cache this is ``cache.nbytes()``. Caches that were loaded from one file one by one share its pages in the
    system's memory, of which this knows nothing: load once, and fork.

    Args:
        caches: any, forks of one another or not.
    """
    layers = {id(layer): layer for cache in caches for layer in cache.layers}.values()
    stores = [layer.store for layer in layers if isinstance(layer, QKVLayer)]
    storages = {
        (x.device, x.untyped_storage().data_ptr()): x.untyped_storage().nbytes()
        for store in stores
        for x in store.tensors()
    }
    beside = sum(layer_nbytes(layer) for layer in layers) - sum(store.nbytes() for store in stores)
    return beside + sum(storages.values())


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
