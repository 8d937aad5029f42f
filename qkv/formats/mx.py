"""Block formats of 4-bit floating point numbers: OCP's MXFP4 and NVIDIA's NVFP4, bit for bit.

An element is e2m1 in both: 1 bit of sign, 2 of exponent, 1 of mantissa, the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.

=========  ======  ==========================================================  ==============
name       blocks  scale                                                       bits per value
=========  ======  ==========================================================  ==============
``mxfp4``  32      e8m0: ``2**(floor(log2(amax)) - 2)``                        4.25
``nvfp4``  16      float8_e4m3fn nearest to ``amax / 6``                       4.5
=========  ======  ==========================================================  ==============

Elements are ``x / scale``, rounded to the nearest, ties to even, beyond 6 saturating.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (e2m1), 5.4.1 (e8m0) and 6.3 (conversion);
NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference", 2025. Where the MX specification leaves
the choice: a block of zeros gets the smallest scale, 2**-127; one with a NaN or an infinity gets the scale NaN.

NVFP4 has a float32 for a whole tensor besides, which brings its block scales into the range of float8_e4m3fn. A cache
does not know a tensor's largest number in advance: here it is 1. Another power of two would change nothing as long as
scales stay between 2**-6 and 448. Keys and values do: a block whose largest number is above 2,688 saturates, one below
0.09 loses bits of its scale, one up to 0.0058 becomes zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

import torch

from qkv.formats.codebook import CodeBook
from qkv.formats.scale_types import E4M3_SCALE, E8M0_SCALE

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = tuple((a + b) / 2 for a, b in pairwise(_MAGNITUDES))


class _E2M1(CodeBook):
    bits = 4
    largest = 6.0
    native_id = 11
    native_encode = False  # its scales are chosen otherwise
    table = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
    granularities = ("group",)

    def encode(self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        wide = self.load_scale(scale).unsqueeze(-1)
        # A scale of e4m3 may be zero: so are the codes, as they are where it is NaN.
        scaled = torch.where(wide > 0, x.float() / wide, 0.0)
        return self.round(scaled.clamp(-self.largest, self.largest))

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        size = scaled.abs()
        code = scaled.signbit().to(torch.uint8) << 3
        for below, halfway in enumerate(_HALFWAY):  # a tie goes to the even one of the codes `below` and `below + 1`
            code += size > halfway if below % 2 == 0 else size >= halfway
        return code


class MXFP4(_E2M1):
    """Blocks of 32 with a power of two as scale: the largest number is 4 to 8 of it, and beyond 6 numbers saturate.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "mxfp4"
    scale_type = E8M0_SCALE
    block = 32
    group_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({"group": 32})

    def choose_scale(self, x: torch.Tensor) -> torch.Tensor:
        # The largest element is 1.5 * 2**2. In exponents, since a quarter of a small float32 would be rounded.
        exponent = self.scale_type.store(self.magnitude(x))
        return torch.where(exponent == 255, exponent, exponent.clamp(min=2) - 2)


class NVFP4(_E2M1):
    """Blocks of 16 with a scale of 8 bits.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "nvfp4"
    scale_type = E4M3_SCALE
    block = 16
    group_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({"group": 16})


BLOCK_FORMATS: tuple[type[CodeBook], ...] = (MXFP4, NVFP4)
