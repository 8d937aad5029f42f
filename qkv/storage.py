"""One layer's store: sink tokens, packed segments, and the exact residual window, in the order of their positions.

::

    position   0 ........ sink_tokens ................ length - residual_length ........ length
               | sink (exact) | packed: segments of codes | residual window (exact) |

Tokens arrive at the right. A token is encoded once, when it leaves the residual window (at once when there is none),
and its codes are never read, moved or encoded again. Packed tokens live in segments of a fixed capacity that are
allocated as they are needed: nothing old is copied when the store grows, and the spare room is bounded.

Scales per head. Given ones are used as they are, and numbers beyond them saturate. Otherwise the first
``WARM_UP_TOKENS`` tokens after the sinks stay exact; then the scale of a head becomes ``HEAD_ROOM`` times what their
largest magnitude needs. When a later token exceeds it, the scale grows to ``HEAD_ROOM`` times what that token needs,
for the tokens from there on: a new segment begins, since a segment has one scale per head, and the one before it gives
its unused room back (up to 15 tokens of keys stay unused: their tiles are of 16). Scales therefore depend on the tokens
alone and not on how they were cut into updates. A token with a NaN or an infinity gets a segment whose scale is NaN for
its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from qkv import native
from qkv.config import CacheConfig
from qkv.formats import get_format
from qkv.formats.base import SMALLEST_SCALE, Format
from qkv.formats.layout import Layout, layout_for

WARM_UP_TOKENS = 64
HEAD_ROOM = 1.25
SEGMENT_TOKENS = 256
# A residual window brings spare room of its own; with smaller segments both together stay within 256 tokens.
SMALL_SEGMENT_TOKENS = 128
LARGE_STORE_TOKENS = 4096
RESIDUAL_SLACK = 64


class Plane:
    """The keys, or the values, of one segment: codes and scales, or rows of the model's own type.

    Attributes:
        format: the number format; None: unquantized rows.
        codes: uint8 in the order of ``layout``, or rows ``[batch, heads, capacity, dim]``.
        scale: bfloat16 ``[batch, heads, capacity]`` (per token), float32 ``[batch, heads]`` (per head), or None.
        dim: channels.
    """

    __slots__ = ("_native", "codes", "dim", "dtype", "format", "is_key", "layout", "scale")

    def __init__(self, like: torch.Tensor, capacity: int, format: Format | None, is_key: bool):
        self._native: native.Plane | None = None  # addresses of the tensors, made once
        batch, heads, _, self.dim = like.shape
        self.format, self.is_key, self.dtype = format, is_key, like.dtype
        self.scale: torch.Tensor | None = None
        self.layout: Layout | None = None
        if format is None:
            self.codes = torch.empty(batch, heads, capacity, self.dim, dtype=like.dtype, device=like.device)
        else:
            self.layout = layout_for(like.device, is_key)
            self.codes = self.layout.empty(batch, heads, capacity, self.dim, like.device)

    @classmethod
    def of_rows(cls, rows: torch.Tensor, is_key: bool) -> Plane:
        """An unquantized plane that holds ``rows [batch, heads, tokens, dim]`` itself, not a copy."""
        plane = cls(rows[:, :, :0], 0, None, is_key)
        plane.codes = rows.contiguous()
        return plane

    @property
    def per_token(self) -> bool:
        return self.scale is not None and self.scale.dim() == 3

    def write(self, offset: int, rows: torch.Tensor) -> None:
        """Encodes ``rows [batch, heads, n, dim]`` into the tokens from ``offset`` on."""
        if rows.shape[2] == 0:
            return
        lib = native.library() if rows.device.type == "cpu" else None
        if lib is not None and rows.dtype in native.FLOAT_IDS and self._native_id() is not None:
            self._run(lib.qkv_encode, rows if rows.stride(3) == 1 else rows.contiguous(), offset)
            return
        end = offset + rows.shape[2]
        if self.format is None:
            self.codes[:, :, offset:end] = rows
            return
        assert self.layout is not None
        assert self.scale is not None
        if self.per_token:
            scale = self.format.choose_scale(rows)
            self.scale[:, :, offset:end] = scale
        else:
            scale = self.scale.unsqueeze(-1)
        codes = self.format.encode(rows, scale)
        self.layout.write(self.codes, offset, codes.view(torch.uint8))

    def read_codes(self, offset: int, n: int) -> torch.Tensor:
        """The codes of ``n`` tokens in the format's own type, ``[batch, heads, n, dim]``."""
        assert self.format is not None
        assert self.layout is not None
        return self.layout.read(self.codes, offset, n, self.dim).contiguous().view(self.format.code_dtype)

    def read_scale(self, offset: int, n: int) -> torch.Tensor:
        """The scales of ``n`` tokens, ``[batch, heads, n]`` (or ``[batch, heads, 1]`` per head)."""
        assert self.scale is not None
        return self.scale[:, :, offset : offset + n] if self.per_token else self.scale.unsqueeze(-1)

    def decode_into(self, out: torch.Tensor, offset: int) -> None:
        """Fills ``out [batch, heads, n, dim]`` (any float type) with the tokens from ``offset`` on."""
        n = out.shape[2]
        if n == 0:
            return
        if self.format is None:
            out.copy_(self.codes[:, :, offset : offset + n])
            return
        lib = native.library() if out.device.type == "cpu" else None
        if lib is not None and out.dtype in native.FLOAT_IDS and self._native_id() is not None:
            self._run(lib.qkv_decode, out, offset)
            return
        out.copy_(self.format.decode(self.read_codes(offset, n), self.read_scale(offset, n), out.dtype))

    def _native_id(self) -> int | None:
        return native.FLOAT_IDS.get(self.dtype) if self.format is None else self.format.native_id

    def native(self) -> native.Plane:
        """The structure that the kernels take; made once, until the tensors change."""
        if self._native is None:
            result = native.Plane()
            codes = self.codes
            size = codes.element_size()
            result.codes = codes.data_ptr()
            result.codes_stride[:] = [codes.stride(0) * size, codes.stride(1) * size]
            number = self._native_id()
            result.format = -1 if number is None else number
            if self.scale is not None:
                size = self.scale.element_size()
                result.scale = self.scale.data_ptr()
                result.scale_stride[:] = [self.scale.stride(0) * size, self.scale.stride(1) * size]
                result.scale_kind = native.SCALE_TOKEN if self.per_token else native.SCALE_HEAD
            self._native = result
        return self._native

    def _run(self, function: Callable[..., int], rows: torch.Tensor, offset: int) -> None:
        batch, heads, n, dim = rows.shape
        native_rows = native.Rows(rows.data_ptr(), rows.stride()[:3], dim, native.FLOAT_IDS[rows.dtype])
        threads = torch.get_num_threads() if n > 1 else 1
        code = function(native_rows, self.native(), self.is_key, batch, heads, n, offset, threads)
        if code != 0:
            raise RuntimeError(f"the compiled codec refused its arguments (code {code})")

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that hold memory."""
        yield self.codes
        if self.scale is not None:
            yield self.scale

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        return None, {name: getattr(self, name) for name in self.__slots__ if name != "_native"}

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        self._native = None
        for name, value in state[1].items():
            setattr(self, name, value)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by ``function`` of it; dimension 0 is the batch."""
        self._native = None
        if self.layout is None:
            self.codes = function(self.codes).contiguous()
        else:
            # Through a fresh allocation: the kernels need the room behind the codes.
            moved = function(self.codes)
            batch, heads = moved.shape[:2]
            fresh = self.layout.empty(batch, heads, moved.shape[2] * moved.shape[4], self.dim, moved.device)
            self.codes = fresh.copy_(moved)
        if self.scale is not None:
            self.scale = function(self.scale).contiguous()


