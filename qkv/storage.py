"""One layer's store: sink tokens, packed segments, and the exact residual window, in the order of their positions.

::

    position   0 ........ sink_tokens ................ length - residual_length ........ length
               | sink (exact) | packed: segments of codes | residual window (exact) |

Tokens arrive at the right. A token is encoded once, when it leaves the residual window (at once when there is none),
and its codes are never read, moved or encoded again. Packed tokens live in segments of a fixed capacity that are
allocated as they are needed: nothing old is copied when the store grows, and the spare room is bounded.

With a scale per channel tokens are encoded a group at a time: those of the last, unfinished group are in the residual
window too, until it is full. Groups end at positions that are multiples of their size. The first one, behind the sinks,
is shorter; so is one that begins where a crop cut another: what that had encoded stays as it is, and a new segment
begins.

A layer with a sliding window forgets tokens in front as it grows: segments that are out of the window are dropped
whole, and of the first one that is not, the tokens in front are hidden. How scales per head come about is in
head_scale.py.

With a ``capacity`` the layout is static: all memory is taken when the first token of its kind comes, and none after
that. Sinks and residual window get their own, the packed tokens one segment for all that may come (a sliding window:
small segments, used again when they are empty).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import wraps
from math import lcm
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.nn.functional import pad

from qkv.config import CacheConfig
from qkv.equalizer import WARM_UP_TOKENS as EQUALIZER_TOKENS
from qkv.equalizer import equalizing_vectors
from qkv.formats import get_format
from qkv.formats.base import Format
from qkv.head_scale import WARM_UP_TOKENS, HeadScale
from qkv.planes import Plane, Scaling, Segment
from qkv.rotary import Rotary
from qkv.transform import Transform, rotation_signs

SEGMENT_TOKENS = 256
# A residual or a sliding window brings spare room of its own; with smaller segments both stay within 256 tokens.
SMALL_SEGMENT_TOKENS = 128
LARGE_STORE_TOKENS = 4096
RESIDUAL_SLACK = 64
# Tokens that may share a scale per channel: whole tiles of keys, and parts of a segment.
CHANNEL_GROUPS = (16, 32, 64, 128)


Method = TypeVar("Method", bound=Callable[..., Any])


def _lasting(method: Method) -> Method:
    """Lets a method make tensors that may be written anywhere later.

    What is made in ``torch.inference_mode`` can never be written outside of it, and a cache goes on in both.
    """

    @wraps(method)
    def lasting(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return cast("Method", lasting)


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
        group: tokens that are encoded together, up to a position that is a multiple of it.
    """

    segment: Segment
    first: int
    residual_length: int
    warm: int
    group: int

    def stored(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether the query at position ``query`` sees the token at ``key`` as stored (elementwise, broadcast)."""
        end = (key // self.group + 1) * self.group
        return (end <= query + 1 - self.residual_length) & (query + 1 >= self.warm)

    def from_position(self, position: int) -> Late | None:
        """The copies from ``position`` on; None where there are none."""
        n = position - self.first
        if n <= 0:
            return self
        if n >= self.segment.length:
            return None
        key, value = (plane.codes[:, :, n:] for plane in self.segment.planes())
        rest = Segment(Plane.of_rows(key, True), Plane.of_rows(value, False), key.shape[2], key.shape[2])
        return replace(self, segment=rest, first=position)


@dataclass(frozen=True)
class Run:
    """``length`` tokens of a segment, from its token ``offset`` on."""

    segment: Segment
    offset: int
    length: int


class Elsewhere(Protocol):
    """Who knows about full segments that lie on another device than their store, see host_spill.py."""

    def bring(self, store: LayerStore, segments: Iterable[Segment]) -> None:
        """Sees to it that segments of a store can be read on its device, until those of another one are brought."""

    def take_back(self, store: LayerStore, segment: Segment) -> None:
        """Takes a segment to the store's device to stay: it is going to be written to."""

    def rest(self) -> None:
        """Drops what was brought."""


class LayerStore:
    """Keys and values of one attention layer.

    Args:
        config: what to store and how, see :class:`qkv.CacheConfig`; its ``layers`` are not looked at.
        key_scale, value_scale: given static scales, float32 ``[kv_heads]``, for granularity ``head``.
        key_centre, key_multiplier: given equalizing vectors, float32 ``[kv_heads, key_dim]``, see equalizer.py.
        window: whether tokens are going to leave in front (:meth:`drop_before`); segments are smaller then.
        capacity: tokens that may come at most, for a static layout; None: no limit, memory is taken as it is needed.
        rotary: which channels of keys positions turn together, see equalizer.py; None: not known.

    Attributes:
        length: tokens that have come; the position behind the last one.
        first: position of the first token that is still held.
        elsewhere: asked before tokens are read, where full segments may lie on another device; else None.

    Raises:
        ValueError: formats, granularity and scales that do not go together.
    """

    def __init__(
        self,
        config: CacheConfig,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
        window: bool = False,
        capacity: int | None = None,
        key_centre: torch.Tensor | None = None,
        key_multiplier: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ):
        self.config = config
        self._rotary = rotary
        self.capacity = capacity
        self._window = window
        self.key_format = get_format(config.key_format or config.format)
        self.value_format = get_format(config.value_format or config.format)
        self.key_granularity = self._granularity("key", self.key_format, key_scale)
        self.value_granularity = self._granularity("value", self.value_format, value_scale)
        self._key_head = self._head_scale(self.key_format, self.key_granularity, key_scale)
        self._value_head = self._head_scale(self.value_format, self.value_granularity, value_scale)
        self._given = (key_scale, value_scale)
        self._vectors = (key_centre, key_multiplier)
        self._equalizes = self._checked_equalizing(key_scale)
        # Tokens that are encoded together.
        self.group = lcm(self._group_tokens("key"), self._group_tokens("value"))
        # Whether every token is encoded as soon as it comes: what a decoding step can then do without looking further.
        heads = self._key_head is not None or self._value_head is not None
        self._only_packed = config.sink_tokens == 0 and config.residual_length == 0 and not heads and self.group == 1
        self.kernel_call: object | None = None
        self.kernel_regions: object | None = None  # what the attention kernel keeps between steps, see attention/cpu.py
        self.version = 0  # changes whenever memory is allocated, moved or dropped
        self.changes = 0  # updates of any kind
        self.elsewhere: Elsewhere | None = None
        self._clear()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "kernel_regions": None, "kernel_call": None}  # addresses of this process

    def _granularity(self, side: str, format: Format | None, scale: torch.Tensor | None) -> str | None:
        if format is None:
            if scale is not None:
                raise ValueError("scales were given for a format without scales ('none')")
            return None
        config = self.config
        wanted = getattr(config, f"{side}_granularity") or config.granularity
        wanted = wanted or ("head" if scale is not None else self._default_granularity(side, format))
        if wanted not in format.granularities:
            allowed = ", ".join(format.granularities)
            raise ValueError(f"format {format.name!r} has no granularity {wanted!r}; use one of {allowed}")
        if scale is not None and wanted != "head":
            raise ValueError(f"static scales go with granularity 'head', not {wanted!r}")
        size = self._group_size(side)
        if size is not None and wanted not in ("group", "channel"):
            # Of a size for both sides only one may make use.
            other = "value" if side == "key" else "key"
            used = getattr(config, f"{other}_granularity") or config.granularity
            other_format = get_format(getattr(config, f"{other}_format") or config.format)
            used = used or (self._default_granularity(other, other_format) if other_format is not None else None)
            if getattr(config, f"{side}_group_size") is not None or used not in ("group", "channel"):
                raise ValueError(f"group_size goes with granularity 'group' or 'channel', not {wanted!r}; leave it out")
        if wanted == "channel" and size is not None and size not in CHANNEL_GROUPS:
            allowed = ", ".join(map(str, CHANNEL_GROUPS))
            raise ValueError(
                f"with granularity 'channel', group_size is a number of tokens, one of {allowed}; not {size}"
            )
        return wanted

    @staticmethod
    def _default_granularity(side: str, format: Format) -> str:
        return (format.key_granularity if side == "key" else None) or format.granularities[0]

    def _group_size(self, side: str) -> int | None:
        own: int | None = getattr(self.config, f"{side}_group_size")
        return own if own is not None else self.config.group_size

    def _group_tokens(self, side: str) -> int:
        """Tokens of one side that are encoded together."""
        format = self.key_format if side == "key" else self.value_format
        granularity = self.key_granularity if side == "key" else self.value_granularity
        if format is None or granularity != "channel":
            return 1
        return self._group_size(side) or format.group_sizes["channel"]

    def _checked_equalizing(self, key_scale: torch.Tensor | None) -> bool:
        """Whether keys are equalized."""
        given = self._vectors[0] is not None or self._vectors[1] is not None
        if self.key_format is None:
            if given:
                raise ValueError("vectors for equalizing were given for keys that are not quantized ('none')")
            return False
        wanted = self.config.equalize
        if wanted is None:
            # Scales that were given without vectors are those of keys as they are. A scale per channel of keys that are
            # not rotated needs none.
            alone = self.key_granularity == "channel" and not self.key_format.rotated
            by_default = self.key_format.equalized and key_scale is None and not alone
            return given or by_default
        if given and not wanted:
            raise ValueError("the scales bring vectors for equalizing keys, but equalize is false")
        if wanted and key_scale is not None and not given:
            raise ValueError("scales for keys were given without the vectors for equalizing them, but equalize is true")
        return wanted

    @staticmethod
    def _head_scale(format: Format | None, granularity: str | None, given: torch.Tensor | None) -> HeadScale | None:
        return HeadScale(format, given) if format is not None and granularity == "head" else None

    def _clear(self) -> None:
        self.length = self.first = 0
        # Shapes of one token's keys and values where nothing but appending is to be done with it; else nothing.
        self._one_token: tuple[torch.Size | None, torch.Size | None] = (None, None)
        self.shape: tuple[int, int, int, int] | None = None  # batch, kv_heads, key_dim, value_dim
        self.sink: Segment | None = None
        self.packed: list[Segment] = []
        self.packed_length = 0
        self._encoded = False  # whether a token was ever encoded: scales per head and vectors are fixed by then
        self.residual: Segment | None = None
        self._empty: list[Segment] = []  # of a static sliding window: segments to be used again
        self._open = False  # whether the last packed segment may take more tokens
        self.version += 1
        self.changes += 1
        self.kernel_regions = None  # would keep the memory of what is forgotten
        self._transforms: tuple[Transform | None, Transform | None] = (None, None)
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.clear()

    def reset(self) -> None:
        """Forgets all tokens and every scale that was not given."""
        if self.elsewhere is not None:
            self.elsewhere.rest()
        self._clear()

    @property
    def quantized(self) -> bool:
        """Whether keys or values are stored in a number format."""
        return self.key_format is not None or self.value_format is not None

    @property
    def _has_window(self) -> bool:
        """Whether tokens wait exactly in a residual window, be it only for their group to be full."""
        return self.config.residual_length > 0 or self.group > 1

    @property
    def warm(self) -> int:
        """Tokens that have to have come before anything is encoded; 0 where no scale or vector is taken from them."""
        if self._equalizes and self._vectors == (None, None):
            return self.config.sink_tokens + EQUALIZER_TOKENS
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
            for name, given in zip(("key_centre", "key_multiplier"), self._vectors, strict=True):
                if given is not None and tuple(given.shape) != (shape[1], shape[2]):
                    wanted = f"[kv_heads, head_dim] = [{shape[1]}, {shape[2]}]"
                    raise ValueError(f"{name} must be {wanted}, not {list(given.shape)}")
            self._scalings(shape[2], shape[3])
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
        if keys.shape == self._one_token[0] and values.shape == self._one_token[1]:
            done = self._append_one(keys, values) if self._only_packed else self._append_waiting(keys, values)
            if done:
                return None
        return self._append_any(keys, values)

    @_lasting
    def _append_any(self, keys: torch.Tensor, values: torch.Tensor) -> Late | None:
        if keys.dtype != values.dtype and torch.is_autocast_enabled(keys.device.type):
            # Autocast leaves keys in float32 when it rotates them, and values in its own type.
            wide = torch.promote_types(keys.dtype, values.dtype)
            keys, values = keys.to(wide), values.to(wide)
        self.check(keys, values)
        if self.capacity is not None and self.length + keys.shape[2] > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.capacity} tokens: {keys.shape[2]} more do not fit; "
                "make it with a larger max_cache_len, or take tokens back with crop() or reset()"
            )
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()  # a cache must not keep a graph alive
        if self.shape is None:
            self._begin(keys, values)
        n = keys.shape[2]
        before, encoded_before = self.length, self._encoded
        first_packed = self.first + self._sink_length() + self.packed_length
        self.length += n
        self.changes += 1
        into_sink = min(n, max(0, self.config.sink_tokens - before))
        if into_sink:
            self.sink = self._with_room(self.sink, keys, values, into_sink, self.config.sink_tokens)
            self.sink.append(keys[:, :, :into_sink], values[:, :, :into_sink])
            keys, values = keys[:, :, into_sink:], values[:, :, into_sink:]
        if keys.shape[2] == 0:
            return None
        keep = self._tokens_to_keep()
        waiting = self.residual.length if self.residual is not None else 0
        end = self.length - keep
        leaving = max(0, waiting + keys.shape[2] - keep - end % self.group)
        if leaving and waiting:
            assert self.residual is not None
            old = min(leaving, waiting)
            gone = self.residual.rows(old)  # views: what they show is not written again before the next crop
            if self.capacity is not None and keys.shape[2] > self.residual.room:
                gone = (gone[0].clone(), gone[1].clone())  # the room in front is about to be used again
            self.residual.drop_first(old)
            if self.residual.length == 0 and self.config.residual_length == 0 and self.group == 1:
                self.residual = None  # it held the tokens of the warm-up
                self.version += 1
            else:  # after a warm-up, or a long group, it has more room than it needs
                self.residual = self._cut(self.residual, self.residual.length)
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
            self._pack(late_keys, late_values, first_packed + into_sink)
        if n == 1 or leaving == 0 or not self.quantized:
            return None
        warm = 0 if encoded_before else self.warm
        at_once = self.config.residual_length == 0 and self.group == 1
        if self.config.prefill == "stored" and at_once:
            # Only during the warm-up, and then only of its own tokens, is anything seen exactly.
            leaving = min(leaving, warm - first_packed - into_sink) if before + 1 < warm else 0
            if leaving <= 0:
                return None
            late_keys, late_values = late_keys[:, :, :leaving], late_values[:, :, :leaving]
        exact = Segment(Plane.of_rows(late_keys, True), Plane.of_rows(late_values, False), leaving, leaving)
        return Late(exact, first_packed + into_sink, self.config.residual_length, warm, self.group)

    def _append_one(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """The usual step of decoding, without a look at anything that it does not need; False: it is not this one.

        Every microsecond here is paid in every layer and step, with cold memory.
        """
        segment = self.packed[-1] if self._open else None
        if segment is None or segment.room == 0 or not self._alike(keys, values):
            return False
        segment.append_one(keys, values)
        self.length += 1
        self.packed_length += 1
        self.changes += 1
        return True

    def _append_waiting(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """The usual steps with a residual window: nothing leaves it, or its first token does and is encoded alone."""
        residual = self.residual
        if residual is None or residual.room == 0 or self.length < self.config.sink_tokens:
            return False
        length = self.length + 1
        if not self._encoded and length < self.warm:
            end = 0
        else:
            end = length - self.config.residual_length
            end -= end % self.group
        if not self._alike(keys, values) or (self.capacity is not None and length > self.capacity):
            return False
        leaving = end - (self.length - residual.length)
        if leaving > 0:
            segment = self.packed[-1] if self._open else None
            heads = self._key_head is not None or self._value_head is not None
            if self.group > 1 or leaving > 1 or residual.length == 0 or heads or segment is None or not segment.room:
                return False
            segment.append_one(*residual.rows(1))
            residual.drop_first(1)
            self.packed_length += 1
        residual.append_one(keys, values)
        self.length = length
        self.changes += 1
        return True

    def _alike(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the tensors are of the store's type and device, and of no graph."""
        if keys.requires_grad or values.requires_grad:
            return False
        return keys.dtype == values.dtype == self.dtype and keys.device == values.device == self.device

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        self.dtype, self.device = keys.dtype, keys.device
        self.place = keys.device
        self._set_one_token()
        self.scalings = self._scalings(keys.shape[3], values.shape[3])
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.begin(keys.shape[0], keys.device)
        if not self._equalizes or self._vectors != (None, None):
            self._set_transforms(*self._vectors)

    def _scalings(self, key_dim: int, value_dim: int) -> tuple[Scaling | None, Scaling | None]:
        """What shares a scale, of keys and of values.

        Raises:
            ValueError: a group size that does not go with the head size.
        """
        made: list[Scaling | None] = []
        for side, dim in (("key", key_dim), ("value", value_dim)):
            format = self.key_format if side == "key" else self.value_format
            granularity = self.key_granularity if side == "key" else self.value_granularity
            if format is None or granularity is None:
                made.append(None)
            else:
                size = self._group_size(side) if granularity in ("group", "channel") else None
                made.append(Scaling.of(format, granularity, size, dim, side))
        return made[0], made[1]

    def _set_transforms(self, centre: torch.Tensor | None, multiplier: torch.Tensor | None) -> None:
        assert self.shape is not None
        made: list[Transform | None] = []
        sides = ((self.key_format, self.shape[2], centre, multiplier), (self.value_format, self.shape[3], None, None))
        for format, dim, *vectors in sides:
            signs = rotation_signs(dim, self.device) if format is not None and format.rotated else None
            held = [None if x is None else x.to(self.device, torch.float32).contiguous() for x in vectors]
            made.append(
                Transform(signs, *held)
                if format is not None and (signs is not None or any(x is not None for x in held))
                else None
            )
        self._transforms = (made[0], made[1])

    def _set_one_token(self) -> None:
        if self.shape is not None:
            batch, heads, key_dim, value_dim = self.shape
            self._one_token = (torch.Size((batch, heads, 1, key_dim)), torch.Size((batch, heads, 1, value_dim)))

    def _tokens_to_keep(self) -> int:
        """Tokens that stay exact; with a scale per channel those of an unfinished group come on top."""
        if not self._encoded and self.length < self.warm:
            return self.length
        return self.config.residual_length

    def _exact_segment(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Segment:
        self.version += 1
        return Segment(Plane(keys, capacity, None, True), Plane(values, capacity, None, False), capacity)

    def _with_room(
        self, segment: Segment | None, keys: torch.Tensor, values: torch.Tensor, n: int, most: int | None = None
    ) -> Segment:
        """An unquantized segment with room for ``n`` more tokens: the given one, or a larger copy (up to ``most``)."""
        if segment is not None and n <= segment.room:
            return segment
        if self.capacity is not None:
            if segment is not None:
                segment.to_front()
                return segment
            kept = max(self.config.residual_length + self.group - 1, self.warm)
            # Twice, so that the tokens in front can be moved without being in their own way.
            return self._exact_segment(keys, values, most if most is not None else kept + max(kept, RESIDUAL_SLACK))
        held = segment.length if segment is not None else 0
        capacity = held + n + RESIDUAL_SLACK
        fresh = self._exact_segment(keys, values, capacity if most is None else min(capacity, most))
        if segment is not None:
            fresh.append(*segment.rows(held))
        return fresh

    def _to_residual(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.residual = self._with_room(self.residual, keys, values, keys.shape[2])
        self.residual.append(keys, values)

    def _pack(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Encodes tokens, the first of them at ``position``: whole groups, or what is left of one."""
        self.packed_length += keys.shape[2]
        first_ever, self._encoded = not self._encoded, True
        if first_ever:
            self._fix_vectors(keys)
        if self._key_head is None and self._value_head is None:
            self._fill(keys, values, None, None, position)
            return
        if first_ever:
            self._fix_scales(keys, values)
        sides = [
            (scale, self._magnitude(scale, x, transform, position))
            for scale, x, transform in zip(
                (self._key_head, self._value_head), (keys, values), self._transforms, strict=True
            )
            if scale is not None
        ]
        # Tokens that are encoded together have one magnitude: they share a segment.
        done, total = 0, keys.shape[2]
        while done < total:
            effective = [scale.effective(magnitude[:, :, done]) for scale, magnitude in sides]
            run = min(scale.run_length(magnitude[:, :, done:]) for scale, magnitude in sides)
            chosen = iter(effective)
            key_scale = next(chosen) if self._key_head is not None else None
            value_scale = next(chosen) if self._value_head is not None else None
            span = slice(done, done + run)
            self._fill(keys[:, :, span], values[:, :, span], key_scale, value_scale, position + done)
            done += run

    def _magnitude(self, scale: HeadScale, x: torch.Tensor, transform: Transform | None, position: int) -> torch.Tensor:
        """The largest magnitude of the tokens encoded together, for each of them: ``[batch, heads, tokens]``."""
        magnitude = scale.format.magnitude(x if transform is None else transform.forward(x))
        if self.group == 1:
            return magnitude
        in_front = position % self.group
        groups = pad(magnitude, (in_front, 0)).unflatten(2, (-1, self.group))
        return groups.amax(dim=3, keepdim=True).expand_as(groups).flatten(2)[:, :, in_front:]  # NaN where one is

    def _fix_vectors(self, keys: torch.Tensor) -> None:
        """Takes the vectors for equalizing keys from the first tokens."""
        if self._equalizes and self._vectors == (None, None):
            assert self.key_format is not None
            if keys.is_meta:  # a plan: their size is all that counts
                vector = keys.new_empty(keys.shape[1], keys.shape[3], dtype=torch.float32)
                self._set_transforms(vector, vector)
                return
            first = self._first_tokens(keys, 0, EQUALIZER_TOKENS)
            pairs = None if self._rotary is None else self._rotary.pairs(first.shape[3], first.device)
            self._set_transforms(*equalizing_vectors(first, self.key_format.equalizing_power, pairs))

    def _fix_scales(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes scales from the first tokens."""
        heads = (self._key_head, self._value_head)
        for side, (scale, x, transform) in enumerate(zip(heads, (keys, values), self._transforms, strict=True)):
            if scale is None or scale.given:
                continue
            first = self._first_tokens(x, side, WARM_UP_TOKENS)
            scale.fix(first if transform is None else transform.forward(first))

    def _first_tokens(self, x: torch.Tensor, side: int, count: int) -> torch.Tensor:
        """The first ``count`` keys (side 0) or values: of those about to be encoded, and behind them in the window."""
        first = x[:, :, :count]
        if first.shape[2] < count and self.residual is not None:
            behind = self.residual.rows(self.residual.length)[side]
            first = torch.cat([first, behind[:, :, : count - first.shape[2]]], dim=2)
        return first

    def _fill(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scale: torch.Tensor | None,
        value_scale: torch.Tensor | None,
        position: int,
    ) -> None:
        if self._open and not self._same_scales(key_scale, value_scale):
            self._close()
        done, total = 0, keys.shape[2]
        while done < total:
            if not self._open or self.packed[-1].room == 0:
                segment = self._packed_segment(keys, values, key_scale, value_scale, (position + done) % self.group)
                self.packed.append(segment)
                self._open = True
            segment = self.packed[-1]
            n = min(total - done, segment.room)
            if n == total:
                segment.append(keys, values)
            else:
                segment.append(keys[:, :, done : done + n], values[:, :, done : done + n])
            done += n

    def _same_scales(self, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> bool:
        last = self.packed[-1]
        for plane, scale in ((last.key, key_scale), (last.value, value_scale)):
            if scale is None or scale.is_meta:  # a plan: scales do not grow
                continue
            held = plane.scale.to(scale.device)  # type: ignore[union-attr]  # a full segment may lie elsewhere
            if not torch.equal(held.nan_to_num(-1.0), scale.nan_to_num(-1.0)):
                return False
        return True

    def _close(self) -> None:
        """Ends the last packed segment; its unused room is given back."""
        if self.packed[-1].room:
            self.packed[-1].shrink()
            self.version += 1
        self._open = False

    def _packed_segment(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scale: torch.Tensor | None,
        value_scale: torch.Tensor | None,
        start: int,
    ) -> Segment:
        """A new segment; its first ``start`` places stay empty, so that groups end where they should."""
        if self._empty:
            segment = self._empty.pop()
            segment.start, segment.length = start, 0
            for plane, scale in ((segment.key, key_scale), (segment.value, value_scale)):
                if scale is not None:
                    assert plane.scale is not None
                    plane.scale.copy_(scale)
            self.version += 1
            return segment
        capacity = self._packed_capacity(start)
        sides = ((keys, self.key_format, key_scale, True), (values, self.value_format, value_scale, False))
        planes = [
            Plane(x, capacity, format, is_key, scaling, None if scale is None else scale.clone(), transform)
            for (x, format, scale, is_key), scaling, transform in zip(
                sides, self.scalings, self._transforms, strict=True
            )
        ]
        self.version += 1
        return Segment(planes[0], planes[1], capacity, start=start)

    def _packed_capacity(self, start: int) -> int:
        """Places of the next packed segment, a number of whole groups, of which the first ``start`` stay empty."""
        if self.capacity is not None and not self._window:
            left = self.capacity - self.config.sink_tokens - sum(segment.length for segment in self.packed)
            return -(-(start + left) // self.group) * self.group
        small = self._window or (self._has_window and self.length < LARGE_STORE_TOKENS)
        most = SMALL_SEGMENT_TOKENS if small else SEGMENT_TOKENS
        # The first segments of a short cache are small, so that it is never much larger than what it holds.
        step = lcm(32, self.group)
        return most if self.capacity is not None else min(most, -(-self.length // step) * step)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def runs(self, start: int = 0) -> list[Run]:
        """The tokens from position ``start`` on that are held, in the order of their positions."""
        hidden = max(0, start - self.first)
        result = []
        for segment in self.segments():
            if hidden < segment.length:
                result.append(Run(segment, segment.start + hidden, segment.length - hidden))
            hidden = max(0, hidden - segment.length)
        return result

    def _sink_length(self) -> int:
        return self.sink.length if self.sink is not None else 0

    def segments(self) -> Iterator[Segment]:
        """All segments that hold memory."""
        yield from (s for s in (self.sink, *self.packed, self.residual) if s is not None)

    # ---- changing the batch, and both ends -------------------------------------------------------------------------

    def drop_before(self, position: int) -> None:
        """Forgets the tokens before ``position``. Views made before go on to show them.

        While scales per head warm up nothing is forgotten: they are taken from all of the first tokens.
        """
        if self.warm and not self._encoded:
            return
        if self.group > 1 and self.residual is not None:
            # What waits for its group to be full stays, so that groups are the same however the input was cut.
            position = min(position, self.length - self.residual.length)
        left = min(position, self.length) - self.first
        if left <= 0:
            return
        self.first += left
        for segment in self.segments():
            n = min(left, segment.length)
            segment.drop_first(n)
            left -= n
            if segment in self.packed:
                self.packed_length -= n
        # A segment that may still take tokens stays, even when none of its tokens is left.
        keep = self.packed[-1:] if self._open else []
        for segment in self.packed:
            if not segment.length and segment not in keep:
                self._forget(segment)
        if self.capacity is not None:
            left_empty = (s for s in self.packed if not s.length and s not in keep and not s.shared)
            self._empty.extend(s for s in left_empty if s.capacity == SMALL_SEGMENT_TOKENS)
        self.packed = [s for s in self.packed if s.length or s in keep]
        # A window needs one more than would hold it; what a long prompt had beyond that is given back.
        del self._empty[max(0, 1 - (self.first - self.length) // SMALL_SEGMENT_TOKENS - len(self.packed)) :]
        if self.sink is not None and self.sink.length == 0:
            self.sink = None
        self.version += 1

    def _forget(self, segment: Segment) -> None:
        """A packed segment goes, all of whose tokens have left in front."""
        if self._key_head is not None:
            self._key_head.forget(segment.key)
        if self._value_head is not None:
            self._value_head.forget(segment.value)

    @_lasting
    def map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies ``function`` to every tensor; it selects or repeats along dimension 0, the batch."""
        if self.shape is None:
            return
        batch = function(torch.empty(self.shape[0], 1, device=self.device)).shape[0]
        self._empty = []
        for segment in self.segments():
            segment.map(function)
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.map(function)
        self.shape = (batch, *self.shape[1:])
        self._set_one_token()
        self.version += 1
        self.changes += 1

    @_lasting
    def fork(self) -> LayerStore:
        """A store of the same tokens that goes on by itself.

        The two share the packed segments that are full or closed; neither writes to these again. What may still take
        tokens is copied: the sinks, the residual window, the last packed segment (in a static layout without a sliding
        window all packed tokens).
        """
        fresh = copy(self)
        fresh._key_head, fresh._value_head = copy(self._key_head), copy(self._value_head)
        fresh.sink = self.sink.owned() if self.sink is not None else None
        fresh.residual = self.residual.owned() if self.residual is not None else None
        fresh.packed = [
            segment.owned() if self._open and segment is self.packed[-1] and segment.room else segment.twin()
            for segment in self.packed
        ]
        fresh._empty = []
        return fresh

    @property
    def away(self) -> bool:
        """Whether the stored tokens were moved away from the model's device."""
        return self.shape is not None and self.place != self.device

    def move(self, device: torch.device | None) -> None:
        """Moves the stored tokens to ``device``, or back to the model's (None), where they must be for new ones.

        A view that has its runs written down goes on to show the tensors that it was made of.
        """
        if self.shape is None:
            return
        target = device if device is not None else self.device
        if self.place != target:
            self._replace(lambda x: x.to(target))
            self.place = target

    @_lasting
    def _replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by ``function`` of it, in new segments."""
        self.sink = self.sink.mapped(function) if self.sink is not None else None
        self.packed = [segment.mapped(function) for segment in self.packed]
        self.residual = self.residual.mapped(function) if self.residual is not None else None
        self._empty = []
        self._move_transforms(function)
        for scale in (self._key_head, self._value_head):
            if scale is not None:
                scale.map(function)
        self.kernel_regions = None
        self.version += 1

    def _move_transforms(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        old = self._transforms
        key, value = (None if x is None else x.map(function) for x in old)
        self._transforms = (key, value)
        for segment in self.packed:
            for plane, transform in zip(segment.planes(), self._transforms, strict=True):
                plane.transform = transform

    @_lasting
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
        if length <= self.first:
            raise ValueError(f"cannot keep {length} tokens: those before position {self.first} are gone")
        left = length - self.first
        if self.sink is not None:
            self.sink = self._cut(self.sink, min(self.sink.length, left))
            left -= self.sink.length
        kept = []
        self.packed_length = 0
        for segment in self.packed:
            if not segment.length:
                self._forget(segment)  # it was only kept because it had room
            segment.length = min(segment.length, left)
            left -= segment.length
            if segment.length:
                kept.append(segment)
                self.packed_length += segment.length
        cut = bool(kept) and (kept[-1].start + kept[-1].length) % self.group != 0
        if len(kept) < len(self.packed):
            if self._key_head is not None:
                self._key_head.rewind([segment.key for segment in kept])
            if self._value_head is not None:
                self._value_head.rewind([segment.value for segment in kept])
            self._open = bool(kept)
        self.packed = kept
        self._encoded = self._encoded and (bool(kept) or self.first > 0)
        if not self._encoded and self._equalizes and self._vectors == (None, None):
            self._transforms = (None, None)
        if self._open and self.elsewhere is not None:
            self.elsewhere.take_back(self, kept[-1])  # it may be written to from now on
        spare = kept[-1].capacity - kept[-1].length if self._open else 0
        if (self._open and cut) or (self.capacity is None and self._has_window and spare > SMALL_SEGMENT_TOKENS):
            self._close()
        if self._open and self.packed[-1].shared:
            self.packed[-1] = self.packed[-1].owned()  # it was full, and is going to be written to
        if self.residual is not None:
            self.residual = self._cut(self.residual, left)
        self.length = length
        self.version += 1
        self.changes += 1
        self.kernel_regions = None

    def _cut(self, segment: Segment, length: int) -> Segment:
        """An unquantized segment of which ``length`` tokens are kept, without much spare room."""
        segment.length = length
        if self.capacity is not None or segment.capacity - length <= 2 * RESIDUAL_SLACK:
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
            for segment in (*self.segments(), *self._empty)
            for tensor in segment.tensors()
        )
        for held in (self._key_head, self._value_head, *self._transforms):
            if held is not None:
                total += held.nbytes()
        return total

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that :meth:`nbytes` counts; forks hold some of them together."""
        for segment in (*self.segments(), *self._empty):
            yield from segment.tensors()
        for scale in (self._key_head, self._value_head):
            yield from () if scale is None else (x for x in (scale.current, scale._first) if x is not None)
        for transform in self._transforms:
            if transform is not None:
                parts = (transform.signs, transform.centre, transform.multiplier)
                yield from (x for x in parts if x is not None)

    def stored_bits(self) -> int:
        """Bits of the codes, scales and offsets of the tokens stored, without spare room."""
        return sum(plane.bits(s.start, s.length) for s in self.segments() for plane in s.planes())

    def stored_values(self) -> int:
        """Numbers stored: tokens x heads x (key_dim + value_dim)."""
        if self.shape is None:
            return 0
        batch, heads, key_dim, value_dim = self.shape
        return (self.length - self.first) * batch * heads * (key_dim + value_dim)
