"""Attention of a prompt over many stored tokens, decoded a tile at a time, so that what it takes has a bound.

Each tile gives its own softmax and the logarithm of its sum, and the results are merged by these (Dao 2023, arXiv
2307.08691). Without a mask torch's blocked kernel does the tiles; with one, plain torch does, a piece of the queries at
a time.
"""

from __future__ import annotations

import torch

from qkv.attention.dense import PIECE, causal_mask, with_mask
from qkv.view import KVView

# Tokens that are decoded at once; up to twice as many are left to torch's attention in one piece.
TILE = 2048
# Queries in one piece where some tokens are seen exactly: a multiple of all sizes of groups.
LATE_PIECE = 128


def serves(query: torch.Tensor, view: KVView) -> bool:
    """Whether a view is long enough to be worth it, and simple enough."""
    return view.length > 2 * TILE and view.late is None and query.shape[2] <= TILE


def attend_view(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attention over a view; arguments and result as in :func:`qkv.attention.attention`.

    None where a number is not finite, which merging would spread: to be done in another way.
    """
    batch, heads, q_len, _ = query.shape
    kv_len, value_dim = view.length, view.shape[3]
    total = torch.zeros(batch, heads, q_len, value_dim, dtype=torch.float32, device=query.device)
    log_sum = torch.full((batch, heads, q_len), -torch.inf, dtype=torch.float32, device=query.device)
    if sinks is not None:
        log_sum = sinks.float().view(1, -1, 1).expand_as(log_sum).clone()
    # Without a mask all queries see all of what was there before them, and the last tile is their own tokens.
    own = kv_len - q_len if causal and mask is None else kv_len
    at = [*range(0, own, TILE), *([own] if own < kv_len else [])]
    for start, end in zip(at, [*at[1:], kv_len], strict=True):
        keys, values = view.decode(query.dtype, start, end)
        for first in range(0, q_len, PIECE):
            rows = slice(first, first + PIECE)
            allowed = mask[:, :, rows, start:end] if mask is not None else None
            if start == own:
                allowed = causal_mask(q_len, q_len, query.device)[:, :, rows]
            out, sums = _tile(query[:, :, rows], keys, values, allowed, softmax_scale, softcap)
            _merge(total[:, :, rows], log_sum[:, :, rows], out, sums)
    if not bool(total.isfinite().all()):
        return None
    return total.to(query.dtype).transpose(1, 2).contiguous()


def serves_late(view: KVView, mask: torch.Tensor | None, causal: bool) -> bool:
    """Whether the pass is a long prompt without a mask, of which queries see a group or a window exactly.

    In a short one the masks are small, and what torch's blocked kernel takes for itself counts.
    """
    late = view.late
    if late is None or mask is not None or not causal or view.length <= TILE:
        return False
    return late.group > 1 or late.residual_length > 0


def attend_late(
    query: torch.Tensor,
    view: KVView,
    softmax_scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Causal attention over a view with exact copies: what all queries of a piece see as stored needs no mask.

    None where a number is not finite, as :func:`attend_view`.
    """
    late = view.late
    assert late is not None
    batch, heads, q_len, _ = query.shape
    out = query.new_empty(batch, q_len, heads, view.shape[3])
    keys, values = view.decode(query.dtype)
    exact_keys, exact_values = (plane.codes.to(query.dtype) for plane in late.segment.planes())
    # Positions of the pass: pieces end at multiples of LATE_PIECE, so that groups end there too.
    start, end = view.first + view.length - q_len, view.first + view.length
    first = start
    while first < end:
        last = min((first // LATE_PIECE + 1) * LATE_PIECE, end)
        rows = slice(first - start, last - start)
        part = query[:, :, rows]
        total = torch.zeros(batch, heads, last - first, view.shape[3], dtype=torch.float32, device=query.device)
        log_sum = torch.full((batch, heads, last - first), -torch.inf, dtype=torch.float32, device=query.device)
        if sinks is not None:
            log_sum = sinks.float().view(1, -1, 1).expand_as(log_sum).clone()
        # Before this token all queries of the piece see what is stored.
        whole = (first + 1 - late.residual_length) // late.group * late.group if first + 1 >= late.warm else 0
        common = min(max(whole, late.first, view.first), first + 1)
        if common > view.first:
            seen = slice(0, common - view.first)
            tile = _tile(part, keys[:, :, seen], values[:, :, seen], None, softmax_scale, softcap)
            _merge(total, log_sum, *tile)
        if common < last:
            at = torch.arange(common, last, device=query.device)
            asking = torch.arange(first, last, device=query.device).unsqueeze(1)
            copied = slice(max(late.first - common, 0), max(late.first + late.segment.length - common, 0))
            stored = at <= asking
            exact = stored[:, copied] & ~late.stored(asking, at[copied])
            stored[:, copied] &= ~exact
            here = slice(common - view.first, last - view.first)
            copies = slice(max(common - late.first, 0), max(last - late.first, 0))
            both = [
                torch.cat([x[:, :, here], y[:, :, copies]], dim=2)
                for x, y in ((keys, exact_keys), (values, exact_values))
            ]
            allowed = torch.cat([stored, exact], dim=1)[None, None]
            tile = _tile(part, both[0], both[1], allowed, softmax_scale, softcap)
            _merge(total, log_sum, *tile)
        if not bool(total.isfinite().all()):
            return None
        out[:, rows] = total.transpose(1, 2)
        first = last
    return out


def _tile(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a tile alone gives, ``[batch, heads, rows, value_dim]``, and the logarithm of the sum of its softmax."""
    batch, heads, rows, dim = query.shape
    if allowed is None and softcap is None and dim == values.shape[3] and query.device.type == "cpu":
        # All rows see all tokens, so that the heads that share keys can be rows of one head.
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.reshape(batch, keys.shape[1], -1, dim), keys, values, scale=softmax_scale
        )
        return out.reshape(batch, heads, rows, -1).float(), sums.reshape(batch, heads, rows)
    grouped = query.reshape(batch, keys.shape[1], -1, dim)
    scores = (grouped @ keys.transpose(2, 3)).view(batch, heads, rows, -1).float() * softmax_scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = with_mask(scores, allowed)
    sums = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(sums == -torch.inf, 0.0, sums).unsqueeze(-1)).to(values.dtype)
    out = weights.view(batch, keys.shape[1], -1, keys.shape[2]) @ values
    return out.view(batch, heads, rows, -1).float(), sums


def _merge(total: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Takes a tile into what the ones before it gave, in place."""
    both = torch.logaddexp(log_sum, sums)
    safe = torch.where(both == -torch.inf, 0.0, both)
    total.mul_(torch.exp(log_sum - safe).unsqueeze(-1)).add_(out * torch.exp(sums - safe).unsqueeze(-1))
    log_sum.copy_(both)