class Segment:
    """A run of consecutive tokens that does not move while it takes tokens; see the top for when it is cut to size.

    Attributes:
        key, value: the planes.
        capacity: tokens that fit.
        length: tokens stored.
        start: index of the first stored token; other than 0 only in the residual window.
    """

    __slots__ = ("capacity", "key", "length", "start", "value")

    def __init__(self, key: Plane, value: Plane, capacity: int, length: int = 0):
        self.key, self.value, self.capacity, self.length, self.start = key, value, capacity, length, 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.key.write(self.start + self.length, keys)
        self.value.write(self.start + self.length, values)
        self.length += keys.shape[2]

    def rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``n`` tokens of an unquantized segment, as views."""
        span = slice(self.start, self.start + n)
        return self.key.codes[:, :, span], self.value.codes[:, :, span]

    def drop_first(self, n: int) -> None:
        self.start += n
        self.length -= n

    def planes(self) -> tuple[Plane, Plane]:
        return self.key, self.value


@dataclass(frozen=True)
class Late:
    """Exact copies of the tokens that were encoded during a pass of several tokens.

    In a pass over several tokens, early queries must still see tokens exactly that are encoded by the end of the pass:
    those within their own residual window, and all of them while a scale per head warms up.

    Attributes:
        segment: the exact tokens.
        first: position of the first of them.
        residual_length: tokens that a query sees exactly, its own included.
        warm: tokens that have to have come before anything is encoded.
    """

    segment: Segment
    first: int
    residual_length: int
    warm: int

    def stored(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether the query at position ``query`` sees the token at ``key`` as stored (elementwise, broadcast)."""
        return (key <= query - self.residual_length) & (query + 1 >= self.warm)


