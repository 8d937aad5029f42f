"""What a number format is: how a scale is chosen, how numbers become codes, and how codes become numbers.

Scales per token are bfloat16, rounded up. Why this type and not float16, for a scale ``s = amax / largest_code``:

* Codes are computed with the rounded scale, so rounding it adds no error of its own; it only makes the step between two
  codes larger, by at most 2**-7 for bfloat16 (0.4% on average, 0.03 dB of noise) and 2**-10 for float16. Rounding up
  keeps every code within range.
* float16 has no such bound for small numbers. Its normal numbers end at 6e-5: an int8 vector whose largest entry is
  below 0.008 gets a scale with fewer bits, one below 4e-6 gets a scale of 0 and divides by it. bfloat16 has the
  range of float32: the bound on the relative error holds for every vector down to the smallest normal number.
* Close to the end of the range the scale is held down so that the largest code still decodes to a finite bfloat16:
  numbers above 99% of the largest one saturate instead of becoming infinite, an error of at most 2**-7.
* float32 would be exact, and cost 2 bytes more per token and head: 0.5 instead of 0.25 bits per value at head_dim 64,
  which is 6% of the memory of an 8-bit cache for 0.03 dB.

A scale per head costs nothing per token and is float32.

A vector that holds a NaN or an infinity gets the scale NaN: attention then shows NaN wherever that token is attended
to, and no other token is touched.
"""

from __future__ import annotations

import math
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


def saturating(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as ``dtype``; in float16, numbers beyond its range become its largest. NaN stays NaN."""
    if dtype == torch.float16:
        x = x.clamp(-65504.0, 65504.0)
    return x.to(dtype)


def _round_down_to_bfloat16(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.floor(mantissa * 2**8), exponent - 8)


class Format(ABC):
    """A number format of one-byte codes, symmetric around zero: ``x ~ code * scale``.

    A new format is a subclass in a file of its own and a row in the table of ``formats/__init__.py``.

    Attributes:
        name: the name that users give.
        bits: bits of one code.
        code_dtype: torch type of the codes.
        largest: the largest magnitude of a code.
        native_id: the format's number in ``csrc/abi.h``, or None when the compiled kernels do not know it.
        granularities: the granularities that it can be used with, the default first.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    code_dtype: ClassVar[torch.dtype]
    largest: ClassVar[float]
    native_id: ClassVar[int | None] = None
    granularities: ClassVar[tuple[str, ...]] = ("token", "head")

    @property
    def largest_scale(self) -> float:
        """The largest scale that is chosen: every code of it decodes to a finite bfloat16."""
        return _round_down_to_bfloat16(_LARGEST_BFLOAT16 / self.largest)

    def magnitude(self, x: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each vector: float32 ``[..., tokens]`` of ``x [..., tokens, head_dim]``.

        NaN where the vector holds a NaN or an infinity.
        """
        top = x.float().abs().amax(dim=-1)
        return torch.where(top.isfinite(), top, torch.nan)

    def choose_scale(self, x: torch.Tensor) -> torch.Tensor:
        """One scale per vector: bfloat16 ``[..., tokens]`` for ``x [..., tokens, head_dim]`` of any float type."""
        scale = torch.clamp(self.magnitude(x) / self.largest, SMALLEST_SCALE, self.largest_scale)  # clamp keeps NaN
        return round_up_to_bfloat16(scale)

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Codes of ``x [..., tokens, head_dim]`` under ``scale`` (broadcast against ``[..., tokens]``), saturating.

        Where the scale is NaN the codes are 0.
        """
        wide = scale.float().unsqueeze(-1)
        scaled = torch.clamp(x.float() / wide, -self.largest, self.largest)
        return self.round(torch.where(wide.isnan(), 0.0, scaled))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of type ``dtype`` for ``codes [..., tokens, head_dim]`` and ``scale [..., tokens]``."""
        return saturating(codes.float() * scale.float().unsqueeze(-1), dtype)

    @abstractmethod
    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """The nearest codes, ties to even, of float32 numbers that lie within ``-largest .. largest``."""
