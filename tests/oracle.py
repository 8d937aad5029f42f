"""A slow, obvious implementation of formats, storage and attention, to hold the fast one against.

Nothing of qkv is imported. Numbers are float64 (numpy); loops are plain. Where the definition itself speaks of a
float32 operation (choosing a scale, dividing or multiplying by it), that one operation is rounded to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

FORMATS = ("int8", "fp8_e4m3", "fp8_e5m2")
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SMALLEST_SCALE = 2.0**-126
LARGEST_BFLOAT16 = (2.0 - 2.0**-7) * 2.0**127
WARM_UP = 64
HEAD_ROOM = 1.25


# ---- numbers -------------------------------------------------------------------------------------------------------


def bfloat16_step(x: float) -> float:
    """The distance of bfloat16 numbers (8 bits of precision, exponents from -126) at ``x > 0``."""
    return 2.0 ** (max(math.frexp(x)[1] - 1, -126) - 7)


def bfloat16_up(x: float) -> float:
    """The smallest bfloat16 that is not below ``x >= 0``."""
    return math.ceil(x / bfloat16_step(x)) * bfloat16_step(x) if x else 0.0


def bfloat16_down(x: float) -> float:
    """The largest bfloat16 that is not above ``x >= 0``."""
    return math.floor(x / bfloat16_step(x)) * bfloat16_step(x) if x else 0.0


def fp8_values(format: str) -> list[float]:
    """The numbers of the codes 0 .. 127, up to the largest finite one, as the OCP specification defines them."""
    mantissa_bits, bias = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}[format]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if value <= LARGEST[format]:
            values.append(value)
    return values


_FP8 = {name: fp8_values(name) for name in ("fp8_e4m3", "fp8_e5m2")}


def largest_scale(format: str) -> float:
    """The largest scale with which every code still decodes to a finite bfloat16."""
    return bfloat16_down(LARGEST_BFLOAT16 / LARGEST[format])


def token_scale(row: np.ndarray, format: str) -> float:
    """The scale of one vector: its largest magnitude over the largest code, a bfloat16; NaN where it is not finite."""
    if not np.isfinite(row).all():
        return math.nan
    needed = float(np.float32(np.abs(row).max()) / np.float32(LARGEST[format]))
    return min(bfloat16_up(max(needed, SMALLEST_SCALE)), largest_scale(format))


def nearest_codes(scaled: np.ndarray, format: str) -> np.ndarray:
    """The bytes of the nearest numbers that the format has, saturating; a tie goes to the even code."""
    scaled = np.clip(scaled, -LARGEST[format], LARGEST[format])
    if format == "int8":
        return np.rint(scaled).astype(np.int8).view(np.uint8)  # to nearest, ties to even
    distance = np.abs(np.abs(scaled)[:, None] - np.array(_FP8[format]))
    code = distance.argmin(axis=1)  # the lower one of a tie
    above = np.minimum(code + 1, len(_FP8[format]) - 1)
    rows = np.arange(len(scaled))
    tie = (above != code) & (distance[rows, above] == distance[rows, code])
    code = np.where(tie & (code % 2 == 1), above, code)
    return (code | np.where(np.signbit(scaled), 0x80, 0)).astype(np.uint8)


def encode(row: np.ndarray, scale: float, format: str) -> np.ndarray:
    """The bytes of one vector under a scale; zeros where the scale is NaN."""
    if math.isnan(scale):
        return np.zeros(len(row), dtype=np.uint8)
    with np.errstate(over="ignore", under="ignore"):
        scaled = row.astype(np.float32) / np.float32(scale)
    return nearest_codes(scaled.astype(np.float64), format)


def code_values(codes: np.ndarray, format: str) -> np.ndarray:
    """The numbers that bytes stand for, before scaling."""
    if format == "int8":
        return codes.view(np.int8).astype(np.float64)
    magnitude = np.array(_FP8[format])[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


def decode(codes: np.ndarray, scale: float, format: str) -> np.ndarray:
    """The numbers of one vector of bytes; the product is rounded to float32."""
    return (code_values(codes, format) * scale).astype(np.float32).astype(np.float64)


# ---- what is stored ------------------------------------------------------------------------------------------------


@dataclass
class Token:
    """One position: exact keys and values, and what is stored of them once they are encoded."""

    exact: tuple[np.ndarray, np.ndarray]  # each [batch, heads, dim]
    stored: tuple[np.ndarray, np.ndarray] | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None  # each [batch, heads]
    codes: tuple[np.ndarray, np.ndarray] | None = None
    grown: list[np.ndarray | None] = field(default_factory=list)  # scales per head once this token was encoded

    @property
    def now(self) -> tuple[np.ndarray, np.ndarray]:
        return self.exact if self.stored is None else self.stored


class Store:
    """One layer's tokens, one at a time.

    Args:
        formats: of keys and of values; None: unquantized.
        granularities: ``token`` or ``head``, of keys and of values.
        residual, sink: tokens at the end and at the beginning that stay exact.
        given: scales per head, or None.
    """

    def __init__(
        self,
        formats: tuple[str | None, str | None],
        granularities: tuple[str, str] = ("token", "token"),
        residual: int = 0,
        sink: int = 0,
        given: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
    ):
        self.formats, self.granularities, self.residual, self.sink = formats, granularities, residual, sink
        self.given = given
        self.tokens: list[Token] = []

    def warms_up(self) -> bool:
        return any(
            f is not None and g == "head" and s is None
            for f, g, s in zip(self.formats, self.granularities, self.given, strict=True)
        )

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Adds one token, ``[batch, heads, dim]`` each."""
        self.tokens.append(Token((keys, values)))
        begun = any(t.codes is not None for t in self.tokens)
        if self.warms_up() and not begun and len(self.tokens) < self.sink + WARM_UP:
            return
        for position in range(self.sink, len(self.tokens) - self.residual):
            if self.tokens[position].codes is None:
                self._encode(position)

    def _encode(self, position: int) -> None:
        token = self.tokens[position]
        stored, scales, codes, grown = [], [], [], []
        for side in (0, 1):
            row, format = token.exact[side], self.formats[side]
            scale, current = self._scales(side, position)
            out, bytes_ = row.copy(), np.zeros(row.shape, dtype=np.uint8)
            if format is not None:
                for b in range(row.shape[0]):
                    for h in range(row.shape[1]):
                        bytes_[b, h] = encode(row[b, h], scale[b, h], format)
                        out[b, h] = decode(bytes_[b, h], scale[b, h], format)
            stored.append(out)
            scales.append(scale)
            codes.append(bytes_)
            grown.append(current)
        token.stored, token.scales, token.codes = tuple(stored), tuple(scales), tuple(codes)
        token.grown = grown

    def _scales(self, side: int, position: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The scales ``[batch, heads]`` of a token, and those that later tokens start from."""
        format, row = self.formats[side], self.tokens[position].exact[side]
        batch, heads = row.shape[:2]
        scale = np.ones((batch, heads))
        if format is None:
            return scale, None
        if self.granularities[side] == "token":
            for b in range(batch):
                for h in range(heads):
                    scale[b, h] = token_scale(row[b, h], format)
            return scale, None
        if self.given[side] is not None:
            current = np.broadcast_to(self.given[side], (batch, heads)).astype(np.float64)
        elif position == self.sink:
            first = self.tokens[self.sink : self.sink + WARM_UP]
            current = np.zeros((batch, heads))
            for t in first:
                for b in range(batch):
                    for h in range(heads):
                        if np.isfinite(t.exact[side][b, h]).all():
                            current[b, h] = max(current[b, h], np.abs(t.exact[side][b, h]).max())
            current = head_scale(current, format)
        else:
            current = self.tokens[position - 1].grown[side].copy()
        for b in range(batch):
            for h in range(heads):
                finite = np.isfinite(row[b, h]).all()
                top = np.abs(row[b, h]).max() if finite else 0.0
                limit = np.float32(current[b, h]) * np.float32(LARGEST[format])
                if self.given[side] is None and top > limit:
                    current[b, h] = head_scale(np.array(top), format)
                scale[b, h] = current[b, h] if finite else math.nan
        return scale, current

    def crop(self, length: int) -> None:
        self.tokens = self.tokens[:length]

    def map_batch(self, rows: list[int]) -> None:
        """Keeps, repeats or rearranges batch rows."""
        for t in self.tokens:
            t.exact = tuple(x[rows] for x in t.exact)
            if t.codes is not None:
                t.stored, t.scales, t.codes = (tuple(x[rows] for x in pair) for pair in (t.stored, t.scales, t.codes))
                t.grown = [None if x is None else x[rows] for x in t.grown]

    def now(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[batch, heads, tokens, dim]`` as the next query sees them."""
        return tuple(np.stack([t.now[side] for t in self.tokens], axis=2) for side in (0, 1))


def head_scale(magnitude: np.ndarray, format: str) -> np.ndarray:
    """The scale per head, float32, for tokens up to that magnitude."""
    needed = magnitude.astype(np.float32) * np.float32(HEAD_ROOM / LARGEST[format])
    return np.clip(needed.astype(np.float64), SMALLEST_SCALE, largest_scale(format))


def stored_tokens(x: np.ndarray, format: str | None) -> np.ndarray:
    """``x [batch, heads, tokens, dim]`` encoded with a scale per token and decoded."""
    if format is None:
        return x
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[:3]):
        scale = token_scale(x[index], format)
        out[index] = decode(encode(x[index], scale, format), scale, format)
    return out