@dataclass(frozen=True)
class Run:
    """``length`` tokens of a segment, from its token ``offset`` on."""

    segment: Segment
    offset: int
    length: int


class HeadScale:
    """The scales per head of keys or of values, and when they change.

    Attributes:
        current: float32 ``[batch, heads]``; None while warming up.
        given: whether they were given, and so neither warm up nor grow.
    """

    def __init__(self, format: Format, given: torch.Tensor | None):
        self.format, self.given = format, given is not None
        self._given = given
        self.current: torch.Tensor | None = None
        self._first: torch.Tensor | None = None  # as the warm-up left them

    def begin(self, batch: int, device: torch.device) -> None:
        if self._given is not None:
            self.current = self._given.to(device=device, dtype=torch.float32).expand(batch, -1).contiguous()

    def _needed(self, magnitude: torch.Tensor) -> torch.Tensor:
        needed = magnitude * (HEAD_ROOM / self.format.largest)
        return needed.clamp(SMALLEST_SCALE, self.format.largest_scale)

    def fix(self, first: torch.Tensor) -> None:
        """Takes the scales from the first tokens ``[batch, heads, tokens, dim]``; those not finite count as 0."""
        magnitude = self.format.magnitude(first)
        self.current = self._first = self._needed(torch.nan_to_num(magnitude, nan=0.0).amax(dim=-1))

    def rewind(self, planes: list[Plane]) -> None:
        """Makes the scales what they were behind ``planes``, the packed ones from the first token on."""
        if self.given or not planes:
            return
        assert self._first is not None
        self.current = self._first
        for plane in planes:
            assert plane.scale is not None
            self.current = torch.where(plane.scale.isnan(), self.current, plane.scale)

    def clear(self) -> None:
        self.current = self._first = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the scales by ``function`` of them; dimension 0 is the batch."""
        if self.current is not None:
            self.current = function(self.current).contiguous()
        if self._first is not None:
            self._first = function(self._first).contiguous()

    def nbytes(self) -> int:
        held = [self.current] if self._first is self.current else [self.current, self._first]
        return sum(x.nbytes for x in held if x is not None)

    def effective(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The scales for one token of that ``magnitude [batch, heads]``; grows :attr:`current` where it must."""
        assert self.current is not None
        if not self.given:
            exceeds = magnitude > self.current * self.format.largest  # False for NaN
            if bool(exceeds.any()):
                self.current = torch.where(exceeds, self._needed(magnitude), self.current)
        return torch.where(magnitude.isnan(), torch.nan, self.current)

    def run_length(self, magnitude: torch.Tensor) -> int:
        """How many of the tokens of ``magnitude [batch, heads, tokens]`` share the scales of the first."""
        assert self.current is not None
        changes = magnitude.isnan() != magnitude[:, :, :1].isnan()
        if not self.given:
            changes = changes | (magnitude > (self.current * self.format.largest).unsqueeze(-1))
        at = changes.any(dim=0).any(dim=0).nonzero()
        later = at[at > 0]
        return int(later[0]) if later.numel() else magnitude.shape[-1]


