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
        group = heads // keys.shape[1]
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), scale=softmax_scale
        )
        return out.float(), sums
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
