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
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch

from qkv.formats.scale_types import BFLOAT16, SMALLEST_SCALE, ScaleType, round_up_to_bfloat16

__all__ = ["SMALLEST_SCALE", "Format", "round_up_to_bfloat16", "saturating"]

_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


def saturating(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as ``dtype``; in float16, numbers beyond its range become its largest. NaN stays NaN."""
    if dtype == torch.float16:
        x = x.clamp(-65504.0, 65504.0)
    return x.to(dtype)


def _round_down_to_bfloat16(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.floor(mantissa * 2**8), exponent - 8)


class Format(ABC):
    """A number format. As it stands here it has one-byte codes, symmetric around zero: ``x ~ code * scale``.

    A new format is a subclass in a file of its own and a row in the table of ``formats/__init__.py``. One that is like
    this one overrides :meth:`round`; one of another kind :meth:`choose`, :meth:`encode` and :meth:`decode`.

    A format knows nothing of granularities. It sees vectors, the last dimension of what it is given, and each of them
    has a scale: the channels of a token, a group of them, or one channel of several tokens.

    Attributes:
        name: the name that users give.
        bits: bits of one code.
        code_dtype: torch type of the codes; uint8 with numbers ``0 .. 2**bits - 1`` where there are less than 8 bits.
        largest: the largest magnitude of a code.
        native_id: the format's number in ``csrc/abi.h``, or None when the compiled kernels do not know it.
        native_encode: whether the compiled codec encodes as :meth:`encode` does; else that one is used.
        table: for a code book, the number that each code stands for; the compiled kernels read it.
        granularities: the granularities that it can be used with, the default first.
        key_granularity: the default for keys where it is another one, or None.
        group_sizes: the default group sizes by granularity.
        block: channels that share a scale where the format itself says so; None: any group size that fits.
        scale_type: how a scale is stored (per head: float32).
        offset: None, or how an offset is stored: ``zero_point`` (a whole number of steps, one byte), ``bfloat16``, or
            ``middle`` (the codes lie around zero; nothing is stored).
        clip: the part of a vector's range that codes cover; numbers outside of it saturate.
        rotated: whether vectors are rotated before they are encoded, see ``transform.py``.
        equalized: whether keys are equalized before they are encoded unless told otherwise, see ``equalizer.py``.
        equalizing_power: how much channels that are no outliers are made alike.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    code_dtype: ClassVar[torch.dtype]
    largest: ClassVar[float]
    native_id: ClassVar[int | None] = None
    native_encode: ClassVar[bool] = True
    table: ClassVar[tuple[float, ...] | None] = None
    granularities: ClassVar[tuple[str, ...]] = ("token", "head", "group", "channel")
    key_granularity: ClassVar[str | None] = None
    group_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({"group": 32, "channel": 32})
    block: ClassVar[int | None] = None
    scale_type: ClassVar[ScaleType] = BFLOAT16
    offset: ClassVar[str | None] = None
    clip: ClassVar[float] = 1.0
    rotated: ClassVar[bool] = False
    equalized: ClassVar[bool] = False
    equalizing_power: ClassVar[float] = 0.6

    def __reduce__(self) -> tuple[Callable[[str], Format | None], tuple[str]]:
        from qkv.formats import get_format  # the table, which imports this module

        return get_format, (self.name,)  # there is one of each, copies included

    @property
    def offset_dtype(self) -> torch.dtype | None:
        """Torch type of a stored offset, or None."""
        return {"zero_point": torch.int8, "bfloat16": torch.bfloat16}.get(self.offset or "")

    @property
    def largest_scale(self) -> float:
        """The largest scale that is chosen: every code of it decodes to a finite bfloat16."""
        return min(self.scale_type.largest, _round_down_to_bfloat16(_LARGEST_BFLOAT16 / self.largest))

    def magnitude(self, x: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each vector: float32 ``[...]`` of ``x [..., n]``.

        NaN where the vector holds a NaN or an infinity.
        """
        top = x.float().abs().amax(dim=-1)
        return torch.where(top.isfinite(), top, torch.nan)

    def choose_scale(self, x: torch.Tensor) -> torch.Tensor:
        """One scale per vector, as it is stored: ``[...]`` for ``x [..., n]`` of any float type."""
        smallest = max(SMALLEST_SCALE, self.scale_type.smallest)
        scale = torch.clamp(self.magnitude(x) / self.largest, smallest, self.largest_scale)  # clamp keeps NaN
        return self.scale_type.store(scale)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and offset of each vector, as they are stored: ``[...]`` each for ``x [..., n]``; no offset: None."""
        return self.choose_scale(x), None

    def load_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Stored scales as float32; float32 (a scale per head) is itself."""
        return scale if scale.dtype == torch.float32 else self.scale_type.load(scale)

    def encode(self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        """Codes of ``x [..., n]`` under a stored ``scale [...]`` (broadcast) and offset, saturating.

        Where the scale is NaN the codes are those of zeros.
        """
        wide = self.load_scale(scale).unsqueeze(-1)
        scaled = torch.clamp(x.float() / wide, -self.largest, self.largest)
        return self.round(torch.where(wide.isnan(), 0.0, scaled))

    def decode(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Numbers of type ``dtype`` for ``codes [..., n]``, stored ``scale [...]`` and offset."""
        return saturating(codes.float() * self.load_scale(scale).unsqueeze(-1), dtype)

    def nearest(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What the compiled codec needs to encode with a code book, see ``codebook.py``; None without one."""
        return None

    @abstractmethod
    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """The nearest codes, ties to even, of float32 numbers that lie within ``-largest .. largest``."""
