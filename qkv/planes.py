"""Where codes lie: planes (the keys, or the values, of a run of tokens) and segments (both)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch

from qkv import native
from qkv.formats.base import Format
from qkv.formats.layout import Layout, layout_for


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

    def shrink(self, tokens: int) -> None:
        """Gives the room behind the first ``tokens`` tokens back (keys keep whole tiles of 16)."""
        self._native = None
        if self.layout is None:
            self.codes = self.codes[:, :, :tokens].clone(memory_format=torch.contiguous_format)
        else:
            batch, heads = self.codes.shape[:2]
            fresh = self.layout.empty(batch, heads, tokens, self.dim, self.codes.device)
            self.codes = fresh.copy_(self.codes[:, :, : fresh.shape[2]])
        if self.per_token:
            assert self.scale is not None
            self.scale = self.scale[:, :, :tokens].clone(memory_format=torch.contiguous_format)


class Segment:
    """A run of consecutive tokens that does not move while it takes tokens.

    Attributes:
        key, value: the planes.
        capacity: tokens that fit.
        length: tokens stored.
        start: index of the first stored token; those before it have left (a residual or a sliding window).
    """

    __slots__ = ("_step", "capacity", "key", "length", "start", "value")

    def __init__(self, key: Plane, value: Plane, capacity: int, length: int = 0):
        self._step: _Step | None = None
        self.key, self.value, self.capacity, self.length, self.start = key, value, capacity, length, 0

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
        return None, {name: getattr(self, name) for name in self.__slots__ if name != "_step"}

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
        fresh.key, fresh.value = copy(self.key), copy(self.value)
        for plane in fresh.planes():
            plane.map(function)
        return fresh

    def shrink(self) -> None:
        """Gives the room behind the last token back."""
        self.capacity = self.start + self.length
        for plane in self.planes():
            plane.shrink(self.capacity)

    def planes(self) -> tuple[Plane, Plane]:
        return self.key, self.value


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
        if lib is None or keys.dtype not in native.FLOAT_IDS or any(plane._native_id() is None for plane in planes):
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
