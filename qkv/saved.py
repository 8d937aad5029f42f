"""A cache in a file: how :meth:`qkv.QKVCache.save` writes it, and how :meth:`qkv.QKVCache.load` reads and checks it.

A file is safetensors. Its metadata hold, all of it text:

=================  =====================================================================================================
``qkv``            the version of the library that wrote it
``saved_cache``    the version of this arrangement, :data:`VERSION`
``model``          JSON, see :func:`qkv.scales.model_fingerprint`; ``null`` for a cache made without a configuration
``weights``        a fingerprint of the model's weights, see :func:`weights_fingerprint`; empty: not recorded
``config``         JSON, the :class:`qkv.CacheConfig`
``layout``         JSON: ``max_cache_len``
``layers``         JSON, of each layer its kind, and what its store knows, see ``stored.py``; with ``on_full="window"``
                   the size of the window, and how many first tokens there are
=================  =====================================================================================================

and its tensors ``checksums``, ``token_ids`` where they were given, ``scales.*`` where scales were given, and
``layers.<i>.*``. The first tokens of a window are written as they came, not turned to where the window is.

``checksums`` comes first in the file: int64 ``[2]``, the CRC-32 of the header, and that of everything behind
``checksums``. A CRC-32 finds every damage of up to 32 bits in a row and misses one of four billion others; it is no
protection against somebody who means to deceive.

A file is mapped into memory, not read: what is written to mapped memory stays in this process (the mapping is private),
and nothing of qkv writes to it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from qkv import host_spill, stored
from qkv.config import CacheConfig
from qkv.layers import QKVHybridLayer, QKVHybridSlidingLayer, QKVLayer, QKVSlidingLayer
from qkv.scales import model_difference, model_fingerprint
from qkv.sinks import SINK_TOKENS
from qkv.window import QKVWindowLayer

if TYPE_CHECKING:
    from qkv.cache import QKVCache

VERSION = "1"
MARK = "saved_cache"
_ALIGNMENT = 64
_LONGEST_HEADER = 100_000_000  # as safetensors has it
_CHECKSUMS = "checksums"
_SAMPLES = 64
_PIECE = 1 << 18
_READ_AT_ONCE = 1 << 22  # bytes of offloaded tensors that are in memory while they are written

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
# Exactly these: what is derived from them keeps more than is written down here.
_KINDS: tuple[type, ...] = (
    QKVLayer,
    QKVSlidingLayer,
    QKVWindowLayer,
    QKVHybridLayer,
    QKVHybridSlidingLayer,
    LinearAttentionLayer,
    DummyLayer,
)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Of a description, what has no part in what a cache holds: what computes, and when it is full, unless it forgets.
_LIMITS = ("on_full", "max_tokens", "max_bytes")
_NO_PART = ("backend", *_LIMITS, "offload_folder")

# Of linear attention: tensors and numbers by the index of a state.
_STATES = ("conv_states", "recurrent_states")
_STATE_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


class NoSavedCacheError(ValueError):
    """What is no saved cache at all: another kind of file, or one that is not there."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(cache: QKVCache, path: str | Path, token_ids: Any = None, model: Any = None) -> None:
    """See :meth:`qkv.QKVCache.save`."""
    tensors: dict[str, torch.Tensor] = {}
    if token_ids is not None:
        tensors["token_ids"] = _checked_ids(token_ids, cache.get_seq_length())
    tensors |= {f"scales.{name}": x for name, x in cache._scales.items()}
    layers = []
    for index, layer in enumerate(cache.layers):
        state, held = _describe(index, layer)
        layers.append(state)
        tensors |= {f"layers.{index}.{name}": x for name, x in held.items()}
    model_config = cache._model_config
    metadata = {
        "qkv": version("qkv"),
        MARK: VERSION,
        "model": json.dumps(None if model_config is None else model_fingerprint(model_config)),
        "weights": "" if model is None else weights_fingerprint(model),
        "config": json.dumps(cache.config.to_dict()),
        "layout": json.dumps({"max_cache_len": cache.max_cache_len}),
        "layers": json.dumps(layers),
    }
    spill = cache._limits.spill if cache._limits is not None else None
    _write(Path(path), metadata, tensors, None if spill is None else spill.rest_all)