# ---- attention -----------------------------------------------------------------------------------------------------


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention, one query at a time over the tokens that it sees.

    Args:
        query: ``[batch, q_heads, q_len, key_dim]``.
        keys, values: ``[batch, kv_heads, kv_len, head_dim]``.
        mask: boolean (True: seen) or additive, broadcast to ``[batch, q_heads, q_len, kv_len]``; -inf is not seen.
        softmax_scale: None: ``key_dim ** -0.5``.
        causal: without a mask, query i sees the first ``kv_len - q_len + i + 1`` tokens.
        softcap: or None.
        sinks: ``[q_heads]``, or None.

    Returns:
        ``[batch, q_len, q_heads, value_dim]``.
    """
    batch, heads, q_len, key_dim = query.shape
    kv_heads, kv_len = keys.shape[1], keys.shape[2]
    scale = key_dim**-0.5 if softmax_scale is None else softmax_scale
    if mask is None:
        seen = np.ones((q_len, kv_len), dtype=bool)
        if causal:
            for i in range(q_len):
                seen[i, max(0, kv_len - q_len + i + 1) :] = False
        added = np.where(seen, 0.0, -np.inf)
    else:
        added = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
    added = np.broadcast_to(added, (batch, heads, q_len, kv_len))
    out = np.zeros((batch, q_len, heads, values.shape[3]))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for i in range(q_len):
                seen = np.flatnonzero(added[b, h, i] != -np.inf)
                if len(seen) == 0:
                    continue
                score = np.einsum("td,d->t", keys[b, kv, seen], query[b, h, i]) * scale
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                score = score + added[b, h, i, seen]
                top = score.max() if sinks is None else max(score.max(), sinks[h])
                weight = np.exp(score - top)
                total = weight.sum() + (0.0 if sinks is None else np.exp(sinks[h] - top))
                out[b, i, h] = np.einsum("t,td->d", weight / total, values[b, kv, seen])
    return out