class LayerStore:
    """Keys and values of one attention layer.

    Args:
        config: what to store and how, see :class:`qkv.CacheConfig`; its ``layers`` are not looked at.
        key_scale, value_scale: given static scales, float32 ``[kv_heads]``, for granularity ``head``.

    Raises:
        ValueError: formats, granularity and scales that do not go together.
    """

    def __init__(
        self,
        config: CacheConfig,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ):
        self.config = config
        self.key_format = get_format(config.key_format or config.format)
        self.value_format = get_format(config.value_format or config.format)
        self.key_granularity = self._granularity(self.key_format, key_scale)
        self.value_granularity = self._granularity(self.value_format, value_scale)
        self._key_head = self._head_scale(self.key_format, self.key_granularity, key_scale)
        self._value_head = self._head_scale(self.value_format, self.value_granularity, value_scale)
        self._given = (key_scale, value_scale)
        # Whether every token is encoded as soon as it comes: what a decoding step can then do without looking further.
        self._only_packed = config.sink_tokens == 0 and config.residual_length == 0 and self.warm == 0
        self.kernel_regions: object | None = None  # what the attention kernel keeps between steps, see attention/cpu.py
        self.version = 0  # changes whenever memory is allocated, moved or dropped
        self.changes = 0  # updates of any kind
        self._clear()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "kernel_regions": None}  # holds addresses of this process, of these tensors

    def _granularity(self, format: Format | None, scale: torch.Tensor | None) -> str | None:
        if format is None:
            if scale is not None:
                raise ValueError("scales were given for a format without scales ('none')")
            return None
        wanted = self.config.granularity or ("head" if scale is not None else format.granularities[0])
        if wanted not in format.granularities:
            allowed = ", ".join(format.granularities)
            raise ValueError(f"format {format.name!r} has no granularity {wanted!r}; use one of {allowed}")
        if self.config.group_size is not None:
            raise ValueError(f"group_size goes with granularity 'group' or 'channel', not {wanted!r}; leave it out")
        if scale is not None and wanted != "head":
            raise ValueError(f"static scales go with granularity 'head', not {wanted!r}")
        return wanted

    @staticmethod
    def _head_scale(format: Format | None, granularity: str | None, given: torch.Tensor | None) -> HeadScale | None:
        return HeadScale(format, given) if format is not None and granularity == "head" else None

    def _clear(self) -> None:
        self.length = 0
        self.shape: tuple[int, int, int, int] | None = None  # batch, kv_heads, key_dim, value_dim
        self.sink: Segment | None = None
        self.packed: list[Segment] = []
        self.packed_length = 0
        self.residual: Segment | None = None
        self._open = False  # whether the last packed segment may take more tokens
        self.version += 1
        self.changes += 1
        self.kernel_regions = None  # would keep the memory of what is forgotten
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.clear()

    def reset(self) -> None:
        """Forgets all tokens and every scale that was not given."""
        self._clear()

    @property
    def quantized(self) -> bool:
        """Whether keys or values are stored in a number format."""
        return self.key_format is not None or self.value_format is not None

    @property
    def warm(self) -> int:
        """Tokens that have to have come before anything is encoded; 0 where no scale per head warms up."""
        heads = [s for s in (self._key_head, self._value_head) if s is not None and not s.given]
        return self.config.sink_tokens + WARM_UP_TOKENS if heads else 0

    # ---- appending -------------------------------------------------------------------------------------------------

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises ValueError unless keys and values ``[batch, kv_heads, n, head_dim]`` fit what is stored."""
        for name, x in (("keys", keys), ("values", values)):
            if x.dim() != 4:
                raise ValueError(f"{name} must be [batch, kv_heads, tokens, head_dim], not {list(x.shape)}")
            if not x.is_floating_point():
                raise ValueError(f"{name} must be floating point, not {x.dtype}")
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "keys and values must agree in batch, kv_heads and tokens: "
                f"{list(keys.shape[:3])} and {list(values.shape[:3])}"
            )
        if keys.dtype != values.dtype or keys.device != values.device:
            raise ValueError(
                "keys and values must have one dtype and device: "
                f"{keys.dtype} on {keys.device} and {values.dtype} on {values.device}"
            )
        shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        if min(shape) == 0:
            raise ValueError(f"batch, kv_heads and head_dim must be at least 1: {list(keys.shape)}")
        if self.shape is None:
            for name, given in zip(("key", "value"), self._given, strict=True):
                if given is not None and tuple(given.shape) != (shape[1],):
                    raise ValueError(f"{name} scales must be [kv_heads] = [{shape[1]}], not {list(given.shape)}")
            return
        names = ("batch", "kv_heads", "head_dim of keys", "head_dim of values")
        for name, now, before in zip(names, shape, self.shape, strict=True):
            if now != before:
                raise ValueError(f"{name} is {now}, but the cache holds {before}; call reset() to start anew")
        if keys.dtype != self.dtype or keys.device != self.device:
            raise ValueError(
                f"keys are {keys.dtype} on {keys.device}, but the cache holds {self.dtype} on {self.device}; "
                "call reset() to start anew"
            )

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Late | None:
        """Stores new tokens behind the others.

        Args:
            keys: ``[batch, kv_heads, n, key_dim]``, any float type.
            values: ``[batch, kv_heads, n, value_dim]``, same type.

        Returns:
            Exact copies of tokens that queries of this pass must see exactly though they are encoded now; usually None.

        Raises:
            ValueError: shapes or types that do not fit; the store is unchanged.
        """
        self.check(keys, values)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()  # a cache must not keep a graph alive
        if self.shape is None:
            self._begin(keys, values)
        n = keys.shape[2]
        before, packed_before = self.length, self.packed_length
        self.length += n
        self.changes += 1
        if n == 1 and self._only_packed:
            self._pack(keys, values)
            return None
        into_sink = min(n, max(0, self.config.sink_tokens - before))
        if into_sink:
            self.sink = self._with_room(self.sink, keys, values, into_sink, self.config.sink_tokens)
            self.sink.append(keys[:, :, :into_sink], values[:, :, :into_sink])
            keys, values = keys[:, :, into_sink:], values[:, :, into_sink:]
        if keys.shape[2] == 0:
            return None
        keep = self._tokens_to_keep()
        waiting = self.residual.length if self.residual is not None else 0
        leaving = max(0, waiting + keys.shape[2] - keep)
        if leaving and waiting:
            assert self.residual is not None
            old = min(leaving, waiting)
            gone = self.residual.rows(old)  # views: what they show is not written again before the next crop
            self.residual.drop_first(old)
            if self.residual.length == 0 and self.config.residual_length == 0:
                self.residual = None  # it held the tokens of the warm-up
                self.version += 1
        else:
            old, gone = 0, (keys[:, :, :0], values[:, :, :0])
        new = leaving - old
        if new < keys.shape[2]:
            self._to_residual(keys[:, :, new:], values[:, :, new:])
        if leaving:
            late_keys, late_values = gone
            if new:
                late_keys = torch.cat([gone[0], keys[:, :, :new]], dim=2) if old else keys[:, :, :new]
                late_values = torch.cat([gone[1], values[:, :, :new]], dim=2) if old else values[:, :, :new]
            self._pack(late_keys, late_values)
        if n == 1 or leaving == 0 or not self.quantized:
            return None
        warm = self.warm if packed_before == 0 else 0
        if self.config.prefill == "stored" and self.config.residual_length == 0 and before + 1 >= warm:
            return None
        exact = Segment(Plane.of_rows(late_keys, True), Plane.of_rows(late_values, False), leaving, leaving)
        first = packed_before + (self.sink.length if self.sink is not None else 0)
        return Late(exact, first, self.config.residual_length, warm)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        self.dtype, self.device = keys.dtype, keys.device
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.begin(keys.shape[0], keys.device)

    def _tokens_to_keep(self) -> int:
        if self.packed_length == 0 and self.length < self.warm:
            return self.length
        return self.config.residual_length

    def _exact_segment(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Segment:
        self.version += 1
        return Segment(Plane(keys, capacity, None, True), Plane(values, capacity, None, False), capacity)

    def _with_room(
        self, segment: Segment | None, keys: torch.Tensor, values: torch.Tensor, n: int, most: int | None = None
    ) -> Segment:
        """An unquantized segment with room for ``n`` more tokens: the given one, or a larger copy (up to ``most``)."""
        if segment is not None and segment.start + segment.length + n <= segment.capacity:
            return segment
        held = segment.length if segment is not None else 0
        capacity = held + n + RESIDUAL_SLACK
        fresh = self._exact_segment(keys, values, capacity if most is None else min(capacity, most))
        if segment is not None:
            fresh.append(*segment.rows(held))
        return fresh

    def _to_residual(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.residual = self._with_room(self.residual, keys, values, keys.shape[2])
        self.residual.append(keys, values)

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.packed_length += keys.shape[2]
        if self._key_head is None and self._value_head is None:
            self._fill(keys, values, None, None)
            return
        if self.packed_length == keys.shape[2]:  # the first tokens to be encoded
            self._fix_scales(keys, values)
        sides = [
            (scale, scale.format.magnitude(x))
            for scale, x in ((self._key_head, keys), (self._value_head, values))
            if scale is not None
        ]
        done, total = 0, keys.shape[2]
        while done < total:
            effective = [scale.effective(magnitude[:, :, done]) for scale, magnitude in sides]
            run = min(scale.run_length(magnitude[:, :, done:]) for scale, magnitude in sides)
            chosen = iter(effective)
            key_scale = next(chosen) if self._key_head is not None else None
            value_scale = next(chosen) if self._value_head is not None else None
            span = slice(done, done + run)
            self._fill(keys[:, :, span], values[:, :, span], key_scale, value_scale)
            done += run

    def _fix_scales(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes scales from the first tokens: those about to be encoded, and those behind them in the window."""
        rest = self.residual.rows(self.residual.length) if self.residual is not None else (None, None)
        for scale, x, behind in zip((self._key_head, self._value_head), (keys, values), rest, strict=True):
            if scale is None or scale.given:
                continue
            first = x[:, :, :WARM_UP_TOKENS]
            if first.shape[2] < WARM_UP_TOKENS and behind is not None:
                first = torch.cat([first, behind[:, :, : WARM_UP_TOKENS - first.shape[2]]], dim=2)
            scale.fix(first)

    def _fill(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scale: torch.Tensor | None,
        value_scale: torch.Tensor | None,
    ) -> None:
        if self._open and not self._same_scales(key_scale, value_scale):
            self._close()
        done, total = 0, keys.shape[2]
        while done < total:
            if not self._open or self.packed[-1].length == self.packed[-1].capacity:
                self.packed.append(self._packed_segment(keys, values, key_scale, value_scale))
                self._open = True
            segment = self.packed[-1]
            n = min(total - done, segment.capacity - segment.length)
            if n == total:
                segment.append(keys, values)
            else:
                segment.append(keys[:, :, done : done + n], values[:, :, done : done + n])
            done += n

    def _same_scales(self, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> bool:
        last = self.packed[-1]
        for plane, scale in ((last.key, key_scale), (last.value, value_scale)):
            if scale is not None and not torch.equal(plane.scale.nan_to_num(-1.0), scale.nan_to_num(-1.0)):  # type: ignore[union-attr]
                return False
        return True

    def _close(self) -> None:
        """Ends the last packed segment; its unused room is given back."""
        last = self.packed[-1]
        if last.length < last.capacity:
            for plane in last.planes():
                _shrink(plane, last.length)
            last.capacity = last.length
            self.version += 1
        self._open = False

    def _packed_segment(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scale: torch.Tensor | None,
        value_scale: torch.Tensor | None,
    ) -> Segment:
        small = self.config.residual_length > 0 and self.length < LARGE_STORE_TOKENS
        capacity = SMALL_SEGMENT_TOKENS if small else SEGMENT_TOKENS
        planes = []
        sides = ((keys, self.key_format, key_scale, True), (values, self.value_format, value_scale, False))
        for x, format, scale, is_key in sides:
            plane = Plane(x, capacity, format, is_key)
            if format is not None:
                if scale is None:
                    plane.scale = torch.zeros(*x.shape[:2], capacity, dtype=torch.bfloat16, device=x.device)
                else:
                    plane.scale = scale.clone()
            planes.append(plane)
        self.version += 1
        return Segment(planes[0], planes[1], capacity)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """All tokens in the order of their positions."""
        segments = [self.sink, *self.packed, self.residual]
        return [Run(s, s.start, s.length) for s in segments if s is not None and s.length > 0]

    def segments(self) -> Iterator[Segment]:
        """All segments that hold memory."""
        yield from (s for s in (self.sink, *self.packed, self.residual) if s is not None)

    # ---- changing the batch, and the end ---------------------------------------------------------------------------

    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies ``function`` to every tensor; it selects or repeats along dimension 0, the batch."""
        if self.shape is None:
            return
        batch = function(torch.empty(self.shape[0], 1, device=self.device)).shape[0]
        for segment in self.segments():
            for plane in segment.planes():
                plane.map(function)
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.map(function)
        self.shape = (batch, *self.shape[1:])
        self.version += 1
        self.changes += 1

    def crop(self, length: int) -> None:
        """Forgets all tokens from position ``length`` on.

        Tokens that had left the residual window stay encoded, also where the window would now reach back to them.

        Raises:
            ValueError: a negative length.
        """
        if length < 0:
            raise ValueError(f"crop takes the number of tokens to keep, at least 0, not {length}")
        if length >= self.length:
            return
        if length == 0:
            self.reset()
            return
        left = length
        if self.sink is not None:
            self.sink = self._cut(self.sink, min(self.sink.length, left))
            left -= self.sink.length
        kept = []
        self.packed_length = 0
        for segment in self.packed:
            segment.length = min(segment.length, left)
            left -= segment.length
            if segment.length:
                kept.append(segment)
                self.packed_length += segment.length
        if len(kept) < len(self.packed):
            if self._key_head is not None:
                self._key_head.rewind([segment.key for segment in kept])
            if self._value_head is not None:
                self._value_head.rewind([segment.value for segment in kept])
            self._open = bool(kept)
        self.packed = kept
        if self._open and self.config.residual_length and kept[-1].capacity - kept[-1].length > SMALL_SEGMENT_TOKENS:
            self._close()
        if self.residual is not None:
            self.residual = self._cut(self.residual, left)
        self.length = length
        self.version += 1
        self.changes += 1
        self.kernel_regions = None

    def _cut(self, segment: Segment, length: int) -> Segment:
        """An unquantized segment of which ``length`` tokens are kept, without much spare room."""
        segment.length = length
        if segment.capacity - length <= 2 * RESIDUAL_SLACK:
            return segment
        rows = segment.rows(length)
        fresh = self._exact_segment(*rows, length + RESIDUAL_SLACK)
        fresh.append(*rows)
        return fresh

    # ---- accounting ------------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, sinks, residual window and spare room."""
        total = sum(
            tensor.untyped_storage().nbytes()
            for segment in self.segments()
            for plane in segment.planes()
            for tensor in plane.tensors()
        )
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                total += scale.nbytes()
        return total

    def stored_bits(self) -> int:
        """Bits of the codes and scales of the tokens stored, without spare room."""
        if self.shape is None:
            return 0
        vectors = self.shape[0] * self.shape[1]
        bits = 0
        for segment in self.segments():
            for plane in segment.planes():
                if plane.format is None:
                    bits += vectors * segment.length * plane.dim * plane.codes.element_size() * 8
                    continue
                bits += vectors * segment.length * plane.dim * plane.format.bits
                bits += vectors * (16 * segment.length if plane.per_token else 32)
        return bits

    def stored_values(self) -> int:
        """Numbers stored: tokens x heads x (key_dim + value_dim)."""
        if self.shape is None:
            return 0
        batch, heads, key_dim, value_dim = self.shape
        return self.length * batch * heads * (key_dim + value_dim)


def _shrink(plane: Plane, tokens: int) -> None:
    plane._native = None
    if plane.layout is None:
        plane.codes = plane.codes[:, :, :tokens].clone(memory_format=torch.contiguous_format)
    else:
        batch, heads = plane.codes.shape[:2]
        fresh = plane.layout.empty(batch, heads, tokens, plane.dim, plane.codes.device)
        plane.codes = fresh.copy_(plane.codes[:, :, : fresh.shape[2]])
    if plane.per_token:
        assert plane.scale is not None
        plane.scale = plane.scale[:, :, :tokens].clone(memory_format=torch.contiguous_format)
