"""A slow, obvious implementation of formats, storage and attention, to hold the fast one against.

Nothing of qkv is imported. Numbers are float64 (numpy); loops are plain. Where the definition itself speaks of a
float32 operation (choosing a scale, dividing or multiplying by it, the additions of a rotation), that one operation is
rounded to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

SYMMETRIC = ("int8", "fp8_e4m3", "fp8_e5m2")
AFFINE_BITS = {f"int{bits}{rotated}": bits for rotated in ("", "_rot") for bits in (2, 3, 4, 5, 6)}
FORMATS = (*SYMMETRIC, *AFFINE_BITS)
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SMALLEST_SCALE = 2.0**-126
LARGEST_BFLOAT16 = (2.0 - 2.0**-7) * 2.0**127
WARM_UP = 64
HEAD_ROOM = 1.25
EQUALIZER_TOKENS = 128
# A channel this many times as far from its centre as the median one is an outlier; this part of it is the least.
EQUALIZER_OUTLIER, EQUALIZER_LEAST = 2.0, 2.0**-8

# Codes and decoded numbers of one vector: what a format is, elsewhere defined.
Codec = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def rotated(format: str | None) -> bool:
    """Whether vectors are rotated before they are encoded."""
    return format is not None and format.endswith("_rot")


def default_granularity(format: str, is_key: bool) -> str:
    """What shares a scale unless it is said."""
    if format in AFFINE_BITS:
        return "channel" if is_key else "group"
    return "token"


def default_group(format: str) -> int:
    """Channels, or tokens, that share a scale unless it is said, where they divide the head."""
    return 64 if format in AFFINE_BITS and rotated(format) else 32


def equalized(format: str, granularity: str) -> bool:
    """Whether keys are equalized unless it is said."""
    if format in AFFINE_BITS:
        return rotated(format)
    return format == "int8" and granularity != "channel"


def equalizing_power(format: str) -> float:
    """How much channels that are no outliers are made alike."""
    return 0.0 if format in AFFINE_BITS and rotated(format) else 0.6


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


# The scales of one byte: 2**-20 .. 3584, 8 of them in each octave.
UE5M3 = [2.0 ** (code // 8 - 20) * (1 + code % 8 / 8) for code in range(255)]


def ue5m3_up(x: float) -> float:
    """The smallest scale of one byte that is not below ``x``, which lies among them."""
    return next(value for value in UE5M3 if value >= x)


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


# ---- formats that are symmetric around zero ------------------------------------------------------------------------


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


# ---- formats with a scale and a zero point -------------------------------------------------------------------------


def affine_scale(row: np.ndarray, bits: int) -> tuple[float, int]:
    """Scale and zero point of one vector; NaN and 0 where it is not finite.

    The codes ``0 .. levels`` reach from the lowest to the highest number, and the lowest one lies within 127 steps of
    zero.
    """
    if not np.isfinite(row).all():
        return math.nan, 0
    levels = np.float32(2**bits - 1)
    low, high = (np.float32(min(max(x, -(2.0**126)), 2.0**126)) for x in (row.min(), row.max()))
    excess = max((high - low) - levels * np.float32(UE5M3[-1]), np.float32(0)) * np.float32(0.5)
    low, high = low + excess, high - excess
    needed = max((high - low) / levels, abs(low) / np.float32(127))
    scale = ue5m3_up(min(max(float(needed), UE5M3[0]), UE5M3[-1]))
    return scale, int(np.clip(np.rint(low / np.float32(scale)), -127, 127))


def affine_encode(row: np.ndarray, scale: float, zero_point: int, bits: int) -> np.ndarray:
    """The codes of one vector, saturating; zeros where the scale is NaN."""
    if math.isnan(scale):
        return np.zeros(len(row), dtype=np.uint8)
    with np.errstate(over="ignore"):
        steps = np.rint(row.astype(np.float32) / np.float32(scale)).astype(np.float64)
    return np.clip(steps - zero_point, 0, 2**bits - 1).astype(np.uint8)


def affine_decode(codes: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """The numbers of one vector of codes."""
    return (codes.astype(np.float64) + zero_point) * scale


def stored_vector(row: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and decoded numbers of one vector that has a scale of its own."""
    if format in AFFINE_BITS:
        bits = AFFINE_BITS[format]
        scale, zero_point = affine_scale(row, bits)
        codes = affine_encode(row, scale, zero_point, bits)
        return codes, affine_decode(codes, scale, zero_point)
    scale = token_scale(row, format)
    codes = encode(row, scale, format)
    return codes, decode(codes, scale, format)


# ---- what vectors go through before --------------------------------------------------------------------------------


