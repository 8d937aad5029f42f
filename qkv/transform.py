"""What keys or values go through before they are encoded: centred, divided, rotated; and back.

Nothing of it is undone per token when attention reads codes. For keys it is folded into the query, once per step: the
query is multiplied where keys were divided, rotated as they were, and its product with the centre is one number that is
added to all scores. For values the sum over tokens is rotated back, once per step.

A rotation is a Hadamard matrix with random signs (Ashkboos et al. 2024, "QuaRot", https://arxiv.org/abs/2404.00456):
``y = H diag(signs) x``. It makes the channels of a vector alike. Hadamard matrices of powers of two need additions
only; for a head size that is none, as 80 or 96, the head is cut into blocks of the largest one that divides it. Signs
come from a fixed sequence: the same head size gives the same rotation, always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch


def rotation_block(dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides ``dim``."""
    return dim & -dim


@lru_cache
def _signs(dim: int) -> tuple[float, ...]:
    signs = []
    for i in range(dim):
        # The finaliser of splitmix64 (Steele, Lea, Flood 2014).
        x = (i + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        signs.append(1.0 if (x ^ x >> 31) & 1 else -1.0)
    return tuple(signs)


def rotation_signs(dim: int, device: torch.device | None = None) -> torch.Tensor:
    """The signs of the rotation of ``dim`` channels: float32 ``[dim]`` of 1 and -1."""
    return torch.tensor(_signs(dim), dtype=torch.float32, device=device)


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x [..., dim]`` with every block of channels multiplied by the orthogonal Hadamard matrix; its own inverse."""
    shape = x.shape
    width = 1
    while width < block:
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * width), 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        width *= 2
    # The factor as the compiled codec has it, a float32.
    return x * torch.tensor(block**-0.5, dtype=torch.float32).to(x)


class Transform:
    """The way of one layer's keys, or values, before they are encoded.

    Attributes:
        signs: float32 ``[dim]``, or None: no rotation.
        centre: float32 ``[heads, dim]``, subtracted first, or None.
        multiplier: float32 ``[heads, dim]``, divided by then, or None.
    """

    __slots__ = ("centre", "multiplier", "signs")

    def __init__(
        self,
        signs: torch.Tensor | None = None,
        centre: torch.Tensor | None = None,
        multiplier: torch.Tensor | None = None,
    ):
        self.signs, self.centre, self.multiplier = signs, centre, multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, heads, n, dim]`` as it is to be encoded, float32."""
        x = x.float()
        if self.centre is not None:
            x = x - self.centre.unsqueeze(1)
        if self.multiplier is not None:
            x = x / self.multiplier.unsqueeze(1)
        return x if self.signs is None else hadamard(x * self.signs, rotation_block(x.shape[-1]))

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """What :meth:`forward` turned into ``x [batch, heads, n, dim]``, float32."""
        if self.signs is not None:
            x = hadamard(x, rotation_block(x.shape[-1])) * self.signs
        if self.multiplier is not None:
            x = x * self.multiplier.unsqueeze(1)
        return x if self.centre is None else x + self.centre.unsqueeze(1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Transform:
        """The same with every tensor replaced by ``function`` of it."""
        made = (None if x is None else function(x).contiguous() for x in (self.signs, self.centre, self.multiplier))
        return Transform(*made)

    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.signs, self.centre, self.multiplier) if x is not None)
