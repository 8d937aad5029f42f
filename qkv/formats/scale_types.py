"""How quantization scales are stored: 16 bits, or 8 where a format's groups are small.

A stored scale is turned into a float32 before anything is computed with it, and codes are computed with that number:
storing it in few bits adds no error of its own, it only makes the step between two codes larger.

========  ====  ====================================  ==========================================
name      bits  numbers                               step becomes larger by
========  ====  ====================================  ==========================================
bfloat16  16    as float32                            at most 2**-7
ue5m3     8     2**-20 .. 3,584, 3 bits of mantissa   at most 2**-3 (6% on average)
e8m0      8     powers of two, 2**-127 .. 2**127      as OCP's MX formats say: rounded down
e4m3      8     2**-9 .. 448, as float8_e4m3fn        as NVIDIA's NVFP4 says: to the nearest
========  ====  ====================================  ==========================================

ue5m3 is half of bfloat16: no sign, 5 bits of exponent and 3 of mantissa. One of its codes stands for "not a number":
a group that is not finite is stored as such. So it is with the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

# The smallest normal number of bfloat16 and float32. A vector of zeros or subnormal numbers gets this scale.
SMALLEST_SCALE = 2.0**-126
_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below ``x`` (float32, finite, not negative); NaN stays NaN."""
    bits = x.contiguous().view(torch.int32)
    up = (((bits + 0xFFFF) >> 16) << 16).view(torch.float32)
    # A NaN of one pattern, whichever way torch converts.
    return torch.where(x.isnan(), torch.nan, up.to(torch.bfloat16))


class ScaleType(ABC):
    """A way to store scales.

    Attributes:
        name: as in the table above.
        dtype: torch type of what is stored.
        native_id: its number in ``csrc/abi.h``.
        smallest, largest: the scales that are chosen lie between these.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    native_id: ClassVar[int]
    smallest: ClassVar[float]
    largest: ClassVar[float]

    @property
    def bits(self) -> int:
        """Bits of one stored scale."""
        return self.dtype.itemsize * 8

    @abstractmethod
    def store(self, scale: torch.Tensor) -> torch.Tensor:
        """``scale`` (float32, within ``smallest .. largest``, or NaN) as it is stored, of type :attr:`dtype`."""

    @abstractmethod
    def load(self, stored: torch.Tensor) -> torch.Tensor:
        """The float32 numbers that stored scales stand for."""


class BFloat16(ScaleType):
    """Rounded up, so that no code saturates."""

    name = "bfloat16"
    dtype = torch.bfloat16
    native_id = 0
    smallest = SMALLEST_SCALE
    largest = _LARGEST_BFLOAT16

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        return round_up_to_bfloat16(scale)

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.float()


class UE5M3(ScaleType):
    """Rounded up, so that no code saturates. Byte ``u`` stands for ``2**(u // 8 - 20) * (1 + u % 8 / 8)``; 255: NaN."""

    name = "ue5m3"
    dtype = torch.uint8
    native_id = 1
    smallest = 2.0**-20
    largest = 2.0**11 * 1.75

    _SHIFT = (127 - 20) << 3  # the exponents of float32 begin lower

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        bits = scale.contiguous().view(torch.int32)
        byte = ((bits + 0xFFFFF) >> 20) - self._SHIFT
        return torch.where(scale.isnan(), 255, byte).to(torch.uint8)

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        value = ((stored.to(torch.int32) + self._SHIFT) << 20).view(torch.float32)
        return torch.where(stored == 255, torch.nan, value)


class E8M0(ScaleType):
    """Powers of two, the next one below. Byte ``u`` stands for ``2**(u - 127)``; 255: NaN.

    The byte is the exponent of a float32 as it lies in memory; below the smallest normal number it is 0.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1.
    """

    name = "e8m0"
    dtype = torch.uint8
    native_id = 2
    smallest = 2.0**-127
    largest = 2.0**127

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        exponent = scale.contiguous().view(torch.int32) >> 23
        return torch.where(scale.isnan(), 255, exponent).to(torch.uint8)

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        exponent = stored.to(torch.int32)
        value = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)  # 2**-127 is subnormal
        return torch.where(stored == 255, torch.nan, value)


class E4M3(ScaleType):
    """To the nearest float8_e4m3fn; a group smaller than half of the smallest one, 2**-9, becomes zeros.

    Source: NVIDIA's description of NVFP4 (blocks of 16, a float8_e4m3fn scale each, a float32 for the whole tensor).
    """

    name = "e4m3"
    dtype = torch.uint8
    native_id = 3
    smallest = 0.0
    largest = 448.0

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.to(torch.float8_e4m3fn).view(torch.uint8)

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(torch.float8_e4m3fn).float()


BFLOAT16, UE5M3_SCALE, E8M0_SCALE, E4M3_SCALE = BFloat16(), UE5M3(), E8M0(), E4M3()
