"""Attention of many queries: stored tokens are decoded, one layer at a time, and torch's own attention does the rest.

For a prompt the arithmetic of attention outweighs the decoding by far, and torch's blocked kernels do it well. The
decoded tensors live for one layer's attention only.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from qkv.view import KVView

# Queries in one piece where a mask has to be made: bounds the memory of masks and of scores.
PIECE = 128


def attend_view(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over a view; arguments and result as in :func:`qkv.attention.attention`."""
    keys, values = view.decode(query.dtype)
    if view.late is None:
        return attend(query, keys, values, mask, softmax_scale, causal, softcap, sinks)
    late, q_len = view.late, query.shape[2]
    exact_keys, exact_values = (plane.codes.to(query.dtype) for plane in late.segment.planes())
    count = q_len
    if late.group == 1 and late.residual_length == 0:
        # Only the first queries see anything exactly, while scales or vectors are not there yet.
        count = min(max(late.warm - 1 - (view.first + view.length - q_len), 0), q_len)
    rest = []
    if count < q_len:
        # With all queries, even those that are done again, torch needs no mask where it would need one for the others.
        skip = 0 if mask is None and causal and q_len == view.length else count
        others = mask[:, :, skip:] if mask is not None else None
        if mask is None and causal and skip:
            others = causal_mask(q_len, view.length, query.device)[:, :, skip:]
        out = attend(query[:, :, skip:], keys, values, others, softmax_scale, causal, softcap, sinks)
        rest.append(out[:, count - skip :])
    pieces = []
    for start in range(0, count, PIECE):
        part = query[:, :, start : min(start + PIECE, count)]
        allowed = late_mask(view, mask, query.shape[2], start, part.shape[2], causal)
        # What no query of the piece sees is left out: of a prompt nearly half of the tokens, and of their copies most.
        stored, exact = _used_columns(allowed[..., : view.length]), _used_columns(allowed[..., view.length :])
        both = [torch.cat([keys[:, :, stored], exact_keys[:, :, exact]], dim=2)]
        both.append(torch.cat([values[:, :, stored], exact_values[:, :, exact]], dim=2))
        columns = torch.cat([allowed[..., : view.length][..., stored], allowed[..., view.length :][..., exact]], dim=-1)
        pieces.append(attend(part, both[0], both[1], columns, softmax_scale, False, softcap, sinks))
    return torch.cat([*pieces, *rest], dim=1)


def _used_columns(allowed: torch.Tensor) -> slice:
    """From the first to the last column of a mask, boolean or additive, that any row sees; at least one."""
    seen = allowed if allowed.dtype == torch.bool else allowed != -torch.inf
    used = seen.flatten(0, -2).any(dim=0).nonzero().flatten()
    return slice(int(used[0]), int(used[-1]) + 1) if used.numel() else slice(0, 1)


