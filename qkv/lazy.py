"""What ``update`` hands to a model whose attention can read packed keys and values.

A :class:`PackedTensor` has the shape, dtype and device of the keys (or values) of a layer, and holds none of them: only
the view. The fused attention takes the view out of it. Whatever else is done with it, by any code of any model, decodes
the layer first and goes on with an ordinary tensor, so that a model that does something unforeseen is right, if slow.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from qkv.native import SlowPathWarning
from qkv.view import KVView


class PackedTensor(torch.Tensor):
    """The keys or values of one layer, ``[batch, kv_heads, length, head_dim]``, still packed.

    Attributes:
        kv_view: the layer's :class:`~qkv.view.KVView`.
        is_key: whether this stands for the keys.
    """

    kv_view: KVView
    is_key: bool

    @staticmethod
    def __new__(cls, view: KVView, is_key: bool) -> PackedTensor:
        batch, heads, key_dim, value_dim = view.shape
        shape = (batch, heads, view.handed_length, key_dim if is_key else value_dim)
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=view.dtype, device=view.device)
        tensor.kv_view, tensor.is_key = view, is_key
        return tensor

    def __init__(self, view: KVView, is_key: bool):
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"PackedTensor({list(self.shape)}, {'keys' if self.is_key else 'values'} of {self.kv_view.length} tokens)"
        )

    def decode(self) -> torch.Tensor:
        """The ordinary tensor that this one stands for."""
        return self.kv_view.decode_for_model()[0 if self.is_key else 1]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and len(args) == 2 and not kwargs and _is_already(*args):
            return args[0]
        return _decoded_call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached when C++ code, and not Python, does something with the tensor.
        return _decoded_call(func, args, kwargs)


# What can be said without the contents.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_ABOUT_THE_SHAPE = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__repr__,
    torch.is_floating_point,
    torch.numel,
}


def _is_already(tensor: torch.Tensor, target: Any) -> bool:
    """Before transformers 5.23, layers of Gemma 4 move the keys that they share to the device on which they are."""
    if isinstance(target, torch.device):
        return target == tensor.device
    return isinstance(target, torch.dtype) and target == tensor.dtype


def _decoded_call(func: Any, args: Any, kwargs: Any) -> Any:
    warnings.warn(
        f"qkv: the model used the keys or values of a layer itself ({func}) before attention; they were decoded, "
        "which is correct but slow",
        SlowPathWarning,
        stacklevel=3,
    )
    decoded: dict[int, torch.Tensor] = {}

    def plain(x: PackedTensor) -> torch.Tensor:
        if id(x) not in decoded:
            decoded[id(x)] = x.decode()
            if x.kv_view.on_served is not None:
                x.kv_view.on_served("decoded")
        return decoded[id(x)]

    args, kwargs = tree_map_only(PackedTensor, plain, (args, kwargs or {}))
    return func(*args, **kwargs)


def view_of(keys: torch.Tensor, values: torch.Tensor) -> KVView | None:
    """The view that both tensors stand for; None where they are ordinary tensors."""
    if isinstance(keys, PackedTensor) and isinstance(values, PackedTensor) and keys.kv_view is values.kv_view:
        return keys.kv_view
    return None
