"""Attention of a prompt over many stored tokens, decoded a tile at a time, so that what it takes has a bound.

Each tile gives its own softmax and the logarithm of its sum, and the results are merged by these (Dao 2023, arXiv
2307.08691). torch's blocked kernel does the tiles where it can, elsewhere plain torch does, a piece of the queries at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkv.attention.dense import PIECE, causal_mask, late_columns, late_mask, with_mask
from qkv.view import KVView

# Tokens that are decoded at once; up to twice as many are left to torch's attention in one piece.
TILE = 2048
# Queries in one piece where some tokens are seen exactly: a multiple of all sizes of groups.
LATE_PIECE = 128
# Such pieces that are done together: what they see exactly is copied for each.
LATE_PIECES = 8


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
    q_len, kv_len = query.shape[2], view.length
    total, log_sum = _nothing_seen(query, view, sinks)
    # Without a mask all queries see all of what was there before them, and the last tile is their own tokens.
    own = kv_len - q_len if causal and mask is None else kv_len
    _take_tiles(total, log_sum, query, view, mask, own, softmax_scale, softcap)
    if own < kv_len:
        keys, values = view.decode(query.dtype, own)
        for first in range(0, q_len, PIECE):
            rows = slice(first, first + PIECE)
            allowed = causal_mask(q_len, q_len, query.device)[:, :, rows]
            tile = _tile(query[:, :, rows], keys, values, allowed, softmax_scale, softcap)
            _merge(total[:, :, rows], log_sum[:, :, rows], *tile)
    if not bool(total.isfinite().all()):
        return None
    return total.to(query.dtype).transpose(1, 2).contiguous()


def serves_late(query: torch.Tensor, view: KVView, mask: torch.Tensor | None, causal: bool) -> bool:
    """Whether the pass is over a long prompt, or a piece of one, of which queries see a group or a window exactly.

    In a short one the masks are small, and what torch's blocked kernel takes for itself counts. With a mask of the
    model's only pieces are served: it is as large as a mask over the stored tokens anyway.
    """
    late = view.late
    if late is None or (late.group == 1 and late.residual_length == 0):
        return False
    if mask is None:
        return causal and view.length > TILE
    return view.length > 2 * TILE and query.shape[2] <= TILE


def attend_late(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attention over a view with exact copies, causal where there is no mask.

    What all queries see as stored is decoded a tile at a time. What comes behind, the tokens of the pass and those that
    waited for them, is decoded once, and attended to by a piece of the queries at a time.

    None where a number is not finite, as :func:`attend_view`.
    """
    late = view.late
    assert late is not None
    batch, heads, q_len, _ = query.shape
    out = query.new_empty(batch, q_len, heads, view.shape[3])
    start = view.first + view.length - q_len  # position of the first query
    tiled = _seen_as_stored(view, start)
    totals = None
    if tiled > TILE:
        totals = _nothing_seen(query, view, sinks)
        _take_tiles(*totals, query, view, mask, tiled, softmax_scale, softcap)
    else:  # with the rest, which is cheaper
        tiled = 0
    rest = _Rest.of(view, tiled, query.dtype)
    first = 0
    while first < q_len:
        # Pieces end at positions that are multiples of LATE_PIECE, so that groups end there too.
        rows = slice(first, min((start + first) // LATE_PIECE * LATE_PIECE + LATE_PIECE - start, q_len))
        alike = rest.alike(q_len, rows) if mask is None else 1
        rows = slice(first, rows.stop + (alike - 1) * LATE_PIECE)
        part = query[:, :, rows]
        total, log_sum = _nothing_seen(part, view, sinks) if totals is None else (x[:, :, rows] for x in totals)
        if alike > 1:
            fresh = totals is None and sinks is None
            _take_alike(total, log_sum, fresh, part, rest, q_len, rows, softmax_scale, softcap)
        else:
            for keys, values, allowed in rest.tiles(mask, q_len, rows):
                _merge(total, log_sum, *_tile(part, keys, values, allowed, softmax_scale, softcap))
        if not bool(total.isfinite().all()):
            return None
        out[:, rows] = total.transpose(1, 2)
        first = rows.stop
    return out


def _take_alike(
    total: torch.Tensor,
    log_sum: torch.Tensor,
    fresh: bool,
    query: torch.Tensor,
    rest: _Rest,
    q_len: int,
    rows: slice,
    softmax_scale: float,
    softcap: float | None,
) -> None:
    """Merges what the queries ``rows`` see, pieces that are alike: what each sees exactly is one call for all.

    Many small calls would take as long again as the arithmetic. ``fresh``: nothing was merged before.
    """
    batch, heads, count, dim = query.shape
    n = count // LATE_PIECE
    out, sums = (total, log_sum) if fresh else (torch.zeros_like(total), torch.full_like(log_sum, -torch.inf))
    for k in range(n):
        piece = slice(k * LATE_PIECE, (k + 1) * LATE_PIECE)
        keys, values = rest.common(q_len, rows.start + piece.start)
        if keys.shape[2]:
            tile = _tile(query[:, :, piece], keys, values, None, softmax_scale, softcap)
            out[:, :, piece], sums[:, :, piece] = tile
    if not fresh:
        _merge(total, log_sum, out, sums)
    keys, values, allowed = rest.own(q_len, rows, n)
    pieces = query.reshape(batch, heads, n, LATE_PIECE, dim).transpose(1, 2).flatten(0, 1)
    out, sums = _tile(pieces, keys, values, allowed, softmax_scale, softcap)
    out = out.unflatten(0, (batch, n)).transpose(1, 2).flatten(2, 3)
    _merge(total, log_sum, out, sums.unflatten(0, (batch, n)).transpose(1, 2).flatten(2, 3))


@dataclass(frozen=True)
class _Rest:
    """The tokens behind those that all queries of a pass see as stored.

    Attributes:
        view: with ``late`` set.
        begin: the first of the tokens shown that is one of them.
        stored: keys and values ``[batch, kv_heads, view.length - begin, dim]``, decoded.
        exact: keys and values of ``view.late``, ``[batch, kv_heads, late tokens, dim]``.
    """

    view: KVView
    begin: int
    stored: tuple[torch.Tensor, torch.Tensor]
    exact: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, view: KVView, begin: int, dtype: torch.dtype) -> _Rest:
        """The tokens shown from ``begin`` on."""
        assert view.late is not None
        keys, values = (plane.codes.to(dtype) for plane in view.late.segment.planes())
        return cls(view, begin, view.decode(dtype, begin), (keys, values))

    def tiles(
        self, mask: torch.Tensor | None, q_len: int, rows: slice
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Keys, values and masks for the queries ``rows`` of ``q_len``: what they all see as stored, and the others."""
        view, late = self.view, self.view.late
        assert late is not None
        common = self._stored_before(self._asking(q_len, rows.start))
        if common > self.begin:
            seen = slice(0, common - self.begin)
            yield self.stored[0][:, :, seen], self.stored[1][:, :, seen], _part(mask, rows, self.begin, common)
        # A mask may let queries see tokens behind them.
        last = view.length - q_len + rows.stop if mask is None else view.length
        if common < last:
            here = slice(common - self.begin, last - self.begin)
            of_late = late_columns(view, common, last)
            offset = view.first - late.first
            copies = slice(of_late.start + offset, of_late.stop + offset)
            keys, values = (
                torch.cat([stored[:, :, here], exact[:, :, copies]], dim=2)
                for stored, exact in zip(self.stored, self.exact, strict=True)
            )
            yield keys, values, late_mask(view, mask, q_len, rows.start, rows.stop - rows.start, True, (common, last))

    def alike(self, q_len: int, rows: slice) -> int:
        """How many pieces from ``rows`` on, which is one, see tokens in the same places as seen from their beginning.

        At least 1. None of them is cut, and of all that they do not see as stored there are copies.
        """
        view, begin = self.view, self._asking(q_len, rows.start)
        back = begin - self._stored_before(begin)
        copied = late_columns(view, begin - back, view.length)
        regular = rows.stop - rows.start == LATE_PIECE and copied.start == begin - back
        if not regular or view.late is None or view.first + begin + 1 < view.late.warm:
            return 1
        n = 1
        while n < LATE_PIECES and begin + (n + 1) * LATE_PIECE <= copied.stop:
            asking = begin + n * LATE_PIECE
            if asking - self._stored_before(asking) != back:
                break
            n += 1
        return n

    def common(self, q_len: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the piece that begins with the query ``row`` sees as stored; maybe none."""
        seen = slice(0, self._stored_before(self._asking(q_len, row)) - self.begin)
        return self.stored[0][:, :, seen], self.stored[1][:, :, seen]

    def own(self, q_len: int, rows: slice, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch * n, kv_heads, tokens, dim]`` of n pieces that are alike, behind :meth:`common`.

        First as stored, those that the last queries of a piece see so, then exactly; and the mask, one for all.
        """
        late = self.view.late
        assert late is not None
        begin = self._asking(q_len, rows.start)
        low = self._stored_before(begin)
        size = begin + LATE_PIECE - low
        as_stored = self._stored_before(begin + LATE_PIECE - 1) - low
        mask = late_mask(self.view, None, q_len, rows.start, LATE_PIECE, True, (low, low + size))
        mask = torch.cat([mask[..., :as_stored], mask[..., size:]], dim=-1)
        sources = ((self.stored, as_stored, low - self.begin), (self.exact, size, low + self.view.first - late.first))
        both = []
        for kind in range(2):  # keys, values
            parts = [
                planes[kind][:, :, at : at + length + (n - 1) * LATE_PIECE].unfold(2, length, LATE_PIECE)
                for planes, length, at in sources
                if length
            ]
            both.append(torch.cat([part.permute(0, 2, 1, 4, 3) for part in parts], dim=3).flatten(0, 1))
        return both[0], both[1], mask

    def _asking(self, q_len: int, row: int) -> int:
        """The token shown that is the query ``row``'s own."""
        return self.view.length - q_len + row

    def _stored_before(self, asking: int) -> int:
        """Up to which of the tokens shown the query of a token, and all behind it, see those as stored."""
        return max(_seen_as_stored(self.view, self.view.first + asking), self.begin)


def _seen_as_stored(view: KVView, query: int) -> int:
    """How many of the tokens shown the query at a position, and all behind it, see as stored, if they see them."""
    late = view.late
    assert late is not None
    encoded = (query + 1 - late.residual_length) // late.group * late.group if query + 1 >= late.warm else 0
    return min(max(encoded, late.first, view.first), query + 1) - view.first


def _nothing_seen(query: torch.Tensor, view: KVView, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What tiles are merged into: zeros ``[batch, heads, q_len, value_dim]``, and the logarithms of empty sums."""
    batch, heads, q_len, _ = query.shape
    total = torch.zeros(batch, heads, q_len, view.shape[3], dtype=torch.float32, device=query.device)
    log_sum = torch.full((batch, heads, q_len), -torch.inf, dtype=torch.float32, device=query.device)
    if sinks is not None:
        log_sum = sinks.float().view(1, -1, 1).expand_as(log_sum).clone()
    return total, log_sum


def _take_tiles(
    total: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    count: int,
    softmax_scale: float,
    softcap: float | None,
) -> None:
    """Merges the first ``count`` of the tokens shown, which all queries see unless a mask says otherwise."""
    for start in range(0, count, TILE):
        end = min(start + TILE, count)
        keys, values = view.decode(query.dtype, start, end)
        for first in range(0, query.shape[2], PIECE):
            rows = slice(first, first + PIECE)
            tile = _tile(query[:, :, rows], keys, values, _part(mask, rows, start, end), softmax_scale, softcap)
            _merge(total[:, :, rows], log_sum[:, :, rows], *tile)


def _part(mask: torch.Tensor | None, rows: slice, start: int, end: int) -> torch.Tensor | None:
    """The mask of some rows for the tokens shown from ``start`` to ``end``; None where it changes nothing.

    That is so for most tiles of a padded batch, which the blocked kernel can then do.
    """
    if mask is None:
        return None
    part = mask[:, :, rows, start:end]
    changes = ~part if part.dtype == torch.bool else part
    return part if bool(changes.any()) else None


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
    if softcap is None and dim == values.shape[3] and query.device.type == "cpu":
        # No row's mask comes from its place, so that the heads that share keys can be rows of one head.
        bias = None if allowed is None else _bias(allowed, heads // keys.shape[1], query.dtype)
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.reshape(batch, keys.shape[1], -1, dim), keys, values, attn_mask=bias, scale=softmax_scale
        )
        if bias is not None:  # torch gives zeros, and 0 for the logarithm, where a row sees nothing
            sums = sums.masked_fill((bias == -torch.inf).all(dim=-1), -torch.inf)
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


def _bias(allowed: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask as an additive one ``[batch or 1, kv_heads or 1, group * rows, tokens]``: heads are rows of one head."""
    if allowed.dtype == torch.bool:
        allowed = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
    batch, heads, rows, tokens = allowed.shape
    if heads == 1:
        return allowed.to(dtype).repeat(1, 1, group, 1)
    return allowed.to(dtype).reshape(batch, heads // group, group * rows, tokens)


def _merge(total: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Takes a tile into what the ones before it gave, in place."""
    both = torch.logaddexp(log_sum, sums)
    safe = torch.where(both == -torch.inf, 0.0, both)
    total.mul_(torch.exp(log_sum - safe).unsqueeze(-1)).addcmul_(out, torch.exp(sums - safe).unsqueeze(-1))
    log_sum.copy_(both)
