"""Where codes lie in memory: what is written is read back, at any place, and the kernels' order is as documented."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.formats.layout import (
    KEY_TILES,
    PACKED_KEYS,
    PACKED_VALUES,
    PARTS,
    ROWS,
    UNIT,
    VALUE_TILES,
    Layout,
    layout_for,
    pack,
    unpack,
)

CPU = torch.device("cpu")
LAYOUTS = {"rows": ROWS, "keys": KEY_TILES, "values": VALUE_TILES, "other": Layout(tile=8, channels=4)}
LAYOUTS |= {f"keys of {bits} bits": layout for bits, layout in PACKED_KEYS.items()}
LAYOUTS |= {f"values of {bits} bits": layout for bits, layout in PACKED_VALUES.items()}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_width = pytest.mark.parametrize("bits", PARTS)


def some_codes(batch: int, heads: int, tokens: int, dim: int, seed: int = 0, bits: int = 8) -> torch.Tensor:
    """Random codes other than 0, uint8 ``[batch, heads, tokens, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 1 << bits, (batch, heads, tokens, dim), generator=generator, dtype=torch.uint8)


@each_layout
@settings(max_examples=25, deadline=None)
@given(
    dim=st.integers(1, 40),
    capacity=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 70), max_size=6),
    read=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_what_is_written_in_any_pieces_is_read_back_at_any_place(
    layout: Layout, dim: int, capacity: int, cuts: list[int], read: tuple[int, int]
) -> None:
    codes = some_codes(2, 3, capacity, dim, bits=layout.bits)
    store = layout.empty(2, 3, capacity, dim, CPU)
    edges = [0, *sorted(min(c, capacity) for c in cuts), capacity]
    for start, end in pairwise(edges):
        layout.write(store, start, codes[:, :, start:end])
    first, last = sorted(min(x, capacity) for x in read)
    assert torch.equal(layout.read(store, first, last - first, dim), codes[:, :, first:last])
    assert torch.equal(layout.read(store, 0, capacity, dim), codes)


@each_layout
@pytest.mark.parametrize("dim", [1, 7, 16, 33])
@pytest.mark.parametrize("offset", [0, 13, 16, 41])
def test_writing_changes_no_other_token(layout: Layout, dim: int, offset: int) -> None:
    before, after = (some_codes(1, 2, n, dim, seed=n, bits=layout.bits) for n in (50, 9))
    store = layout.empty(1, 2, 50, dim, CPU)
    layout.write(store, 0, before)
    layout.write(store, offset, after)
    expected = before.clone()
    expected[:, :, offset : offset + 9] = after
    assert torch.equal(layout.read(store, 0, 50, dim), expected)


def test_keys_lie_as_pairs_of_channels_of_sixteen_tokens() -> None:
    codes = some_codes(1, 1, 32, 6)
    store = KEY_TILES.empty(1, 1, 32, 6, CPU)
    KEY_TILES.write(store, 0, codes)
    flat = store.flatten()
    for token in range(32):
        for channel in range(6):
            place = token // 16 * 16 * 6 + channel // 2 * 32 + token % 16 * 2 + channel % 2
            assert flat[place] == codes[0, 0, token, channel]