def rotation_block(dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides ``dim``."""
    return next(2**k for k in range(dim.bit_length(), -1, -1) if dim % 2**k == 0)


def rotation_signs(dim: int) -> np.ndarray:
    """A sign for each channel: the lowest bit of the finaliser of splitmix64, of multiples of its constant."""
    mask = 2**64 - 1
    signs = []
    for i in range(1, dim + 1):
        x = i * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        signs.append(1.0 if (x ^ (x >> 31)) % 2 == 1 else -1.0)
    return np.array(signs)


def hadamard_matrix(block: int) -> np.ndarray:
    """The orthogonal Hadamard matrix in Sylvester's order: entry i, j has the sign of the common bits of i and j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]) * block**-0.5


def rotation_matrix(dim: int) -> np.ndarray:
    """The rotation of ``dim`` channels: signs, then a Hadamard matrix for each block."""
    block = rotation_block(dim)
    return np.kron(np.eye(dim // block), hadamard_matrix(block)) * rotation_signs(dim)


def hadamard(x: np.ndarray) -> np.ndarray:
    """``x [..., dim]`` times the Hadamard matrix of each block, in additions of pairs, each rounded to float32."""
    dim = x.shape[-1]
    x, width = x.astype(np.float32), 1
    with np.errstate(all="ignore"):
        while width < rotation_block(dim):
            pairs = x.reshape(*x.shape[:-1], -1, 2, width)
            sums, differences = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
            x, width = np.stack([sums, differences], axis=-2).reshape(x.shape), 2 * width
        return x * np.float32(rotation_block(dim) ** -0.5)


def pair_reach(x: np.ndarray, y: np.ndarray, centre: tuple[float, float]) -> tuple[float, float]:
    """How far from its centre a turning pair ``[batch, tokens]`` can come; how far it steadily is from zero."""
    radius = max(math.hypot(a, b) for a, b in zip(x.flat, y.flat, strict=True))
    shown = max(math.hypot(a - centre[0], b - centre[1]) for a, b in zip(x.flat, y.flat, strict=True))
    quarter = x.shape[1] // 4
    fastest = steady = 0.0
    for a, b in zip(x, y, strict=True):
        late, early = (
            [math.fsum(z[part]) / quarter for z in (a, b)] for part in (slice(-quarter, None), slice(quarter))
        )
        norms = [math.hypot(*pair) for pair in zip(a, b, strict=True)]
        usual = sorted(norms)[(len(norms) - 1) // 2]
        if sorted(abs(x - usual) for x in norms)[(len(norms) - 1) // 2] < 0.04 * usual:
            steady = max(steady, usual)
        step = [x - y for x, y in zip(late, early, strict=True)]
        chance = math.hypot(np.std(a, ddof=1), np.std(b, ddof=1)) * math.sqrt(2 / quarter)
        fastest = max(fastest, (math.hypot(*step) - 2.0 * chance) / 0.75)
    return 1.25 * max(shown, min(16 * fastest, radius + math.hypot(*centre))), steady


def equalizing_vectors(
    keys: np.ndarray, power: float, pairs: list[tuple[int, int]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Centre and multiplier, float32 ``[heads, dim]``, of keys ``[batch, heads, tokens, dim]``; see equalizer.py."""
    heads, dim = keys.shape[1], keys.shape[3]
    centre, multiplier = np.zeros((2, heads, dim), dtype=np.float32)
    for h in range(heads):
        distances = []
        for d in range(dim):
            x = keys[:, h, :, d]
            x = x[np.isfinite(x)]
            centre[h, d] = math.fsum(x) / max(len(x), 1)
            distances.append(max((abs(v - float(centre[h, d])) for v in x), default=0.0))
        usual = sorted(distances)[(dim - 1) // 2] or max(distances)
        reached = [0.0] * dim
        for a, b in pairs or []:
            centres = float(centre[h, a]), float(centre[h, b])
            x, y = (np.where(np.isfinite(keys[:, h, :, c]), keys[:, h, :, c], centre[h, c]) for c in (a, b))
            reach, steady = pair_reach(x, y, centres)
            if steady > 5 * usual:
                reached[a] = reached[b] = reach
        for d in range(dim):
            ratio = max(distances[d] / usual, EQUALIZER_LEAST) if usual else 1.0
            far = max(ratio, reached[d] / usual) if usual else ratio
            multiplier[h, d] = min(ratio, EQUALIZER_OUTLIER) ** power * max(far / EQUALIZER_OUTLIER, 1.0)
    return centre, multiplier


# ---- what is stored ------------------------------------------------------------------------------------------------


@dataclass
class Token:
    """One position: exact keys and values, and what is stored of them once they are encoded."""

    exact: tuple[np.ndarray, np.ndarray]  # each [batch, heads, dim]
    stored: tuple[np.ndarray, np.ndarray] | None = None
    codes: tuple[np.ndarray, np.ndarray] | None = None
    grown: list[np.ndarray | None] = field(default_factory=list)  # scales per head once this token was encoded

    @property
    def now(self) -> tuple[np.ndarray, np.ndarray]:
        return self.exact if self.stored is None else self.stored


class Store:
    """One layer's tokens, one at a time.

    Args:
        formats: of keys and of values; None: unquantized.
        granularities: ``token``, ``head``, ``group`` or ``channel``, of keys and of values; None: the format's own.
        residual, sink: tokens at the end and at the beginning that stay exact.
        given: scales per head, or None.
        groups: channels or tokens that share a scale, of keys and of values; None: the format's own, or what fits.
        equalize: whether keys are equalized; None: where the format gains by it and no scale is given.
        vectors: given centre and multiplier of keys, ``[heads, dim]``, or None.
        codecs: formats that are not defined here.
    """

    def __init__(
        self,
        formats: tuple[str | None, str | None],
        granularities: tuple[str | None, str | None] = (None, None),
        residual: int = 0,
        sink: int = 0,
        given: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
        groups: tuple[int | None, int | None] = (None, None),
        equalize: bool | None = None,
        vectors: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
        codecs: Mapping[str, Codec] | None = None,
    ):
        self.formats, self.residual, self.sink, self.given, self.groups = formats, residual, sink, given, groups
        self.granularities = tuple(
            g or ("token" if f is None else "head" if s is not None else default_granularity(f, is_key))
            for f, g, s, is_key in zip(formats, granularities, given, (True, False), strict=True)
        )
        self.codecs = codecs or {}
        if equalize is None:
            equalize = formats[0] is not None and given[0] is None and equalized(formats[0], self.granularities[0])
        # Whether they are taken from the first tokens.
        self.takes_vectors = formats[0] is not None and equalize and all(x is None for x in vectors)
        self.vectors = vectors
        # Tokens that are encoded together, up to a position that is a multiple; and where the next of them begin.
        self.together = math.lcm(*(self._size(side) if self._per_channel(side) else 1 for side in (0, 1)))
        self.edge = sink
        self.tokens: list[Token] = []

    def _per_channel(self, side: int) -> bool:
        return self.formats[side] is not None and self.granularities[side] == "channel"

    def _size(self, side: int, dim: int | None = None) -> int:
        """Tokens in a group (channel), or channels (group) of ``dim``."""
        size = self.groups[side] or default_group(self.formats[side])
        if self.groups[side] is None and dim is not None:
            size = next((n for n in (64, 32, 16) if n <= size and dim % n == 0), dim)
        return size

    def warms_up(self) -> bool:
        return any(
            f is not None and g == "head" and s is None
            for f, g, s in zip(self.formats, self.granularities, self.given, strict=True)
        )

    def warm(self) -> int:
        """Tokens that have to have come before anything is encoded."""
        if self.takes_vectors:
            return self.sink + EQUALIZER_TOKENS
        return self.sink + WARM_UP if self.warms_up() else 0

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Adds one token, ``[batch, heads, dim]`` each."""
        self.tokens.append(Token((keys, values)))
        if self.edge == self.sink and len(self.tokens) < self.warm():
            return
        while (end := (self.edge // self.together + 1) * self.together) <= len(self.tokens) - self.residual:
            if self.edge == self.sink and self.takes_vectors:
                first = self._first(0, EQUALIZER_TOKENS)
                self.vectors = equalizing_vectors(first, equalizing_power(self.formats[0]))
            self._encode(self.edge, end)
            self.edge = end

    def _first(self, side: int, count: int) -> np.ndarray:
        """The first tokens after the sinks, ``[batch, heads, tokens, dim]``."""
        return np.stack([t.exact[side] for t in self.tokens[self.sink : self.sink + count]], axis=2)

    def _encode(self, start: int, end: int) -> None:
        tokens = self.tokens[start:end]
        stored, codes, grown = [], [], []
        for side in (0, 1):
            exact, format = np.stack([t.exact[side] for t in tokens], axis=2), self.formats[side]
            bytes_, out, current = np.zeros(exact.shape, dtype=np.uint8), exact, None
            if format is not None:
                rows, out = self._forward(side, exact), np.zeros(exact.shape)
                if self.granularities[side] == "head":
                    scale, current = self._head_scales(side, start, rows)
                    for index in np.ndindex(rows.shape[:3]):
                        bytes_[index] = encode(rows[index], scale[index[:2]], format)
                        out[index] = decode(bytes_[index], scale[index[:2]], format)
                else:
                    for index in self._vectors(side, rows.shape, start):
                        bytes_[index], out[index] = self._stored(rows[index], format)
                out = self._back(side, out)
            stored.append(out)
            codes.append(bytes_)
            grown.append(current)
        for i, token in enumerate(tokens):
            token.stored, token.codes = (tuple(x[:, :, i] for x in pair) for pair in (stored, codes))
            token.grown = grown

    def _vectors(self, side: int, shape: tuple[int, ...], start: int) -> list[tuple[int | slice, ...]]:
        """Where the numbers are that share a scale, in rows ``[batch, heads, tokens, dim]`` from a position on."""
        batch, heads, tokens, dim = shape
        granularity = self.granularities[side]
        if granularity == "token":
            inside = [(t, slice(None)) for t in range(tokens)]
        elif granularity == "group":
            size = self._size(side, dim)
            inside = [(t, slice(d, d + size)) for t in range(tokens) for d in range(0, dim, size)]
        else:
            size = self._size(side)
            edges = [0, *(t for t in range(1, tokens) if (start + t) % size == 0), tokens]
            inside = [(slice(a, b), d) for a, b in pairwise(edges) for d in range(dim)]
        return [(b, h, *place) for b in range(batch) for h in range(heads) for place in inside]

    def _stored(self, vector: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
        return self.codecs[format](vector) if format in self.codecs else stored_vector(vector, format)

    def _forward(self, side: int, rows: np.ndarray) -> np.ndarray:
        """Rows ``[batch, heads, tokens, dim]`` as they are encoded: centred, divided, rotated."""
        centre, multiplier = self.vectors if side == 0 else (None, None)
        with np.errstate(all="ignore"):
            x = rows.astype(np.float32)
            if centre is not None:
                x = x - centre.astype(np.float32)[:, None]
            if multiplier is not None:
                x = x / multiplier.astype(np.float32)[:, None]
            if rotated(self.formats[side]):
                x = hadamard(x * rotation_signs(x.shape[-1]).astype(np.float32))
        return x.astype(np.float64)

    def _back(self, side: int, rows: np.ndarray) -> np.ndarray:
        """What :meth:`_forward` turned into ``rows``."""
        centre, multiplier = self.vectors if side == 0 else (None, None)
        with np.errstate(all="ignore"):
            x = rows.astype(np.float32)
            if rotated(self.formats[side]):
                x = hadamard(x) * rotation_signs(x.shape[-1]).astype(np.float32)
            if multiplier is not None:
                x = x * multiplier.astype(np.float32)[:, None]
            if centre is not None:
                x = x + centre.astype(np.float32)[:, None]
        return x.astype(np.float64)

    def _head_scales(self, side: int, start: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scales per head ``[batch, heads]`` of tokens that are encoded together, and those that later ones start from.

        Args:
            start: position of the first of them.
            rows: ``[batch, heads, tokens, dim]``, as they are encoded.
        """
        format, (batch, heads) = self.formats[side], rows.shape[:2]
        if self.given[side] is not None:
            current = np.broadcast_to(self.given[side], (batch, heads)).astype(np.float64)
        elif start == self.sink:
            first = self._forward(side, self._first(side, WARM_UP))
            current = np.zeros((batch, heads))
            for b, h, t in np.ndindex(first.shape[:3]):
                if np.isfinite(first[b, h, t]).all():
                    current[b, h] = max(current[b, h], np.abs(first[b, h, t]).max())
            current = head_scale(current, format)
        else:
            current = self.tokens[start - 1].grown[side].copy()
        scale = np.ones((batch, heads))
        for b in range(batch):
            for h in range(heads):
                finite = np.isfinite(rows[b, h]).all()
                top = np.abs(rows[b, h]).max() if finite else 0.0
                limit = np.float32(current[b, h]) * np.float32(LARGEST[format])
                if self.given[side] is None and top > limit:
                    current[b, h] = head_scale(np.array(top), format)
                scale[b, h] = current[b, h] if finite else math.nan
        return scale, current

    def crop(self, length: int) -> None:
        """Forgets tokens behind; what is left of tokens that were encoded together stays encoded."""
        self.tokens = self.tokens[:length]
        self.edge = max(self.sink, min(self.edge, len(self.tokens)))
        if self.edge == self.sink and self.takes_vectors:
            self.vectors = (None, None)

    def map_batch(self, rows: list[int]) -> None:
        """Keeps, repeats or rearranges batch rows."""
        for t in self.tokens:
            t.exact = tuple(x[rows] for x in t.exact)
            if t.codes is not None:
                t.stored, t.codes = (tuple(x[rows] for x in pair) for pair in (t.stored, t.codes))
                t.grown = [None if x is None else x[rows] for x in t.grown]

    def now(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[batch, heads, tokens, dim]`` as the next query sees them."""
        return tuple(np.stack([t.now[side] for t in self.tokens], axis=2) for side in (0, 1))


def head_scale(magnitude: np.ndarray, format: str) -> np.ndarray:
    """The scale per head, float32, for tokens up to that magnitude."""
    needed = magnitude.astype(np.float32) * np.float32(HEAD_ROOM / LARGEST[format])
    return np.clip(needed.astype(np.float64), SMALLEST_SCALE, largest_scale(format))


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
