"""Where the code of a token's channel lies in memory.

A layout is two numbers, ``tile`` tokens by ``channels`` channels: codes are ordered
``[tokens / tile][channels of the head / channels][tile][channels]``. Rows are the special case of one token and all
channels. The CPU kernels want keys as 16 x 2 (a pair of channels of 16 tokens is one vector, so that scores need no
sums across lanes) and values as 2 x 1 (the same channel of two tokens side by side).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Order of codes in memory; ``channels=0`` stands for all channels of the head.

    Attributes:
        tile: tokens that lie together.
        channels: channels that lie together.
    """

    tile: int
    channels: int

    def _split(self, dim: int) -> tuple[int, int]:
        width = self.channels or dim
        return -(-dim // width), width

    def empty(self, batch: int, heads: int, tokens: int, dim: int, device: torch.device) -> torch.Tensor:
        """Zeroed room for ``tokens`` tokens: uint8 ``[batch, heads, tokens / tile, dim / channels, tile, channels]``.

        The kernels load whole vectors: 64 spare bytes lie behind the last code.
        """
        groups, width = self._split(dim)
        tiles = -(-tokens // self.tile)
        size = batch * heads * tiles * groups * self.tile * width
        flat = torch.zeros(size + 64, dtype=torch.uint8, device=device)
        return flat[:size].view(batch, heads, tiles, groups, self.tile, width)

    def write(self, store: torch.Tensor, offset: int, codes: torch.Tensor) -> None:
        """Puts ``codes`` (uint8 ``[batch, heads, n, dim]``) at the tokens ``offset .. offset + n`` of ``store``."""
        batch, heads, n, dim = codes.shape
        groups, width = self._split(dim)
        if groups * width != dim:
            codes = torch.nn.functional.pad(codes, (0, groups * width - dim))
        token = torch.arange(offset, offset + n, device=codes.device)
        view = store.permute(0, 1, 2, 4, 3, 5)
        view[:, :, token // self.tile, token % self.tile] = codes.reshape(batch, heads, n, groups, width)

    def read(self, store: torch.Tensor, offset: int, n: int, dim: int) -> torch.Tensor:
        """The codes of the tokens ``offset .. offset + n``: uint8 ``[batch, heads, n, dim]``."""
        first, last = offset // self.tile, -(-(offset + n) // self.tile)
        batch, heads, _, groups, _, width = store.shape
        tiles = store[:, :, first:last].permute(0, 1, 2, 4, 3, 5)
        rows = tiles.reshape(batch, heads, (last - first) * self.tile, groups * width)
        start = offset - first * self.tile
        return rows[:, :, start : start + n, :dim]


ROWS = Layout(tile=1, channels=0)
KEY_TILES = Layout(tile=16, channels=2)
VALUE_TILES = Layout(tile=2, channels=1)


def layout_for(device: torch.device, is_key: bool) -> Layout:
    """The layout of one-byte codes of keys or values on a device: tiles where the CPU kernels read them, else rows."""
    if device.type != "cpu":
        return ROWS
    return KEY_TILES if is_key else VALUE_TILES