def test_values_lie_as_pairs_of_tokens_of_one_channel() -> None:
    codes = some_codes(1, 1, 8, 5)
    store = VALUE_TILES.empty(1, 1, 8, 5, CPU)
    VALUE_TILES.write(store, 0, codes)
    flat = store.flatten()
    for token in range(8):
        for channel in range(5):
            assert flat[token // 2 * 10 + channel * 2 + token % 2] == codes[0, 0, token, channel]


def test_rows_lie_as_they_are() -> None:
    codes = some_codes(2, 3, 5, 7)
    store = ROWS.empty(2, 3, 5, 7, CPU)
    ROWS.write(store, 0, codes)
    assert torch.equal(store.flatten(), codes.flatten())


@each_layout
def test_room_begins_as_zeros_and_has_64_bytes_behind_the_last_code(layout: Layout) -> None:
    store = layout.empty(2, 2, 17, 5, CPU)
    assert not bool(store.any())
    assert store.untyped_storage().nbytes() == store.numel() + 64


def test_an_odd_channel_is_padded_with_zeros() -> None:
    store = KEY_TILES.empty(1, 1, 16, 5, CPU)
    KEY_TILES.write(store, 0, some_codes(1, 1, 16, 5))
    assert store.shape == (1, 1, 1, 3, 16, 2)
    assert not bool(store[0, 0, 0, 2, :, 1].any())


def test_tiles_are_for_the_cpu_and_rows_for_other_devices() -> None:
    assert layout_for(CPU, is_key=True) is KEY_TILES
    assert layout_for(CPU, is_key=False) is VALUE_TILES
    assert layout_for(torch.device("meta"), is_key=True) is ROWS


# ---- codes of less than 8 bits -------------------------------------------------------------------------------------


def packed_by_the_book(codes: list[int], bits: int) -> list[int]:
    """32 codes as bytes: in a part of w bits, byte j holds the codes j, j + 4w, j + 8w ..., the first lowest."""
    data: list[int] = []
    taken = 0
    for width in {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}[bits]:
        part = [code // 2**taken % 2**width for code in codes]
        data += [sum(x << (i * width) for i, x in enumerate(part[j :: 4 * width])) for j in range(4 * width)]
        taken += width
    return data


@each_width
def test_units_are_packed_as_documented_and_unpacked_to_the_same_codes(bits: int) -> None:
    units = torch.cat([some_codes(1, 1, 40, UNIT, bits=bits)[0, 0], torch.arange(UNIT).unsqueeze(0) % 2**bits]).byte()
    units[0], units[1] = 0, 2**bits - 1
    packed = pack(units, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [packed_by_the_book(codes, bits) for codes in units.tolist()]
    assert torch.equal(unpack(packed, bits), units)


# Written out by hand: {index: code}, all others 0, and the bytes that are not 0.
EXAMPLES = {
    # index 9 = 1 * 8 + 1: byte 1, second place; 31 = 3 * 8 + 7: byte 7, fourth place
    2: ({0: 3, 9: 2, 31: 1}, {0: 0b00000011, 1: 0b00001000, 7: 0b01000000}),
    # 5 = 1|01, 7 = 1|11, 4 = 1|00: the two low bits in bytes 0 .. 7, the high one in bytes 8 .. 11, eight to a byte
    3: ({0: 5, 13: 7, 31: 4}, {0: 0b00000001, 5: 0b00001100, 8: 0b00000001, 9: 0b00001000, 11: 0b10000000}),
    # 20 = 1 * 16 + 4: byte 4, second place
    4: ({0: 9, 20: 15, 31: 6}, {0: 0x09, 4: 0xF0, 15: 0x60}),
    # 17 = 1|0001, 31 = 1|1111, 16 = 1|0000: four low bits in bytes 0 .. 15, the high one in bytes 16 .. 19
    5: ({0: 17, 20: 31, 31: 16}, {0: 0x01, 4: 0xF0, 16: 0b00100001, 19: 0b10000000}),
    # 33 = 10|0001, 63 = 11|1111, 48 = 11|0000: four low bits in bytes 0 .. 15, the two high ones in bytes 16 .. 23
    6: ({0: 33, 20: 63, 31: 48}, {0: 0x01, 4: 0xF0, 16: 0b00000010, 20: 0b00110000, 23: 0b11000000}),
}


@each_width
def test_an_example_of_each_width_has_the_bytes_that_were_written_out_by_hand(bits: int) -> None:
    codes, expected = EXAMPLES[bits]
    unit = torch.zeros(UNIT, dtype=torch.uint8)
    for index, code in codes.items():
        unit[index] = code
    packed = pack(unit, bits).tolist()
    assert len(packed) == 4 * bits
    assert {at: byte for at, byte in enumerate(packed) if byte} == expected


@each_width
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_a_unit_is_a_pair_of_channels_of_16_tokens_of_keys_and_16_channels_of_2_tokens_of_values(
    bits: int, is_key: bool
) -> None:
    codes = some_codes(1, 1, 32, 32, bits=bits)
    layout = layout_for(CPU, is_key, bits)
    store = layout.empty(1, 1, 32, 32, CPU)
    layout.write(store, 0, codes)
    units = unpack(store, bits)
    assert units.shape == ((1, 1, 2, 16, UNIT) if is_key else (1, 1, 16, 2, UNIT))
    for token in range(32):
        for channel in range(32):
            if is_key:
                place = (token // 16, channel // 2, token % 16 * 2 + channel % 2)
            else:
                place = (token // 2, channel // 16, channel % 16 * 2 + token % 2)
            assert units[0, 0][place] == codes[0, 0, token, channel]


@each_width
def test_packed_layouts_are_the_same_on_every_device(bits: int) -> None:
    for device in (CPU, torch.device("meta")):
        assert layout_for(device, is_key=True, bits=bits) is PACKED_KEYS[bits]
        assert layout_for(device, is_key=False, bits=bits) is PACKED_VALUES[bits]


@each_layout
@pytest.mark.parametrize("dim", [1, 16, 24, 80])
def test_bits_of_a_token_are_its_part_of_the_memory(layout: Layout, dim: int) -> None:
    whole_tiles = 32
    store = layout.empty(1, 1, whole_tiles, dim, CPU)
    assert store.numel() * 8 == whole_tiles * layout.bits_per_token(dim)
    assert layout.bits_per_token(dim) >= dim * layout.bits
