"""Where codes lie: planes (the keys, or the values, of a run of tokens) and segments (both)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from qkv import large_pages, native
from qkv.formats.base import Format, saturating
from qkv.formats.layout import Layout, layout_for
from qkv.native import Plane as NativePlane
from qkv.transform import Transform, rotation_block

# Channels that the kernels can tell apart: a unit of packed values.
CHANNELS = 16


@dataclass(frozen=True)
class Scaling:
    """What shares a scale.

    Attributes:
        granularity: ``token``, ``head``, ``group`` or ``channel``.
        group: channels (``group``) or tokens (``channel``) that share one; elsewhere 0.
    """

    granularity: str
    group: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are encoded together."""
        return self.group if self.granularity == "channel" else 1

    @classmethod
    def of(cls, format: Format, granularity: str, group_size: int | None, dim: int, what: str) -> Scaling:
        """What ``granularity`` and ``group_size`` (None: the format's default) mean for ``dim`` channels.

        Args:
            what: ``key`` or ``value``, for the message.

        Raises:
            ValueError: a group size that does not go with the head size.
        """
        if granularity not in ("group", "channel"):
            return cls(granularity)
        if granularity == "group" and format.block is not None:
            return cls(granularity, _checked_block(format, format.block, group_size, dim, what))
        if granularity == "channel":
            return cls(granularity, group_size or format.group_sizes["channel"])
        if group_size is None:
            size = format.group_sizes["group"]
            while size > CHANNELS and dim % size:
                size //= 2
            return cls(granularity, size if dim % size == 0 else dim)
        if dim % group_size or (group_size % CHANNELS and group_size != dim):
            fit = [str(n) for n in range(CHANNELS, dim, CHANNELS) if dim % n == 0]
            raise ValueError(
                f"{what}s have head_dim={dim}, which does not go with group_size={group_size}; "
                f"use {', '.join([*fit, str(dim)])}"
            )
        return cls(granularity, group_size)


def _checked_block(format: Format, block: int, group_size: int | None, dim: int, what: str) -> int:
    """The block of a format that fixes it; raises ValueError where that is not what is asked for, or does not fit."""
    if group_size not in (None, block):
        raise ValueError(
            f"{format.name} has blocks of {block} channels; group_size={group_size} for {what}s does not go with it: "
            f"leave group_size out, or use {block}"
        )
    if dim % block:
        raise ValueError(
            f"{format.name} has blocks of {block} channels, and {what}s have head_dim={dim}, which is no multiple of "
            f"{block}; use another format for {what}s, with {what}_format"
        )
    return block


@lru_cache
def _gpu_encoder() -> Callable[[Plane, int, torch.Tensor], bool] | None:
    """Triton's encoder; None where Triton is missing or does not know this GPU: the formats do it in steps then."""
    if torch.version.hip is not None:
        return None
    try:
        from qkv.formats import triton_encode
    except (ImportError, AttributeError):
        return None
    write: Callable[[Plane, int, torch.Tensor], bool] = triton_encode.write
    return write


