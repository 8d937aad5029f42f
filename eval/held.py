"""The bytes that a cache really holds, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

import qkv

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_LEAVES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, type, ModuleType, torch.nn.Module)


def kv_bytes(cache: Cache) -> int:
    """Returns the bytes allocated by a cache: ours says so itself, of any other its tensors are counted."""
    return cache.nbytes() if isinstance(cache, qkv.QKVCache) else tensor_bytes(cache)


def bits_per_value(cache: Cache, values: int) -> float:
    """Returns the bits that a cache spends on each of the ``values`` numbers of keys and values that it was given.

    Of ours that counts codes, scales, offsets, sinks and residual, without spare capacity; of any other, all it
    holds.
    """
    if isinstance(cache, qkv.QKVCache):
        return float(cache.stats()["bits_per_value"])
    return 8 * tensor_bytes(cache) / values


def tensor_bytes(root: object) -> int:
    """Returns the bytes of all storages of tensors that are reachable from an object, each counted once.

    It follows attributes, slots, containers and the inner tensors of tensor subclasses. A storage counts whole, even
    if only a part of it is in view: it is what is held.
    """
    storages = {}
    for tensor in _tensors(root, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from _tensors(getattr(value, name), seen)
        else:
            yield value
        return
    if isinstance(value, Mapping):
        children: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
        for kind in type(value).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                children.append(getattr(value, name, None))
    for child in children:
        yield from _tensors(child, seen)
