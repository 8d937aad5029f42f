"""Attention of a pass of several tokens where each query has a window of its own, and the first tokens before it.

For a query the first tokens sit right before its own window, so at the same distance for every query whose window is
full. Turning them anew for each query is the same as turning the query back, which is cheaper: the scores with the
first tokens are those of the keys as they came and of turned queries. Queries are served in pieces, each with the
columns that it sees, so that memory and time of a long prompt are those of its window.
"""

from __future__ import annotations

import torch

from qkv.attention.dense import PIECE, late_mask, softmax_with_sinks, weigh_values, with_mask
from qkv.sinks import Sinks, WindowView


def attend(
    query: torch.Tensor,
    view: WindowView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention over a view whose window the queries pass; the rest as in :func:`qkv.attention.attention`.

    Args:
        dtype: what to compute in.
    """
    q_len, kept, window = query.shape[2], view.sinks.length, view.window
    assert window is not None
    keys, values = view.decode(dtype)
    exact = None if view.late is None else [plane.codes.to(dtype) for plane in view.late.segment.planes()]
    if kept:  # decoding may have turned them
        keys[:, :, :kept] = view.sinks.original(dtype)[0]
    end = view.first + view.length
    positions = torch.arange(end - q_len, end, device=query.device)
    pieces = []
    for start in range(0, q_len, PIECE):
        part, at = query[:, :, start : start + PIECE].to(dtype), positions[start : start + PIECE]
        rows = part.shape[2]
        if view.late is not None:
            allowed = late_mask(view, mask, q_len, start, rows, causal)
        elif mask is not None:
            allowed = mask[:, :, start : start + rows]
        else:
            allowed = _causal(view, at, causal)
        low = max(kept, int(at[0]) - window + 1 - view.first)
        high = max(low, int(at[-1]) + 1 - view.first)
        columns = torch.cat([torch.arange(kept), torch.arange(low, high)]).to(query.device)
        part_keys, part_values = keys[:, :, columns], values[:, :, columns]
        key_at = view.first + columns
        if exact is not None:
            behind = torch.arange(view.length, allowed.shape[-1], device=query.device)
            late_at = view.late.first + torch.arange(exact[0].shape[2], device=query.device)  # type: ignore[union-attr]
            near = (late_at > at[0] - window) & (late_at <= at[-1])
            part_keys = torch.cat([part_keys, exact[0][:, :, near]], dim=2)
            part_values = torch.cat([part_values, exact[1][:, :, near]], dim=2)
            columns, key_at = torch.cat([columns, behind[near]]), torch.cat([key_at, late_at[near]])
        inside = key_at[None] > at[:, None] - window
        inside[:, :kept] = True
        allowed = allowed[..., columns]
        if allowed.dtype == torch.bool:
            allowed = allowed & inside
        else:
            allowed = allowed.masked_fill(~inside, -torch.inf)
        scores = _scores(part, part_keys)
        if kept:
            scores[..., :kept] = _scores(_turned_back(part, view.sinks, at - window + 1), part_keys[:, :, :kept])
        scores = scores.to(torch.promote_types(dtype, torch.float32)) * softmax_scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = softmax_with_sinks(with_mask(scores, allowed), sinks).to(dtype)
        pieces.append(_weighed(weights, part_values).transpose(1, 2))
    return torch.cat(pieces, dim=1).to(query.dtype).contiguous()


def _causal(view: WindowView, at: torch.Tensor, causal: bool) -> torch.Tensor:
    key = torch.arange(view.first, view.first + view.length, device=at.device)
    seen = key[None] <= at[:, None]
    return (seen if causal else torch.ones_like(seen))[None, None]


def _turned_back(query: torch.Tensor, sinks: Sinks, gone: torch.Tensor) -> torch.Tensor:
    """Queries ``[batch, heads, rows, dim]``, each by as many positions as tokens are ``gone [rows]`` for it."""
    if sinks.turning is None:
        return query
    turning = sinks.turning.to(query.device)
    result = query.clone()
    turning.put(turning.pairs(query) * turning.phases(-gone.clamp(min=0)), result)
    return result


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, _ = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, query.shape[3])
    return (grouped @ keys.transpose(2, 3)).view(batch, heads, rows, keys.shape[2])


def _weighed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, tokens = weights.shape
    grouped = weights.view(batch, values.shape[1], -1, tokens)
    return weigh_values(grouped, values).view(batch, heads, rows, values.shape[3])
