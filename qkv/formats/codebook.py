"""Code books: a code is the place of a number in a table, ``x ~ table[code] * scale``, with ``scale = max |x|``.

They are those of bitsandbytes, written down anew: nothing of it is needed here. Whoever stores weights in them can
store keys and values in the same. Sources: Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314, appendix E
(``nf4``); Dettmers 2015, https://arxiv.org/abs/1511.04561 (the dynamic map, ``bnb8``); ``get_4bit_type`` (``fp4``) and
``create_dynamic_map`` in bitsandbytes/functional.py.

What differs: scales are bfloat16, rounded up, where bitsandbytes keeps float32; with a scale that both can store, codes
are the same, bit for bit, as those of ``quantize_4bit`` of bitsandbytes 0.50 on CPUs. Its CUDA kernels differ from that
in which of its two zeros ``fp4`` gets, and in where negative numbers go that lie halfway between two of ``fp4``. Of 8
bits its CPU kernel looks codes up on a grid of 65,536 places; here, as on CUDA, it is the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch

from qkv.formats.base import Format, saturating


class CodeBook(Format):
    """Codes are places in :attr:`table`; a number gets the nearest entry, halfway between two the lower one.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    code_dtype = torch.uint8
    largest = 1.0
    table: ClassVar[tuple[float, ...]]
    granularities: ClassVar[tuple[str, ...]] = ("group", "token", "channel")
    # The usual block of bitsandbytes.
    group_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({"group": 64, "channel": 64})

    def decode(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        values = _take(_table(type(self), codes.device), codes)
        return saturating(values * self.load_scale(scale).unsqueeze(-1), dtype)

    def nearest(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _nearest(type(self), device)

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        bound, below, above = self.nearest(scaled.device)
        start = (scaled.contiguous().view(torch.int32) >> 16) + _NEGATIVE
        return torch.where(scaled > _take(bound, start), _take(above, start), _take(below, start))


def _take(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``table[places]``, of the shape of ``places``; much faster than that."""
    return table.index_select(0, places.to(torch.int32).flatten()).view(places.shape)


@lru_cache
def _table(kind: type[CodeBook], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # what is made here is used outside of that mode too
        return torch.tensor(kind.table, dtype=torch.float32, device=device)


# Numbers are looked up by their first 16 bits, as a signed integer: negative numbers come first.
_NEGATIVE = 1 << 15


@lru_cache
def _nearest(kind: type[CodeBook], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The code nearest to a float32, by its first 16 bits: up to a bound one code, above it another.

    All that begin with the same 16 bits lie within 1/128 of each other: no table has two midpoints there. A search by
    bisection (torch.bucketize) takes ten times as long.

    Returns:
        Three tensors ``[2**16]``: the bound, float32, and the codes up to it and above it, uint8.

    Raises:
        ValueError: a table with two midpoints there.
    """
    with torch.inference_mode(False):
        values, codes = _table(kind, torch.device("cpu")).sort(stable=True)
        bounds = (values[:-1] + values[1:]) / 2
        first = torch.arange(-_NEGATIVE, _NEGATIVE, dtype=torch.int32, device="cpu") << 16
        # The lowest number with these bits: of negative ones that with the largest magnitude.
        lowest = torch.where(first < 0, first | 0xFFFF, first).view(torch.float32)
        highest = torch.where(first < 0, first, first | 0xFFFF).view(torch.float32)
        place = torch.bucketize(lowest, bounds)
        if bool((torch.bucketize(highest, bounds) > place + 1).any()):
            raise ValueError(f"format {kind.name!r}: numbers of its table lie closer together than 1/128 of their size")
        ends = torch.cat([bounds, bounds.new_tensor([torch.inf])])
        codes = codes.to(torch.uint8)
        found = ends[place], codes[place], codes[(place + 1).clamp(max=len(bounds))]
        return found[0].to(device), found[1].to(device), found[2].to(device)


class NF4(CodeBook):
    """4 bits, the quantiles of a normal distribution, and zero.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "nf4"
    bits = 4
    native_id = 11
    table = (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip


class NF4Rotated(NF4):
    """:class:`NF4` of rotated vectors, whose channels are more nearly normal.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "nf4_rot"
    rotated = True


class FP4(CodeBook):
    """4 bits, a floating point number of bitsandbytes' own: a sign, and 0, 1/16, 8, 12, 4, 6, 2, 3 twelfths.

    Codes 0 and 8 are both zero. It is not the e2m1 of the block formats, see :mod:`qkv.formats.mx`.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "fp4"
    bits = 4
    native_id = 11
    table = tuple(sign * twelfths / 12 for sign in (1, -1) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def _dynamic_map() -> tuple[float, ...]:
    """256 numbers from -0.993 to 1: decades down to 1e-7, each with half as many steps as the one above.

    The operations of bitsandbytes in float32, so that every number has the same bits.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        means = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += means.tolist() + (-means).tolist()
    return tuple(sorted(values))


class Bnb8(CodeBook):
    """8 bits, the dynamic map of bitsandbytes: an error relative to the number, over seven decades.

    It has a 1 and no -1: the most negative number of a vector comes back as 99.3% of itself.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "bnb8"
    bits = 8
    native_id = 12
    table = _dynamic_map()
    granularities = ("token", "group", "channel")


CODE_BOOKS: tuple[type[Format], ...] = (NF4, FP4, Bnb8, NF4Rotated)