def _describe(index: int, layer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a layer is and knows, as values and tensors."""
    state: dict[str, Any] = {"kind": type(layer).__name__}
    tensors: dict[str, torch.Tensor] = {}
    if type(layer) not in _KINDS:
        raise ValueError(
            f"layer {index} is a {type(layer).__name__}, which can not be saved; kinds that can: "
            f"{', '.join(kind.__name__ for kind in _KINDS)}"
        )
    if isinstance(layer, QKVLayer):
        state["store"], tensors = stored.describe(layer.store)
        state["is_initialized"] = layer.is_initialized
    if isinstance(layer, QKVWindowLayer):
        state["window"] = layer._window
        state["sinks"], held_sinks = stored.describe_sinks(layer.sinks)
        tensors |= held_sinks
    if hasattr(layer, "record_past"):
        state["record_past"] = layer.record_past
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        count = range(layer.number_of_states)
        for name in _STATES:
            held = getattr(layer, name)
            tensors |= {f"{name}.{i}": held[i] for i in count if held[i] is not None}
            state[name] = [None if held[i] is None else [_NAMES[held[i].dtype], *held[i].shape] for i in count]
        state |= {name: [bool(getattr(layer, name)[i]) for i in count] for name in _STATE_FLAGS}
        state["conv_kernel_size"] = [layer.conv_kernel_size[i] for i in count]
    return state, tensors


def _checked_ids(token_ids: Any, length: int) -> torch.Tensor:
    ids = torch.as_tensor(token_ids)
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] != length:
        raise ValueError(
            f"token_ids must be whole numbers [batch, tokens] of the {length} tokens that the cache holds, not "
            f"{ids.dtype} {list(ids.shape)}"
        )
    return ids.to("cpu", torch.int64)


def _write(
    path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor], rest: Callable[[], None] | None
) -> None:
    """Writes a safetensors file that appears whole or not at all.

    Args:
        rest: of tensors that lie in a file, gives back what reading them has brought into memory; called now and then.
    """
    # Large numbers first, so that each lies where its type wants to; codes come last, at whole lines of memory.
    names = sorted(tensors, key=lambda name: (name.endswith(".codes"), -tensors[name].element_size()))
    entries: dict[str, Any] = {_CHECKSUMS: {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}
    order: list[torch.Tensor | int] = []  # an integer: as many bytes that mean nothing
    end = 16
    for name in names:
        tensor = tensors[name]
        if name.endswith(".codes") and end % _ALIGNMENT:
            gap = -end % _ALIGNMENT
            entries[f"padding.{len(entries)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            order.append(gap)
            end += gap
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        order.append(tensor)
        end += tensor.nbytes
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    header = len(header).to_bytes(8, "little") + header
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with unfinished.open("xb") as file:
            file.write(header)
            file.write(bytes(16))
            checksum = read = 0
            for what in order:
                data = bytes(what) if isinstance(what, int) else _bytes_of(what)
                checksum = zlib.crc32(data, checksum)
                file.write(data)
                read += len(data)
                if rest is not None and read >= _READ_AT_ONCE:
                    rest()
                    read = 0
            if rest is not None:
                rest()
            file.seek(len(header))
            file.write(zlib.crc32(header).to_bytes(8, "little") + checksum.to_bytes(8, "little"))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ValueError(f"cannot write the cache to {path}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _sync_folder(folder: Path) -> None:
    """Makes the new name last, where a system knows how."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """A checksum over a sample of every parameter of a model, as it is loaded: its dtype counts.

    Takes milliseconds for small models. Two models that differ in few numbers only may have the same one.
    """
    checksum = 0
    for name, parameter in model.named_parameters():
        about = f"{name} {parameter.dtype} {list(parameter.shape)}"
        checksum = zlib.crc32(about.encode(), checksum)
        flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
        if flat.is_meta or flat.numel() == 0:
            continue
        step = max(1, flat.numel() // _SAMPLES)
        checksum = zlib.crc32(_bytes_of(flat[::step]), checksum)
    return f"{checksum:08x}"


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """A mapped file.

    Attributes:
        memory: all of it.
        metadata: as the module says.
        entries: of each tensor its type, shape, and where its bytes begin in the file.
    """

    path: Path
    memory: mmap.mmap
    metadata: Mapping[str, str]
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the mapped memory, whose storage is its own part of it."""
        dtype, shape, begin = self.entries[name]
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin).view(shape)

    def take(self, prefix: str, device: torch.device) -> stored.Take:
        def take(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            found = self.entries.get(prefix + name)
            if found is None or found[:2] != (dtype, shape):
                there = "not there" if found is None else f"{found[0]} {list(found[1])}"
                raise ValueError(f"{prefix + name} should be {dtype} {list(shape)}, and is {there}")
            tensor = self.tensor(prefix + name)
            return tensor if device.type == "cpu" else tensor.to(device)

        return take

    def json(self, name: str) -> Any:
        return json.loads(self.metadata[name])


def load(
    kind: type[QKVCache],
    path: str | Path,
    config: Any = None,
    format: str | Path | CacheConfig | None = None,
    model: Any = None,
    verify: bool = True,
    device: torch.device | str | None = None,
) -> QKVCache:
    """See :meth:`qkv.QKVCache.load`."""
    file = _open(Path(path), verify)
    with torch.inference_mode(False), torch.no_grad():
        try:
            saved_config = _config_of(file)
            if format is not None:
                saved_config = _as_expected(file, saved_config, CacheConfig.of(format))
            _check_model(file, config, model)
            return _restore(kind, file, config, saved_config, torch.device(device or "cpu"))
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
            # The checksum of the header holds: another library wrote it, or one with a mistake.
            raise ValueError(f"{path} does not describe a cache: {type(error).__name__}: {error}") from error


def _open(path: Path, verify: bool) -> _File:
    """Maps a file and checks that it is whole."""
    damaged = f"{path} is damaged: "
    try:
        with path.open("rb") as file:
            return _map(path, file, verify, damaged)
    except OSError as error:
        raise NoSavedCacheError(f"cannot read the cache in {path}: {error.strerror or error}") from None


def _map(path: Path, file: BinaryIO, verify: bool, damaged: str) -> _File:
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= _LONGEST_HEADER or 8 + length + 16 > size:
        raise NoSavedCacheError(f"{path} is no cache that qkv saved, or it was cut: {size} bytes")
    header = head + file.read(length)
    try:
        entries = json.loads(header[8:])
        metadata = entries.pop("__metadata__")
        found, written_by = metadata.get(MARK), metadata.get("qkv")
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise NoSavedCacheError(f"{path} is no cache that qkv saved, or its header is damaged") from None
    if found is None:
        raise NoSavedCacheError(f"{path} is a safetensors file, but no cache that qkv saved")
    if found != VERSION:
        raise ValueError(
            f"{path} was saved by qkv {written_by} in version {found!r} of the arrangement; this one reads version "
            f"{VERSION}: save the cache anew, or use the qkv that wrote it"
        )
    sums = file.read(16)
    if int.from_bytes(sums[:8], "little") != zlib.crc32(header):
        raise ValueError(f"{damaged}its header is not what was written; compute the cache anew")
    try:
        begin = 8 + length
        read = {
            name: (_DTYPES[x["dtype"]], tuple(x["shape"]), begin + x["data_offsets"][0], begin + x["data_offsets"][1])
            for name, x in entries.items()
        }
        end = max(x[3] for x in read.values())
        for dtype, shape, first, last in read.values():
            if min(shape, default=0) < 0 or not begin <= first <= last or prod(shape) * dtype.itemsize != last - first:
                raise ValueError
    except (KeyError, TypeError, ValueError, IndexError):
        raise ValueError(f"{damaged}its header describes no tensors; compute the cache anew") from None
    if end != size:
        raise ValueError(f"{damaged}it has {size} bytes and should have {end}; compute the cache anew")
    if verify and int.from_bytes(sums[8:], "little") != _checksum_of_rest(file):
        raise ValueError(f"{damaged}its tensors are not what was written; compute the cache anew")
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _File(path, memory, metadata, {name: x[:3] for name, x in read.items()})


def _checksum_of_rest(file: BinaryIO) -> int:
    """Of what was not read yet. Reading it piece by piece takes half the time of faulting in its mapped pages."""
    checksum, piece = 0, bytearray(_PIECE)
    with memoryview(piece) as view:
        while n := file.readinto(view):  # type: ignore[attr-defined]
            checksum = zlib.crc32(view[:n], checksum)
    return checksum


def _config_of(file: _File) -> CacheConfig:
    values = file.json("config")
    layers = {int(index): changes for index, changes in values.pop("layers", {}).items()}
    return CacheConfig.from_dict({**values, "layers": layers})


def _as_expected(file: _File, saved: CacheConfig, expected: CacheConfig) -> CacheConfig:
    """The description of what the file holds, with what has no part in that as it is expected.

    Raises:
        ValueError: a cache of another description was expected.
    """
    if "window" in (saved.on_full, expected.on_full):
        _check_window(file, saved, expected)
        if not expected.sink_tokens and saved.sink_tokens == SINK_TOKENS:
            expected = replace(expected, sink_tokens=SINK_TOKENS)  # as a new cache has them by itself
    _check_config(file, saved, expected)
    return replace(saved, **{name: getattr(expected, name) for name in _NO_PART})


def _check_window(file: _File, saved: CacheConfig, expected: CacheConfig) -> None:
    """Raises ValueError where one of the two forgets tokens, and the other does not, or others."""
    differ = [name for name in _LIMITS if getattr(saved, name) != getattr(expected, name)]
    if not differ:
        return
    name = differ[0]
    there, here = getattr(saved, name), getattr(expected, name)
    what = f"a window with {name}={there!r}"
    if name == "on_full":
        what = f"the first tokens and the last ones ({name}='window')" if there == "window" else "all its tokens"
    raise ValueError(
        f"{file.path} holds {what}, and {name}={here!r} is wanted; load it without saying the format, or compute the "
        "cache anew"
    )


def _check_config(file: _File, saved: CacheConfig, expected: CacheConfig) -> None:
    """Raises ValueError where a cache that holds numbers in another way was expected."""
    there, here = ({**x.to_dict(), **dict.fromkeys(_NO_PART)} for x in (saved, expected))
    for name in sorted({*there, *here}, key=lambda name: (name != "format", name)):
        if there.get(name) != here.get(name):
            raise ValueError(
                f"{file.path} holds a cache of another kind: {name} is {there.get(name)!r} there and "
                f"{here.get(name)!r} is wanted; load it without saying the format, or compute the cache anew"
            )


def _check_model(file: _File, config: Any, model: Any) -> None:
    made_for = file.json("model")
    if config is None or made_for is None:
        if config is not None or made_for is not None:
            raise ValueError(
                f"{file.path} was saved from a cache made {'without' if made_for is None else 'with'} a model's "
                f"configuration; load it {'without' if made_for is None else 'with'} one"
            )
    elif not hasattr(config, "get_text_config"):
        raise ValueError(f"the second argument is the model's configuration, model.config, not {type(config).__name__}")
    else:
        difference = model_difference(made_for, model_fingerprint(config.get_text_config(decoder=True)))
        if difference is not None:
            raise ValueError(f"{file.path} was saved for another model: {difference}; compute the cache anew")
    if model is not None:
        weights = file.metadata["weights"]
        if not weights:
            raise ValueError(f"{file.path} does not say of which weights it is: save it with model=")
        if weights != weights_fingerprint(model):
            raise ValueError(
                f"{file.path} was saved from a model of other weights, or of another dtype; compute the cache anew"
            )


def _restore(
    kind: type[QKVCache], file: _File, config: Any, cache_config: CacheConfig, device: torch.device
) -> QKVCache:
    scales = {name.removeprefix("scales."): file.tensor(name) for name in file.entries if name.startswith("scales.")}
    more = {"max_cache_len": file.json("layout")["max_cache_len"], "sink_tokens": cache_config.sink_tokens}
    cache = kind(config, cache_config, scales=scales, **more)
    layers = file.json("layers")
    if config is None:
        cache.layers.extend(cache._new_layer(index) for index in range(len(layers)))
    if len(layers) != len(cache.layers):
        raise ValueError(f"{file.path} holds {len(layers)} layers, and the model has {len(cache.layers)}")
    for index, (layer, state) in enumerate(zip(cache.layers, layers, strict=True)):
        try:
            _restore_layer(layer, state, file.take(f"layers.{index}.", device), device)
        except ValueError as error:
            raise ValueError(f"{file.path} cannot be loaded: layer {index}: {error}") from None
        if cache._limits is not None and host_spill.serves(device):
            cache._limits.make_room_on(device, cache.layers, index)
    if cache._limits is not None and device.type == "cpu":
        cache._limits.adopt(file.memory, cache.layers)
    if cache._limits is not None:
        try:
            cache._limits.check_held(cache.layers)
        except ValueError as error:
            raise ValueError(f"{file.path} cannot be loaded within the limits: {error}") from None
    if "token_ids" in file.entries:
        cache.loaded_token_ids = file.tensor("token_ids").clone()
    return cache


def _restore_layer(layer: Any, state: dict[str, Any], take: stored.Take, device: torch.device) -> None:
    kind: type = type(layer)
    if kind.__name__ != state["kind"]:
        raise ValueError(f"it is a {state['kind']} there and a {kind.__name__} here")
    if issubclass(kind, LinearAttentionCacheLayerMixin):
        for name, count in ((name, len(state[name])) for name in (*_STATES, *_STATE_FLAGS, "conv_kernel_size")):
            if count != layer.number_of_states:
                raise ValueError(f"{name} has {count} states there and {layer.number_of_states} here")
        for i, name, tensor in _linear_states(layer, state, take):
            getattr(layer, name)[i] = tensor
            if name == "conv_states":
                layer.dtype, layer.device = tensor.dtype, device
        for name in (*_STATE_FLAGS, "conv_kernel_size"):
            setattr(layer, name, dict(enumerate(state[name])))
    if "record_past" in state:
        layer.record_past = state["record_past"]
    if isinstance(layer, QKVLayer):
        stored.restore(layer.store, state["store"], take, device)
        layer.is_initialized = state["is_initialized"]
        layer._tell_length()
    if isinstance(layer, QKVWindowLayer):
        _restore_window(layer, state, take)


def _restore_window(layer: QKVWindowLayer, state: dict[str, Any], take: stored.Take) -> None:
    """What a layer that forgets has beside its store, which is restored."""
    window = state["window"]
    if layer._window is None and window is not None:
        layer.set_window(stored.whole(window, 1))  # bytes had been given, from which it was found with the first tokens
    if layer._window != window:
        raise ValueError(f"the window is {window} tokens there and {layer._window} here")
    stored.restore_sinks(layer.sinks, layer.store, state["sinks"], take)
    if window is None and layer.get_seq_length():
        raise ValueError("the size of the window is missing")


def _linear_states(layer: Any, state: dict[str, Any], take: stored.Take) -> Iterator[tuple[int, str, torch.Tensor]]:
    """The states of linear attention, copied: they are written to in place."""
    for name in _STATES:
        for i, found in enumerate(state[name]):
            if found is not None:
                yield i, name, take(f"{name}.{i}", _DTYPES[found[0]], tuple(found[1:])).clone()