def late_mask(
    view: KVView,
    mask: torch.Tensor | None,
    q_len: int,
    start: int,
    rows: int,
    causal: bool,
    columns: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The mask over the stored tokens followed by the exact copies in ``view.late``.

    Every query sees each token once: as stored, or exactly.

    Args:
        view: with ``late`` set.
        mask: ``[batch or 1, heads or 1, q_len, length]``, boolean or additive, or None.
        q_len: queries of the whole pass; the last one is at the last position.
        start, rows: the queries to make the mask for.
        causal: whether a query sees only positions up to its own (where ``mask`` is None).
        columns: the first of the tokens shown that the mask is about, and the one behind the last; None: all.

    Returns:
        ``[batch or 1, heads or 1, rows, tokens + late tokens]``, of those in ``columns``, of the kind that ``mask``
        has, boolean for None.
    """
    late = view.late
    if late is None:
        raise ValueError("late_mask is for a view with exact copies")
    low, high = columns if columns is not None else (0, view.length)
    end = view.first + view.length
    query = torch.arange(start, start + rows, device=view.device).unsqueeze(1) + (end - q_len)
    key = torch.arange(view.first + low, view.first + high, device=view.device)
    copied = late_columns(view, low, high)
    span = slice(copied.start - low, copied.stop - low)
    stored = torch.ones(rows, high - low, dtype=torch.bool, device=view.device)
    stored[:, span] = late.stored(query, key[span])
    exact = ~stored[:, span]
    if mask is None:
        seen = key <= query if causal else torch.ones_like(stored)
        return torch.cat([seen & stored, seen[:, span] & exact], dim=1)[None, None]
    part = mask[:, :, start : start + rows, low:high]
    if mask.dtype == torch.bool:
        return torch.cat([part & stored, part[..., span] & exact], dim=-1)
    return torch.cat([part.masked_fill(~stored, -torch.inf), part[..., span].masked_fill(~exact, -torch.inf)], dim=-1)


def late_columns(view: KVView, low: int, high: int) -> slice:
    """Those of the tokens shown from ``low`` to ``high`` of which ``view.late`` has exact copies; maybe none."""
    assert view.late is not None
    first = view.late.first - view.first
    begin = min(max(first, low), high)
    return slice(begin, max(begin, min(first + view.late.segment.length, high)))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over ordinary tensors ``[batch, kv_heads, kv_len, head_dim]``; the rest as in ``attention``."""
    if softcap is None and sinks is None:
        out = _torch_attention(query, keys, values, mask, softmax_scale, causal)
        # In torch's attention a NaN can show in rows that do not see its token. Rare, so done again and with care.
        if bool(out.isfinite().all()):
            return out
    return _attend_by_pieces(query, keys, values, mask, softmax_scale, causal, softcap, sinks)


def _torch_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    q_len, kv_len = query.shape[2], keys.shape[2]
    if causal and mask is None and q_len not in (1, kv_len):
        mask = causal_mask(q_len, kv_len, query.device)
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    out = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal and mask is None and q_len > 1,
        scale=softmax_scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Boolean ``[1, 1, q_len, kv_len]``: the last query is at the last position."""
    query = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    return (torch.arange(kv_len, device=device) <= query)[None, None]


def _attend_by_pieces(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    if mask is None and causal and q_len > 1:
        mask = causal_mask(q_len, kv_len, query.device)
    pieces = []
    for start in range(0, q_len, PIECE):
        part = query[:, :, start : start + PIECE]
        rows = part.shape[2]
        grouped = part.reshape(batch, kv_heads, group * rows, -1)
        scores = (grouped @ keys.transpose(2, 3)).float() * softmax_scale
        scores = scores.view(batch, heads, rows, kv_len)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = with_mask(scores, mask[:, :, start : start + rows])
        weights = softmax_with_sinks(scores, sinks).to(values.dtype)
        out = weigh_values(weights.view(batch, kv_heads, group * rows, kv_len), values)
        pieces.append(out.view(batch, heads, rows, -1).transpose(1, 2))
    return torch.cat(pieces, dim=1).contiguous()


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of ``[batch, heads, rows, kv_len]``; a row that sees nothing gives zeros.

    Args:
        scores: logits, -inf where nothing is to be seen.
        sinks: ``[heads]`` logits that take part without a value, or None.
    """
    top = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    return weights / torch.where(total == 0, 1.0, total)


def with_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores with a mask, boolean or additive; what is not seen is -inf, even where the score is not a number."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return torch.where(mask == -torch.inf, -torch.inf, scores + mask)


def weigh_values(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``weights [batch, heads, rows, tokens] @ values [batch, heads, tokens, dim]``.

    A token of weight 0 adds nothing, even if its value is not finite.
    """
    finite = values.isfinite().all(dim=-1).flatten(0, 1).all(dim=0)
    if bool(finite.all()):
        return weights @ values
    out = weights @ values.masked_fill(~finite.unsqueeze(1), 0.0)
    for t in (~finite).nonzero().flatten().tolist():
        weight = weights[..., t : t + 1]
        out += torch.where(weight != 0, weight * values[..., t : t + 1, :], 0.0)
    return out
