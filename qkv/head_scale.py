"""Scales per head of a growing cache: when they are fixed, and when they grow.

Given scales are used as they are, and numbers beyond them saturate. Otherwise the first ``WARM_UP_TOKENS`` tokens after
the sinks stay exact; then the scale of a head becomes ``HEAD_ROOM`` times what their largest magnitude needs. When a
later token exceeds it, the scale grows to ``HEAD_ROOM`` times what that token needs, for the tokens from there on: a
new segment begins, since a segment has one scale per head, and the one before it gives its unused room back (up to 15
tokens of keys stay unused: their tiles are of 16). Scales therefore depend on the tokens alone and not on how they were
cut into updates. A token with a NaN or an infinity gets a segment whose scale is NaN for its head. Where the other side
has a scale per channel, and tokens are encoded a group at a time, all of that is said of groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qkv.formats.base import SMALLEST_SCALE, Format
from qkv.planes import Plane

WARM_UP_TOKENS = 64
HEAD_ROOM = 1.25


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
        self._first: torch.Tensor | None = None  # as they were before the first packed segment that is held

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
            scale = plane.scale.to(self._first.device)  # a full segment may lie elsewhere
            self.current = torch.where(scale.isnan(), self.current, scale)

    def forget(self, plane: Plane) -> None:
        """A plane goes from the front: what its scales had become is where :meth:`rewind` starts from now on."""
        if self.given or self._first is None:
            return
        assert plane.scale is not None
        scale = plane.scale.to(self._first.device)  # a full segment may lie elsewhere
        self._first = torch.where(scale.isnan(), self._first, scale)

    def clear(self) -> None:
        self.current = self._first = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the scales by ``function`` of them; dimension 0 is the batch."""
        current, first = self.current, self._first
        if current is not None:
            self.current = function(current).contiguous()
        if first is not None:
            self._first = self.current if first is current else function(first).contiguous()

    def nbytes(self) -> int:
        held = [self.current] if self._first is self.current else [self.current, self._first]
        return sum(x.nbytes for x in held if x is not None)

    def effective(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The scales for one token of that ``magnitude [batch, heads]``; grows :attr:`current` where it must."""
        assert self.current is not None
        if not self.given and not magnitude.is_meta:  # a plan, which knows no numbers, takes it that scales suffice
            exceeds = magnitude > self.current * self.format.largest  # False for NaN
            if bool(exceeds.any()):
                self.current = torch.where(exceeds, self._needed(magnitude), self.current)
        return torch.where(magnitude.isnan(), torch.nan, self.current)

    def run_length(self, magnitude: torch.Tensor) -> int:
        """How many of the tokens of ``magnitude [batch, heads, tokens]`` share the scales of the first."""
        assert self.current is not None
        if magnitude.is_meta:
            return magnitude.shape[-1]
        changes = magnitude.isnan() != magnitude[:, :, :1].isnan()
        if not self.given:
            changes = changes | (magnitude > (self.current * self.format.largest).unsqueeze(-1))
        at = changes.any(dim=0).any(dim=0).nonzero()
        later = at[at > 0]
        return int(later[0]) if later.numel() else magnitude.shape[-1]
