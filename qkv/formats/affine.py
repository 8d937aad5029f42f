"""Whole numbers of few bits with a scale and an offset: ``x ~ code * scale + offset``, codes ``0 .. 2**bits - 1``.

The offset of a group is a whole number of steps, its zero point, in one byte: ``offset = zero_point * scale``. With a
scale of one byte a group costs 16 bits: 0.5 per value in groups of 32. A group that lies far from zero, more than 127
steps, gets a larger step; that is 8 times the width of a 4-bit group, beyond what channels of keys show.

The rotated ones are for values: a rotation makes the channels of a token alike, so that a group's largest number is no
outlier. Keys have outliers in few channels, and a rotation spreads them over all; keys want a scale per channel.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from qkv.formats.base import Format, saturating
from qkv.formats.scale_types import UE5M3_SCALE

# Numbers beyond this saturate, so that the width of a range is a finite float32.
_LIMIT = 2.0**126


class Affine(Format):
    """Unsigned codes with a scale and a zero point.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    code_dtype = torch.uint8
    granularities = ("group", "channel", "token")
    key_granularity = "channel"
    scale_type = UE5M3_SCALE
    offset = "zero_point"

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = x.float()
        low, high = wide.amin(dim=-1), wide.amax(dim=-1)
        finite = low.isfinite() & high.isfinite()
        low, high = low.clamp(-_LIMIT, _LIMIT), high.clamp(-_LIMIT, _LIMIT)
        if self.clip != 1.0:
            cut = (high - low) * ((1.0 - self.clip) / 2.0)
            low, high = low + cut, high - cut
        # A range too wide for the largest scale saturates at both ends.
        excess = ((high - low) - float(self.levels) * self.scale_type.largest).clamp(min=0.0) * 0.5
        low, high = low + excess, high - excess
        # Wide enough for the range, and for its low end to lie within 127 steps of zero.
        needed = torch.maximum((high - low) / float(self.levels), low.abs() / 127.0)
        needed = needed.clamp(self.scale_type.smallest, self.scale_type.largest)
        scale = self.scale_type.store(torch.where(finite, needed, torch.nan))
        zero = torch.round(low / self.scale_type.load(scale)).clamp(-127.0, 127.0)
        return scale, torch.where(finite, zero, 0.0).to(torch.int8)

    def encode(self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        assert offset is not None
        wide = self.load_scale(scale).unsqueeze(-1)
        scaled = torch.round(x.float() / wide) - offset.float().unsqueeze(-1)
        return self.round(torch.where(wide.isnan(), 0.0, torch.clamp(scaled, 0.0, float(self.levels))))

    def decode(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert offset is not None
        steps = codes.float() + offset.float().unsqueeze(-1)
        return saturating(steps * self.load_scale(scale).unsqueeze(-1), dtype)

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        return torch.round(scaled).to(torch.uint8)


def _affine(bits: int, rotated: bool = False, clip: float = 1.0) -> type[Affine]:
    members: dict[str, object] = {
        "__doc__": f"{bits} bits{', rotated' if rotated else ''}.",
        "__module__": __name__,
        "name": f"int{bits}{'_rot' if rotated else ''}",
        "bits": bits,
        "largest": float((1 << bits) - 1),
        "native_id": _NATIVE_IDS[bits],
        "rotated": rotated,
        "clip": clip,
        "equalized": rotated,
        "equalizing_power": 0.0 if rotated else Affine.equalizing_power,
        "group_sizes": MappingProxyType({"group": 64, "channel": 64} if rotated else {"group": 32, "channel": 32}),
    }
    return type(f"Int{bits}{'Rotated' if rotated else ''}", (Affine,), members)


_NATIVE_IDS = {2: 6, 3: 7, 4: 8, 5: 9, 6: 10}

AFFINE = tuple(_affine(bits) for bits in _NATIVE_IDS)
AFFINE_ROTATED = tuple(_affine(bits, rotated=True) for bits in _NATIVE_IDS)
