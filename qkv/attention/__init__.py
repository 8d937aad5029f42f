"""Attention over stored codes: one function, several backends.

A backend is a module with ``name``, ``available()``, ``supports(query, view)`` and ``attend(...)`` of the one
signature. ``auto`` takes the first that can serve, and decodes a layer for torch's attention where none can:

* ``cpu``: the compiled kernel, for up to 8 queries.
* ``triton``: Triton's kernels on a GPU, for up to 8 queries.
* ``dense``: decode one layer, then torch's attention; for prompts.
* ``reference``: plain torch in double precision.
"""

from __future__ import annotations

import warnings

import torch

from qkv.attention import cpu, dense, reference, tiled, triton_decode, window
from qkv.native import SlowPathWarning
from qkv.sinks import WindowView
from qkv.view import KVView

__all__ = ["attention", "choose"]

_fused = {cpu.name: cpu, triton_decode.name: triton_decode}


def choose(query: torch.Tensor, view: KVView, backend: str = "auto") -> str:
    """The name of the backend that serves a query over a view: ``cpu``, ``triton``, ``dense`` or ``reference``.

    Raises:
        ValueError: an unknown backend, or one that was asked for by name and is not there.
    """
    if backend == "reference":
        return backend
    if backend != "auto" and backend not in _fused:
        raise ValueError(f"unknown backend {backend!r}; use one of auto, {', '.join(_fused)}, reference")
    name = backend if backend != "auto" else triton_decode.name if query.device.type == "cuda" else cpu.name
    module = _fused[name]
    if query.shape[2] > module.MAX_QUERIES:
        return "dense"  # a prompt is no task of a decoding kernel, whichever is asked for
    missing = module.available() or module.supports(query, view)
    if missing is None:
        return name
    if backend != "auto":
        raise ValueError(f"backend {backend!r} cannot be used: {missing}")
    # Of a missing library native.py has spoken already, or the user wanted it so.
    if module is not cpu or cpu.available() is None:
        warnings.warn(f"qkv: a layer is decoded at every step: {missing}", SlowPathWarning, stacklevel=3)
    return "dense"


def attention(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Softmax attention of queries over the stored tokens of one layer.

    Args:
        query: ``[batch, q_heads, q_len, key_dim]``, float32, bfloat16 or float16; q_heads is a multiple of kv_heads.
        view: the stored keys and values, from ``QKVCache``.
        mask: ``[batch or 1, q_heads or 1, q_len or 1, kv_len or more]``; boolean (True: seen) or additive, where -inf
            and the lowest number of its type stand for not seen. A row that sees nothing gives zeros.
        softmax_scale: what scores are multiplied with; None: ``key_dim ** -0.5``.
        causal: without a mask, whether query i of q_len sees only the first ``kv_len - q_len + i + 1`` tokens.
        softcap: scores become ``softcap * tanh(score / softcap)`` before masking; positive, or None: not.
        sinks: ``[q_heads]`` logits that take part in the softmax without a value (learned sinks), or None.
        backend: ``auto``, ``cpu``, ``triton`` or ``reference``.

    Returns:
        ``[batch, q_len, q_heads, value_dim]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or types that do not fit each other, or a backend that is not there.
    """
    batch, kv_heads, key_dim, value_dim = view.shape
    if query.dim() != 4 or query.shape[0] != batch or query.shape[1] % kv_heads or query.shape[3] != key_dim:
        raise ValueError(
            f"query must be [batch={batch}, a multiple of {kv_heads} heads, q_len, head_dim={key_dim}], "
            f"not {list(query.shape)}"
        )
    heads, q_len = query.shape[1], query.shape[2]
    if mask is not None:
        mask = _checked_mask(mask, (batch, heads, q_len, view.length))
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [q_heads={heads}], not {list(sinks.shape)}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None, not {softcap}")
    scale = softmax_scale if softmax_scale is not None else key_dim**-0.5
    several = isinstance(view, WindowView) and q_len > 1 and view.passes_window
    served = choose(query, view, backend)
    if several and served != "reference":
        served = "dense"  # each query has a window of its own
    if view.on_served is not None:
        view.on_served(served)
    if view.length == 0:
        return query.new_zeros(batch, q_len, heads, value_dim)
    if isinstance(view, WindowView) and several:
        dtype = torch.float64 if served == "reference" else query.dtype
        return window.attend(query, view, mask, scale, causal, softcap, sinks, dtype)
    if served == "dense" and tiled.serves(query, view):
        out = tiled.attend_view(query, view, mask, scale, causal, softcap, sinks)
        if out is not None:
            return out
    if served == "dense" and tiled.serves_late(query, view, mask, causal):
        out = tiled.attend_late(query, view, mask, scale, softcap, sinks)
        if out is not None:
            return out
    if served == "dense":
        return dense.attend_view(query, view, mask, scale, causal, softcap, sinks)
    module = reference if served == "reference" else _fused[served]
    return module.attend(query, view, mask, scale, causal, softcap, sinks)


def _checked_mask(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask ``[batch or 1, heads or 1, q_len, kv_len]``, boolean or with -inf for what is not seen."""
    batch, heads, q_len, kv_len = shape
    fits = mask.dim() == 4 and all(n in (1, m) for n, m in zip(mask.shape[:3], shape[:3], strict=True))
    if not fits or mask.shape[3] < kv_len:
        raise ValueError(
            f"mask must be [batch={batch} or 1, heads={heads} or 1, q_len={q_len}, kv_len={kv_len}], "
            f"not {list(mask.shape)}"
        )
    mask = mask[..., :kv_len].expand(-1, -1, q_len, -1)
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"mask must be boolean, or additive and floating point, not {mask.dtype}")
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
