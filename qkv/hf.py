"""The only place that touches transformers' attention: switching the fused attention of a model on and off."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from qkv.attention import attention, dense
from qkv.graph import GraphTensor
from qkv.layers import ATTENTION_NAME
from qkv.lazy import view_of
from qkv.native import SlowPathWarning


def enable(model: Any) -> Any:
    """Lets a model's attention read the packed codes of a ``QKVCache``.

    With other caches, or none, the model computes as with ``sdpa``. Only the model's choice of attention changes, no
    class or function of transformers. Calling it again changes nothing.

    Args:
        model: a transformers model.

    Returns:
        The model.

    Raises:
        ValueError: not a transformers model.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"enable takes a transformers model, not {type(model).__name__}")
    previous = model.config._attn_implementation
    if previous == ATTENTION_NAME:
        return model
    _register()
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
        warnings.warn(
            f"qkv: {type(model).__name__} has an attention of its own that cannot be replaced; a QKVCache works, but "
            "one layer at a time is decoded",
            SlowPathWarning,
            stacklevel=2,
        )
    model._qkv_previous_attention = previous
    return model


def disable(model: Any) -> Any:
    """Gives a model the attention back that it had before :func:`enable`.

    Args:
        model: a transformers model; one that was not enabled is left as it is.

    Returns:
        The model.

    Raises:
        ValueError: not a transformers model.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"disable takes a transformers model, not {type(model).__name__}")
    previous = getattr(model, "_qkv_previous_attention", None)
    if previous is not None:
        model.set_attn_implementation(previous)
        del model._qkv_previous_attention
    return model


def _register() -> None:
    if ATTENTION_NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)


class _LeftOut(threading.local):
    """Masks that :func:`attention_mask` left out in the pass that is under way.

    A pass makes its masks and attends in one thread; models in other threads have their own.

    Attributes:
        queries: for a kv_len the q_len. Where transformers itself leaves a mask out while keys are longer than queries
            (a static layout), the queries are the first tokens instead of the last ones: such are not in here.
    """

    def __init__(self) -> None:
        self.queries: dict[int, int] = {}

    def add(self, q_len: int, kv_len: int) -> None:
        if len(self.queries) > 8:  # of passes that are over
            self.queries.clear()
        self.queries[kv_len] = q_len

    def forget(self, kv_len: int) -> None:
        self.queries.pop(kv_len, None)

    def holds(self, q_len: int, kv_len: int) -> bool:
        return self.queries.get(kv_len) == q_len


_left_out = _LeftOut()


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> torch.Tensor | None:
    """The mask that transformers makes for ``sdpa``, or None where it only says what :func:`attention_forward` knows.

    That is: each query sees what is before it, the last one all of it. For a prompt in pieces such a mask would take
    memory that grows with the prompt.

    Args:
        others: as all that is named: what transformers' ``sdpa_mask`` takes.
    """
    plain = allow_is_causal_skip and (local_size is None or kv_length < local_size)
    if not torch.compiler.is_compiling():
        _left_out.forget(kv_length)
        if plain and isinstance(q_offset, int) and q_length > 1 and kv_offset + kv_length == q_offset + q_length:
            seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
            if seen is None or (seen.dim() == 2 and seen.shape[1] == kv_length and bool(seen.all())):
                _left_out.add(q_length, kv_length)
                return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **others,
    )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with the signature of transformers' attention interface.

    Args:
        module: the attention module.
        query: ``[batch, q_heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, kv_len, head_dim]``, packed or ordinary.
        attention_mask: ``[batch, 1 or q_heads, q_len, kv_len]``, boolean or additive, or None.
        dropout: of the attention weights; with packed keys only 0 is served.
        scaling: what scores are multiplied with; None: ``head_dim ** -0.5``.
        is_causal: overrides ``module.is_causal``.
        softcap, s_aux, position_bias: softcap of scores; learned sink logits ``[q_heads]``; a bias that is added to
            scores.

    Returns:
        ``[batch, q_len, q_heads, head_dim]``, and None (no attention weights).
    """
    if kwargs.get("output_attentions"):
        warnings.warn(
            "the fused attention makes no attention weights; for output_attentions use "
            "model.set_attn_implementation('eager')",
            stacklevel=2,
        )
    view = view_of(key, value)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if view is None and not isinstance(key, GraphTensor):
        q_len, kv_len = query.shape[2], key.shape[2]
        short = attention_mask is None and causal and 1 < q_len < kv_len and not torch.compiler.is_compiling()
        if short and _left_out.holds(q_len, kv_len):
            # torch's own attention would let the first query see the first token only.
            attention_mask = dense.causal_mask(q_len, kv_len, query.device)
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                position_bias=position_bias,
                **kwargs,
            )
        bias = _with_bias(attention_mask, position_bias, causal, query.shape[2], key.shape[2])
        return dense.attend(query, key, value, bias, scale, causal, softcap, s_aux), None
    if dropout:
        raise ValueError("attention over a packed cache has no dropout; call model.eval()")
    if view is None:
        mask = _with_bias(attention_mask, position_bias, causal, query.shape[2], key.shape[2])
        handle = key.handle  # type: ignore[attr-defined]
        return torch.ops.qkv.attend(handle, query, mask, s_aux, value.shape[3], scale, causal, softcap), None
    mask = _with_bias(view.columns(attention_mask), view.columns(position_bias), causal, query.shape[2], view.length)
    backend = view.store.config.backend
    return attention(query, view, mask, scale, causal, softcap, s_aux, backend), None


def _with_bias(
    mask: torch.Tensor | None, bias: torch.Tensor | None, causal: bool, q_len: int, kv_len: int
) -> torch.Tensor | None:
    """One additive mask from a mask and a position bias; the mask itself where there is no bias."""
    if bias is None:
        return mask
    if mask is None:
        if not causal or q_len == 1:
            return bias
        mask = dense.causal_mask(q_len, kv_len, bias.device)
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return bias + mask
