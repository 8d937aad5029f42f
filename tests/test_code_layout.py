"""Where codes lie in memory: what is written is read back, at any place, and the kernels' order is as documented."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.formats.layout import KEY_TILES, ROWS, VALUE_TILES, Layout, layout_for

CPU = torch.device("cpu")
LAYOUTS = {"rows": ROWS, "keys": KEY_TILES, "values": VALUE_TILES, "other": Layout(tile=8, channels=4)}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def some_codes(batch: int, heads: int, tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Random bytes other than 0, ``[batch, heads, tokens, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (batch, heads, tokens, dim), generator=generator, dtype=torch.uint8)


@each_layout
@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40),
    capacity=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 70), max_size=6),
    read=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_what_is_written_in_any_pieces_is_read_back_at_any_place(
    layout: Layout, dim: int, capacity: int, cuts: list[int], read: tuple[int, int]
) -> None:
    codes = some_codes(2, 3, capacity, dim)
    store = layout.empty(2, 3, capacity, dim, CPU)
    edges = [0, *sorted(min(c, capacity) for c in cuts), capacity]
    for start, end in pairwise(edges):
        layout.write(store, start, codes[:, :, start:end])
    first, last = sorted(min(x, capacity) for x in read)
    assert torch.equal(layout.read(store, first, last - first, dim), codes[:, :, first:last])
    assert torch.equal(layout.read(store, 0, capacity, dim), codes)


@each_layout
@pytest.mark.parametrize("dim", [1, 7, 16, 33])
def test_writing_changes_no_other_token(layout: Layout, dim: int) -> None:
    before, after = some_codes(1, 2, 50, dim, seed=1), some_codes(1, 2, 9, dim, seed=2)
    store = layout.empty(1, 2, 50, dim, CPU)
    layout.write(store, 0, before)
    layout.write(store, 13, after)
    expected = before.clone()
    expected[:, :, 13:22] = after
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
