"""Attention in plain torch, in double precision: what every other backend is held against."""

from __future__ import annotations

import torch

from qkv.attention.dense import causal_mask, late_mask, softmax_with_sinks, weigh_values, with_mask
from qkv.view import KVView

name = "reference"


def available() -> str | None:
    """None: it always is."""
    return None


def supports(query: torch.Tensor, view: KVView) -> str | None:
    """None: it serves everything."""
    return None


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over a view; arguments and result as in :func:`qkv.attention.attention`."""
    _, heads, q_len, _ = query.shape
    keys, values = view.decode(torch.float64)
    if view.late is not None:
        mask = late_mask(view, mask, q_len, 0, q_len, causal)
        keys = torch.cat([keys, view.late.segment.key.codes.double()], dim=2)
        values = torch.cat([values, view.late.segment.value.codes.double()], dim=2)
    elif mask is None and causal and q_len > 1:
        mask = causal_mask(q_len, view.length, query.device)
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = query.double() @ keys.transpose(2, 3) * softmax_scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = with_mask(scores, mask)
    out = weigh_values(softmax_with_sinks(scores, sinks), values)
    return out.transpose(1, 2).to(query.dtype).contiguous()
