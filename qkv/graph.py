"""What ``torch.compile`` sees of a cache layer with a static layout: three operations, and a small tensor.

A graph must not depend on how many tokens are stored: a number of Python's would be compiled in, and every step compile
anew. So a layer with a static layout has a *handle*, an int64 tensor of two numbers: which layer it is, and how many
tokens it holds. The graph passes the handle to the operations, and these find the layer and do, at run time, what they
do without a compiler:

* ``qkv::append`` stores new tokens; it changes the handle, which keeps the operations of a layer in order.
* ``qkv::attend`` is attention over the stored tokens.
* ``qkv::decode`` gives keys and values as ordinary tensors, padded to the largest length.

They are registered with the first cache that has a static layout.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch


class StoredLayer(Protocol):
    """What the operations ask of a layer; see ``layers.py``."""

    def append_now(self, keys: torch.Tensor, values: torch.Tensor) -> int: ...

    def attend_now(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        softmax_scale: float,
        causal: bool,
        softcap: float | None,
    ) -> torch.Tensor: ...

    def decode_now(self) -> tuple[torch.Tensor, torch.Tensor]: ...


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_library: torch.library.Library | None = None


def new_handle(layer: StoredLayer, length: int = 0) -> torch.Tensor:
    """A handle of a layer that holds ``length`` tokens: int64 ``[2]``, on the CPU. It does not keep the layer alive."""
    _register()
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):  # it is written in and outside of that mode
        return torch.tensor([number, length], dtype=torch.int64)


def _layer(handle: torch.Tensor) -> StoredLayer:
    layer = _layers.get(int(handle[0]))
    if layer is None:
        raise RuntimeError("the cache of this compiled call is gone; keep the cache as long as it is used")
    return layer


def _append(handle: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    handle[1] = _layer(handle).append_now(keys, values)


def _attend(
    handle: torch.Tensor,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    value_dim: int,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    return _layer(handle).attend_now(query, mask, sinks, softmax_scale, causal, softcap)


def _attend_shape(
    handle: torch.Tensor, query: torch.Tensor, mask: Any, sinks: Any, value_dim: int, *rest: Any
) -> torch.Tensor:
    batch, heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, heads, value_dim)


def _decode(
    handle: torch.Tensor, keys_like: torch.Tensor, values_like: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _layer(handle).decode_now()


def _decode_shape(
    handle: torch.Tensor, keys_like: torch.Tensor, values_like: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (x.new_empty(x.shape[0], x.shape[1], tokens, x.shape[3]) for x in (keys_like, values_like))
    return keys, values


def _register() -> None:
    global _library
    if _library is not None:
        return
    library = torch.library.Library("qkv", "DEF")
    # Python runs in them, and lengths that are not in the graph: nothing to be replayed from a recording.
    tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    operations = (
        ("append(Tensor(a!) handle, Tensor keys, Tensor values) -> ()", _append, lambda *_: None),
        (
            "attend(Tensor handle, Tensor query, Tensor? mask, Tensor? sinks, int value_dim, float softmax_scale, "
            "bool causal, float? softcap) -> Tensor",
            _attend,
            _attend_shape,
        ),
        (
            "decode(Tensor handle, Tensor keys_like, Tensor values_like, SymInt tokens) -> (Tensor, Tensor)",
            _decode,
            _decode_shape,
        ),
    )
    for schema, function, shape in operations:
        name = library.define(schema, tags=tags)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qkv::{name}", shape, lib=library)
    _library = library


class GraphTensor(torch.Tensor):
    """The keys or values of a layer in a graph, ``[batch, kv_heads, largest length, head_dim]``, still packed.

    What :class:`~qkv.lazy.PackedTensor` is without a compiler: the fused attention takes the handle out of it, and
    whatever else is done with it decodes the layer first. Its own contents mean nothing.
    """

    handle: torch.Tensor
    keys_like: torch.Tensor
    values_like: torch.Tensor
    is_key: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args = [_plain(x) for x in args]
        kwargs = {name: _plain(x) for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


# Less than lazy.py knows: what the compiler can follow.
_ABOUT_THE_SHAPE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    torch.Tensor.size,
    torch.Tensor.dim,
}


def _plain(x: Any) -> Any:
    if isinstance(x, GraphTensor):
        both = torch.ops.qkv.decode(x.handle, x.keys_like, x.values_like, x.shape[2])
        return both[0] if x.is_key else both[1]
    if isinstance(x, (list, tuple)):
        return type(x)(_plain(y) for y in x)
    return x


def handed_out(
    handle: torch.Tensor, keys_like: torch.Tensor, values_like: torch.Tensor, tokens: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an update gives to the model while it is compiled.

    Args:
        handle: of the layer.
        keys_like, values_like: ``[batch, kv_heads, any, head_dim]``.
        tokens: the largest length.
        packed: whether the model's attention takes :class:`GraphTensor`; else the layer is decoded.
    """
    if not packed:
        return torch.ops.qkv.decode(handle, keys_like, values_like, tokens)
    pair = []
    for is_key, like in ((True, keys_like), (False, values_like)):
        batch, heads, _, dim = like.shape
        tensor = like.new_empty(1).expand(batch, heads, tokens, dim).as_subclass(GraphTensor)
        tensor.handle, tensor.keys_like, tensor.values_like, tensor.is_key = handle, keys_like, values_like, is_key
        pair.append(tensor)
    return pair[0], pair[1]
