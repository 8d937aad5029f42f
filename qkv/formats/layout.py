"""Where the code of a token's channel lies in memory.

A layout is two numbers, ``tile`` tokens by ``channels`` channels: codes are ordered
``[tokens / tile][channels of the head / channels][tile][channels]``. Rows are the special case of one token and all
channels. The CPU kernels want keys as 16 x 2 (a pair of channels of 16 tokens is one vector, so that scores need no
sums across lanes) and values as 2 x 1 (the same channel of two tokens side by side).

Codes of less than 8 bits keep that order and are packed 32 at a time, a *unit*: one pair of channels of 16 tokens for
keys, 16 channels of two tokens for values. A unit of ``bits`` bits is ``4 * bits`` bytes. 5 bits are 4 and 1 of them, 6
are 4 and 2, 3 are 2 and 1: each part is packed on its own. In a part of ``w`` bits, byte ``j`` holds the codes ``j``,
``j + 4w``, ``j + 8w`` and so on, the first in its lowest bits: one shift of a vector brings them to their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkv import large_pages

UNIT = 32
PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Units of 32 codes, uint8 ``[..., 32]``, as bytes ``[..., 4 * bits]``."""
    parts = []
    taken = 0
    for width in PARTS[bits]:
        part = (codes >> taken) & ((1 << width) - 1)
        columns = part.unflatten(-1, (8 // width, 4 * width))
        byte = columns[..., 0, :].clone()
        for k in range(1, 8 // width):
            byte |= columns[..., k, :] << (k * width)
        parts.append(byte)
        taken += width
    return torch.cat(parts, dim=-1)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, uint8 ``[..., 32]``, of packed units ``[..., 4 * bits]``."""
    codes: torch.Tensor | None = None
    taken = at = 0
    for width in PARTS[bits]:
        part = data[..., at : at + 4 * width]
        spread = torch.cat([(part >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)], dim=-1)
        codes = spread if codes is None else codes | spread << taken
        taken += width
        at += 4 * width
    assert codes is not None
    return codes


@dataclass(frozen=True)
class Layout:
    """Order of codes in memory; ``channels=0`` stands for all channels of the head.

    Attributes:
        tile: tokens that lie together.
        channels: channels that lie together.
        bits: bits of a code; with less than 8, ``tile * channels`` codes are a unit.
    """

    tile: int
    channels: int
    bits: int = 8

    def _split(self, dim: int) -> tuple[int, int]:
        width = self.channels or dim
        return -(-dim // width), width

    def empty(self, batch: int, heads: int, tokens: int, dim: int, device: torch.device) -> torch.Tensor:
        """Zeroed room for ``tokens`` tokens.

        uint8 ``[batch, heads, tokens / tile, dim / channels, tile, channels]``, or, where codes are packed,
        ``[batch, heads, tokens / tile, dim / channels, 4 * bits]``.

        The kernels load whole vectors: 64 spare bytes lie behind the last code.
        """
        groups, width = self._split(dim)
        tiles = -(-tokens // self.tile)
        last = (self.tile, width) if self.bits == 8 else (4 * self.bits,)
        shape = (batch, heads, tiles, groups, *last)
        size = 1
        for n in shape:
            size *= n
        flat = large_pages.empty(size + 64, device).zero_()
        return flat[:size].view(shape)

    def bits_per_token(self, dim: int) -> int:
        """Bits that the codes of one token take, of one head, padding of channels included."""
        groups, width = self._split(dim)
        return groups * width * self.bits

    def write(self, store: torch.Tensor, offset: int, codes: torch.Tensor) -> None:
        """Puts ``codes`` (uint8 ``[batch, heads, n, dim]``) at the tokens ``offset .. offset + n`` of ``store``."""
        batch, heads, n, dim = codes.shape
        groups, width = self._split(dim)
        if groups * width != dim:
            codes = torch.nn.functional.pad(codes, (0, groups * width - dim))
        first, last = offset // self.tile, -(-(offset + n) // self.tile)
        tiles = store[:, :, first:last] if self.bits == 8 else self._spread(store[:, :, first:last], width)
        token = torch.arange(offset, offset + n, device=codes.device) - first * self.tile
        view = tiles.permute(0, 1, 2, 4, 3, 5)
        view[:, :, token // self.tile, token % self.tile] = codes.reshape(batch, heads, n, groups, width)
        if self.bits != 8:
            store[:, :, first:last] = pack(self._unit(tiles), self.bits)

    def read(self, store: torch.Tensor, offset: int, n: int, dim: int) -> torch.Tensor:
        """The codes of the tokens ``offset .. offset + n``: uint8 ``[batch, heads, n, dim]``."""
        first, last = offset // self.tile, -(-(offset + n) // self.tile)
        batch, heads = store.shape[:2]
        groups, width = self._split(dim)
        held = store[:, :, first:last]
        tiles = (held if self.bits == 8 else self._spread(held, width)).permute(0, 1, 2, 4, 3, 5)
        rows = tiles.reshape(batch, heads, (last - first) * self.tile, groups * width)
        start = offset - first * self.tile
        return rows[:, :, start : start + n, :dim]

    # A unit of keys is ordered by token, then channel; one of values by channel, then token.

    def _spread(self, packed: torch.Tensor, width: int) -> torch.Tensor:
        """Units, unpacked: uint8 ``[..., tile, channels]``, a new tensor."""
        codes = unpack(packed, self.bits)
        if self.tile >= width:
            return codes.unflatten(-1, (self.tile, width))
        return codes.unflatten(-1, (width, self.tile)).transpose(-1, -2).contiguous()

    def _unit(self, tiles: torch.Tensor) -> torch.Tensor:
        """The codes of ``[..., tile, channels]`` in the order of units, ``[..., 32]``."""
        return (tiles if self.tile >= tiles.shape[-1] else tiles.transpose(-1, -2)).flatten(-2)


ROWS = Layout(tile=1, channels=0)
KEY_TILES = Layout(tile=16, channels=2)
VALUE_TILES = Layout(tile=2, channels=1)
PACKED_KEYS = {bits: Layout(tile=16, channels=2, bits=bits) for bits in PARTS}
PACKED_VALUES = {bits: Layout(tile=2, channels=16, bits=bits) for bits in PARTS}


def layout_for(device: torch.device, is_key: bool, bits: int = 8) -> Layout:
    """The layout of codes of keys or values: what the CPU kernels read; of one-byte codes on other devices rows."""
    if bits != 8:
        return (PACKED_KEYS if is_key else PACKED_VALUES)[bits]
    if device.type != "cpu":
        return ROWS
    return KEY_TILES if is_key else VALUE_TILES