class Plane:
    """The keys, or the values, of one segment: codes, scales and offsets, or rows of the model's own type.

    Attributes:
        format: the number format; None: unquantized rows.
        codes: uint8 in the order of ``layout``, or rows ``[batch, heads, capacity, dim]``.
        scale: as the format stores it, ``[batch, heads, capacity]`` (per token), ``[batch, heads, dim / group,
            capacity]`` (per group), ``[batch, heads, capacity / group, dim]`` (per channel); float32 ``[batch, heads]``
            (per head); or None.
        offset: of the shape of the scale, or None.
        scaling: what shares a scale; None: unquantized.
        transform: what rows go through before they are encoded, or None.
        dim: channels.
    """

    __slots__ = (
        "_native", "codes", "dim", "dtype", "format", "is_key", "layout", "offset", "scale", "scaling", "transform",
    )  # fmt: skip

    def __init__(
        self,
        like: torch.Tensor,
        capacity: int,
        format: Format | None,
        is_key: bool,
        scaling: Scaling | None = None,
        scale: torch.Tensor | None = None,
        transform: Transform | None = None,
    ):
        self._native: native.Plane | None = None  # addresses of the tensors, made once
        batch, heads, _, self.dim = like.shape
        self.format, self.is_key, self.dtype = format, is_key, like.dtype
        self.scale: torch.Tensor | None = scale
        self.offset: torch.Tensor | None = None
        self.layout: Layout | None = None
        self.scaling, self.transform = scaling, transform
        if format is None:
            flat = large_pages.empty(batch * heads * capacity * self.dim * like.element_size(), like.device)
            self.codes = flat.view(like.dtype).view(batch, heads, capacity, self.dim)
            return
        self.scaling = scaling = scaling or Scaling("token")
        # On torch's meta device sizes are planned: those that the CPU is going to need.
        self.layout = layout_for(torch.device("cpu") if like.is_meta else like.device, is_key, format.bits)
        self.codes = self.layout.empty(batch, heads, capacity, self.dim, like.device)
        if scaling.granularity == "head":
            return
        shape = {
            "token": (batch, heads, capacity),
            "group": (batch, heads, self.dim // max(1, scaling.group), capacity),
            "channel": (batch, heads, -(-capacity // max(1, scaling.group)), self.dim),
        }[scaling.granularity]
        self.scale = torch.zeros(shape, dtype=format.scale_type.dtype, device=like.device)
        if format.offset_dtype is not None:
            self.offset = torch.zeros(shape, dtype=format.offset_dtype, device=like.device)

    @classmethod
    def of_rows(cls, rows: torch.Tensor, is_key: bool) -> Plane:
        """An unquantized plane that holds ``rows [batch, heads, tokens, dim]`` itself, not a copy."""
        plane = cls(rows[:, :, :0], 0, None, is_key)
        plane.codes = rows.contiguous()
        return plane

    @classmethod
    def of_tensors(
        cls, like: Plane, codes: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None
    ) -> Plane:
        """A plane of the kind of ``like`` that holds these tensors themselves: codes, scales and offsets."""
        plane = cls.__new__(cls)
        plane._native = None
        plane.format, plane.is_key, plane.dtype, plane.dim = like.format, like.is_key, like.dtype, like.dim
        plane.layout, plane.scaling, plane.transform = like.layout, like.scaling, like.transform
        plane.codes, plane.scale, plane.offset = codes, scale, offset
        return plane

    def write(self, offset: int, rows: torch.Tensor) -> None:
        """Encodes ``rows [batch, heads, n, dim]`` into the tokens from ``offset`` on.

        With a scale per channel they end where a group does; the first group may have begun before them, with places
        that hold nothing.
        """
        if rows.shape[2] == 0 or rows.is_meta:  # a plan: there is room and no number
            return
        lib = native.library() if rows.device.type == "cpu" else None
        if lib is not None and rows.dtype in native.FLOAT_IDS and self._native_encodes():
            self._run(lib.qkv_encode, rows if rows.stride(3) == 1 else rows.contiguous(), offset)
            return
        end = offset + rows.shape[2]
        if self.format is None:
            self.codes[:, :, offset:end] = rows
            return
        write = _gpu_encoder() if rows.device.type == "cuda" else None
        if write is not None and write(self, offset, rows):
            return
        if self.transform is not None:
            rows = self.transform.forward(rows)
        assert self.scaling is not None
        short = min(-offset % self.scaling.tokens, rows.shape[2])
        if short:
            self._encode(offset, rows[:, :, :short], short)
        if short < rows.shape[2]:
            self._encode(offset + short, rows[:, :, short:], self.scaling.tokens)

    def _encode(self, offset: int, rows: torch.Tensor, together: int) -> None:
        """Encodes transformed rows, with a scale per channel in groups of ``together`` tokens."""
        assert self.format is not None
        assert self.layout is not None
        vectors = self._vectors(rows, together)
        if self.scaling == Scaling("head"):
            assert self.scale is not None
            scale, zero = self.scale.unsqueeze(-1), None
        else:
            scale, zero = self.format.choose(vectors)
            self._put(self.scale, scale, offset)
            self._put(self.offset, zero, offset)
        codes = self._rows(self.format.encode(vectors, scale, zero))
        self.layout.write(self.codes, offset, codes.view(torch.uint8))

    # The format sees vectors, whatever shares a scale: [batch, heads, tokens, dim] (token, head), [batch, heads,
    # tokens, dim / group, group] (group) or [batch, heads, tokens / group, dim, group] (channel).

    def _vectors(self, rows: torch.Tensor, together: int) -> torch.Tensor:
        assert self.scaling is not None
        if self.scaling.granularity == "group":
            return rows.unflatten(3, (-1, self.scaling.group))
        if self.scaling.granularity == "channel":
            return rows.unflatten(2, (-1, together)).transpose(3, 4)
        return rows

    def _rows(self, vectors: torch.Tensor) -> torch.Tensor:
        assert self.scaling is not None
        if self.scaling.granularity == "group":
            return vectors.flatten(3)
        if self.scaling.granularity == "channel":
            return vectors.transpose(3, 4).flatten(2, 3)
        return vectors

    def _put(self, store: torch.Tensor | None, x: torch.Tensor | None, offset: int) -> None:
        """Stores scales, or offsets, of vectors that begin at the token ``offset``."""
        if store is None or x is None:
            return
        assert self.scaling is not None
        if self.scaling.granularity == "group":
            store[:, :, :, offset : offset + x.shape[2]] = x.transpose(2, 3)
            return
        at = offset // self.scaling.tokens
        store[:, :, at : at + x.shape[2]] = x

    def _get(self, store: torch.Tensor | None, offset: int, n: int) -> torch.Tensor | None:
        """What :meth:`_put` stored for the vectors that hold the tokens ``offset .. offset + n``."""
        if store is None:
            return None
        assert self.scaling is not None
        if self.scaling.granularity == "head":
            return store.unsqueeze(-1)
        if self.scaling.granularity == "group":
            return store[:, :, :, offset : offset + n].transpose(2, 3)
        size = self.scaling.tokens
        return store[:, :, offset // size : -(-(offset + n) // size)]

    def read_codes(self, offset: int, n: int) -> torch.Tensor:
        """The codes of ``n`` tokens in the format's own type, ``[batch, heads, n, dim]``."""
        assert self.format is not None
        assert self.layout is not None
        return self.layout.read(self.codes, offset, n, self.dim).contiguous().view(self.format.code_dtype)

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
        assert self.scaling is not None
        scale = self._get(self.scale, offset, n)
        assert scale is not None
        # Whole groups of tokens, of which the first and the last may stick out.
        size = self.scaling.tokens
        begin, end = offset // size * size, -(-(offset + n) // size) * size
        vectors = self._vectors(self.read_codes(begin, end - begin), size)
        plain = self.transform is None
        decoded = self.format.decode(
            vectors, scale, out.dtype if plain else torch.float32, self._get(self.offset, offset, n)
        )
        rows = self._rows(decoded)[:, :, offset - begin : offset - begin + n]
        out.copy_(rows if self.transform is None else saturating(self.transform.inverse(rows), out.dtype))

    def _native_id(self) -> int | None:
        return native.FLOAT_IDS.get(self.dtype) if self.format is None else self.format.native_id

    def _native_encodes(self) -> bool:
        return self._native_id() is not None and (self.format is None or self.format.native_encode)

    def native(self) -> native.Plane:
        """The structure that the kernels take; made once, until the tensors change."""
        if self._native is None:
            self._native = self._native_plane()
        return self._native

    def _native_plane(self) -> NativePlane:
        result = native.Plane()
        codes = self.codes
        size = codes.element_size()
        result.codes = codes.data_ptr()
        result.codes_stride[:] = [codes.stride(0) * size, codes.stride(1) * size]
        number = self._native_id()
        result.format = -1 if number is None else number
        if self.format is None or self.scale is None:
            return result
        assert self.scaling is not None
        result.scale = self.scale.data_ptr()
        result.scale_stride[:] = [self.scale.stride(0), self.scale.stride(1)]
        result.scale_kind = native.SCALE_KINDS[self.scaling.granularity]
        result.scale_type = (
            native.SCALE_F32 if result.scale_kind == native.SCALE_HEAD else self.format.scale_type.native_id
        )
        result.group = self.scaling.group
        if result.scale_kind in (native.SCALE_GROUP, native.SCALE_CHANNEL):
            result.group_stride = self.scale.stride(2)
        elif result.scale_kind == native.SCALE_TOKEN and (
            self.format.offset or self.format.scale_type.name != "bfloat16"
        ):
            result.scale_kind, result.group = native.SCALE_GROUP, self.dim  # one group: all channels
        result.offset_type = native.OFFSETS[self.format.offset]
        result.cut = (1.0 - self.format.clip) / 2.0
        if self.offset is not None:
            result.offset = self.offset.data_ptr()
        if self.format.table is not None:
            result.table = native.table(self.format.table)
            nearest = self.format.nearest(self.codes.device) if self.format.native_encode else None
            if nearest is not None:
                result.bound, result.below, result.above = (x.data_ptr() for x in nearest)
        if self.transform is not None:
            for name in ("signs", "centre", "multiplier"):
                tensor = getattr(self.transform, name)
                if tensor is not None:
                    setattr(result, name, tensor.data_ptr())
            result.rotation = rotation_block(self.dim) if self.transform.signs is not None else 0
        return result

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
        if self.offset is not None:
            yield self.offset

    def put(self, tensors: Iterator[torch.Tensor]) -> None:
        """Takes other tensors for its own, which come as :meth:`tensors` gives them."""
        self._native = None
        self.codes = next(tensors)
        if self.scale is not None:
            self.scale = next(tensors)
        if self.offset is not None:
            self.offset = next(tensors)

    def bits(self, start: int, tokens: int) -> int:
        """Bits that the tokens from ``start`` on take, of the whole batch: codes, scales and offsets, no spare room."""
        batch, heads = self.codes.shape[:2]
        if self.format is None:
            return batch * heads * tokens * self.dim * self.codes.element_size() * 8
        assert self.layout is not None
        assert self.scaling is not None
        bits = tokens * self.layout.bits_per_token(self.dim)
        scale = self.format.scale_type.bits
        offset = self.format.offset_dtype.itemsize * 8 if self.format.offset_dtype is not None else 0
        size = self.scaling.tokens
        vectors = {
            "token": tokens,
            "head": 1,
            "group": tokens * self.dim // max(1, self.scaling.group),
            "channel": (-(-(start + tokens) // size) - start // size) * self.dim if tokens else 0,
        }[self.scaling.granularity]
        return batch * heads * (bits + vectors * (32 if self.scaling.granularity == "head" else scale + offset))

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
            fresh = self.layout.empty(batch, heads, moved.shape[2] * self.layout.tile, self.dim, moved.device)
            self.codes = fresh.copy_(moved)
        if self.scale is not None:
            self.scale = function(self.scale).contiguous()
        if self.offset is not None:
            self.offset = function(self.offset).contiguous()

    def shrink(self, tokens: int) -> None:
        """Gives the room behind the first ``tokens`` tokens back (keys keep tiles of 16, channels their groups)."""
        self._native = None
        if self.scaling is not None:
            tokens = -(-tokens // self.scaling.tokens) * self.scaling.tokens
        if self.layout is None:
            self.codes = self.codes[:, :, :tokens].clone(memory_format=torch.contiguous_format)
        else:
            batch, heads = self.codes.shape[:2]
            fresh = self.layout.empty(batch, heads, tokens, self.dim, self.codes.device)
            self.codes = fresh.copy_(self.codes[:, :, : fresh.shape[2]])
        if self.scaling is not None and self.scaling.granularity != "head":
            self.scale, self.offset = self._first(self.scale, tokens), self._first(self.offset, tokens)

    def _first(self, store: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """Scales, or offsets, of the first ``tokens`` tokens, copied."""
        if store is None:
            return None
        assert self.scaling is not None
        if self.scaling.granularity == "group":
            return store[:, :, :, :tokens].clone(memory_format=torch.contiguous_format)
        return store[:, :, : -(-tokens // self.scaling.tokens)].clone(memory_format=torch.contiguous_format)


class Segment:
    """A run of consecutive tokens that does not move while it takes tokens.

    Attributes:
        key, value: the planes.
        capacity: tokens that fit.
        length: tokens stored.
        start: index of the first stored token; those before it have left (a residual or a sliding window), or their
            places were never used.
        shared: whether others may hold the same tensors (forks, or a mapped file): then nothing may be written to them.
        home: the tensors, as :meth:`tensors` gives them, of a full segment that lies on another device than the cache,
            see host_spill.py. Its planes hold these, or while it is read, copies on the cache's device. None: it lies
            where its planes are.
    """

    __slots__ = ("_step", "capacity", "home", "key", "length", "shared", "start", "value")

    def __init__(self, key: Plane, value: Plane, capacity: int, length: int = 0, start: int = 0):
        self._step: _Step | None = None
        self.key, self.value, self.capacity, self.length, self.start = key, value, capacity, length, start
        self.shared = False
        self.home: tuple[torch.Tensor, ...] | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.key.write(self.start + self.length, keys)
        self.value.write(self.start + self.length, values)
        self.length += keys.shape[2]

    def append_one(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As :meth:`append`, for one token of the dtype and device of the planes; there must be room."""
        step = self._step
        if step is None or not step.fits(self, keys, values):
            step = self._step = _Step.of(self, keys, values)
        if step is None:
            self.append(keys, values)
            return
        args = step.args
        args.keys, args.values, args.offset = keys.data_ptr(), values.data_ptr(), self.start + self.length
        if step.function(args) != 0:
            raise RuntimeError("the compiled codec refused its arguments")
        self.length += 1

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        state = {name: getattr(self, name) for name in self.__slots__ if name != "_step"}
        if self.home is not None and not self.at_home:  # a copy is at home: who would send it there?
            made = iter(self.home)
            for side, plane in (("key", copy(self.key)), ("value", copy(self.value))):
                plane.put(made)
                state[side] = plane
        return None, state

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        self._step = None
        for name, value in state[1].items():
            setattr(self, name, value)

    def rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``n`` tokens of an unquantized segment, as views."""
        span = slice(self.start, self.start + n)
        return self.key.codes[:, :, span], self.value.codes[:, :, span]

    @property
    def room(self) -> int:
        """Tokens that can still be appended."""
        return self.capacity - self.start - self.length

    def drop_first(self, n: int) -> None:
        """Forgets the first ``n`` tokens; their memory stays until the segment goes."""
        self.start += n
        self.length -= n

    def to_front(self) -> None:
        """Moves the tokens of an unquantized segment to where the ones before them have left."""
        keys, values = self.rows(self.length)
        if self.start < self.length:
            keys, values = keys.clone(), values.clone()
        self.key.codes[:, :, : self.length] = keys
        self.value.codes[:, :, : self.length] = values
        self.start = 0

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Segment:
        """A segment with the same tokens, every tensor replaced by ``function`` of it."""
        fresh = copy(self)
        fresh.key, fresh.value, fresh.home = copy(fresh.key), copy(fresh.value), None
        for plane in fresh.planes():
            plane.map(function)
        return fresh

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by ``function`` of it, at home where that is elsewhere."""
        self.go_home()
        for plane in self.planes():
            plane.map(function)
        if self.home is not None:
            self.home = tuple(self._held())

    def twin(self) -> Segment:
        """A segment of the same tokens in the same tensors, to which neither of the two may write from now on."""
        self.shared = True
        fresh = copy(self)
        fresh.key, fresh.value = copy(fresh.key), copy(fresh.value)
        return fresh

    def owned(self) -> Segment:
        """A segment of the same tokens in tensors of its own, with the same room."""
        fresh = self.mapped(lambda x: x.clone(memory_format=torch.contiguous_format))
        fresh.shared = False
        return fresh

    def shrink(self) -> None:
        """Gives the room behind the last token back."""
        self.capacity = self.start + self.length
        for plane in self.planes():
            plane.shrink(self.capacity)

    def planes(self) -> tuple[Plane, Plane]:
        return self.key, self.value

    def _held(self) -> list[torch.Tensor]:
        return [tensor for plane in self.planes() for tensor in plane.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold memory: of the key, then of the value; those at home where that is elsewhere."""
        return self._held() if self.home is None else list(self.home)

    def put(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes other tensors for those of its planes; they hold the same and come as :meth:`tensors` gives them."""
        self._step = None
        made = iter(tensors)
        for plane in self.planes():
            plane.put(made)

    @property
    def at_home(self) -> bool:
        """Whether the planes hold what lies on another device than the cache."""
        return self.home is not None and self.key.codes is self.home[0]

    def go_home(self) -> None:
        """Drops copies on the cache's device of what lies on another."""
        if self.home is not None and not self.at_home:
            self.put(self.home)


class _Step:
    """What a step of decoding tells the codec, kept from step to step: only addresses and the place change."""

    __slots__ = ("args", "function", "planes", "strides")

    def __init__(self, function: Callable[..., int], args: native.Append, planes: tuple[Any, Any], strides: Any):
        self.function, self.args, self.planes, self.strides = function, args, planes, strides

    @classmethod
    def of(cls, segment: Segment, keys: torch.Tensor, values: torch.Tensor) -> _Step | None:
        """None where the compiled codec does not serve."""
        lib = native.library() if keys.device.type == "cpu" else None
        planes = segment.planes()
        if lib is None or keys.dtype not in native.FLOAT_IDS or not all(plane._native_encodes() for plane in planes):
            return None
        if keys.stride(3) != 1 or values.stride(3) != 1:
            return None
        made = tuple(plane.native() for plane in planes)
        number = native.FLOAT_IDS[keys.dtype]
        args = native.Append(
            batch=keys.shape[0],
            heads=keys.shape[1],
            key_rows=native.Rows(None, keys.stride()[:3], keys.shape[3], number),
            value_rows=native.Rows(None, values.stride()[:3], values.shape[3], number),
            key=made[0],
            value=made[1],
        )
        return cls(lib.qkv_append, args, (made[0], made[1]), (keys.stride(), values.stride()))

    def fits(self, segment: Segment, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the planes are where they were, and the rows lie as they did."""
        key, value = self.planes
        if key is not segment.key._native or value is not segment.value._native:
            return False
        return (keys.stride(), values.stride()) == self.strides
