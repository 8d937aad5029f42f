"""The store of one layer when tokens leave at either end, when the batch changes, and in a static layout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from setups import GROUP_TOKENS, SETUPS
from stores import (
    SIZES,
    Pair,
    add,
    assert_equals,
    assert_same,
    config_of,
    configs,
    contents,
    decoded,
    each_setup,
    filled,
    joined,
    kv,
    like,
    part,
    sizes,
    snapshot,
    some_setups,
)

from qkv.config import CacheConfig
from qkv.equalizer import WARM_UP_TOKENS as EQUALIZER_TOKENS
from qkv.formats import formats, get_format
from qkv.storage import LayerStore

QUANTIZED = [name for name in formats() if name != "none"]
PER_HEAD = [name for name in QUANTIZED if "head" in get_format(name).granularities]
per_head = pytest.mark.parametrize("name", PER_HEAD)


# ---- crop, and changes of the batch --------------------------------------------------------------------------------


@each_setup
def test_crop_then_append_equals_never_having_seen_the_cropped_tokens(setup: str) -> None:
    config = config_of(setup, sink_tokens=4)
    pair, other = kv(200, batch=1, seed=4, **sizes(setup)), kv(150, batch=1, seed=5, **sizes(setup))
    # Nothing encoded is left, or all that scales and vectors were taken from, and whole groups.
    for keep in (0, 4, 144, 199):
        store = filled(config, pair)
        store.crop(keep)
        assert store.length == keep
        store.append(*other)
        assert_same(store, filled(config, joined(part(pair, 0, keep), other)))


@pytest.mark.parametrize("setup", ["int8 token", "fp8_e4m3 token", "int8 group", "int2 group", "int5_rot token"])
@pytest.mark.parametrize("sink", [0, 4])
def test_crop_to_any_length_then_append_equals_never_having_seen_the_cropped_tokens(setup: str, sink: int) -> None:
    config = config_of(setup, sink_tokens=sink)
    pair, other = kv(300, growing=1.0, **sizes(setup)), kv(100, seed=5, growing=1.0, **sizes(setup))
    for keep in (1, 3, 5, 60, 255, 256, 257, 299):
        store = filled(config, pair)
        store.crop(keep)
        store.append(*other)
        assert_same(store, filled(config, joined(part(pair, 0, keep), other)))


@pytest.mark.parametrize("setup", [name for name, options in SETUPS.items() if options.get("granularity") == "channel"])
def test_a_crop_into_a_group_of_tokens_keeps_them_encoded_and_the_next_group_begins_there(setup: str) -> None:
    config = config_of(setup, residual_length=3, sink_tokens=2)
    start = EQUALIZER_TOKENS if config.equalize else 0
    pair, other = kv(start + 70, batch=1, heads=1), kv(60, seed=1, batch=1, heads=1)
    for keep in (start + 20,) if config.equalize else (4, 20, 32, 66):  # those up to start + 64 are encoded
        store, expected = filled(config, pair), like(config)
        add(expected, pair)
        before = contents(store)
        store.crop(keep)
        expected.crop(keep)
        assert_equals(store, expected)
        for now, then in zip(contents(store)[:6], before, strict=False):
            assert torch.equal(now, then[:, :, :keep])
        segments, encoded = len(store.packed), store.packed_length
        for piece in (part(other, 0, 2), part(other, 2, 31), part(other, 31, 60)):
            store.append(*piece)
            add(expected, piece)
            assert_equals(store, expected)
        if keep in (start + 4, start + 20):
            # The segment that was cut takes no more tokens, and has no room for any.
            assert sum(segment.length for segment in store.packed[:segments]) == encoded
            assert store.packed[segments - 1].room == 0


def test_crops_into_one_group_again_and_again_leave_a_store_that_goes_on() -> None:
    config = CacheConfig("int4", granularity="channel", group_size=32)
    pair = kv(200, batch=1, heads=1)
    store, expected = filled(config, part(pair, 0, 100)), like(config)
    add(expected, part(pair, 0, 100))
    for keep in (75, 70, 69, 40, 39, 7, 1):
        store.crop(keep)
        expected.crop(keep)
        store.append(*part(pair, 0, 33))
        add(expected, part(pair, 0, 33))
        assert_equals(store, expected)


@per_head
@pytest.mark.parametrize("keep", [64, 65, 70, 120, 131, 199])
@pytest.mark.parametrize("first", [[], [70], [64, 65, 150]], ids=str)
def test_with_scales_per_head_crop_takes_back_what_the_cropped_tokens_made_them(
    name: str, keep: int, first: list[int]
) -> None:
    keys, values = kv(200, batch=1)
    for t in (90, 121, 150):  # where scales grow
        keys[0, 0, t] *= t
        values[0, 1, t] *= t
    keys[0, 0, 64], keys[0, 0, 130, 0] = float("nan"), float("inf")
    other = kv(40, batch=1, seed=7)
    config = CacheConfig(name, granularity="head", equalize=False)
    store = filled(config, (keys, values), first)
    store.crop(keep)
    store.append(*other)
    assert_same(store, filled(config, joined(part((keys, values), 0, keep), other)))


@settings(max_examples=50, deadline=None)
@given(config=configs(quantized=False), data=st.data())
def test_any_sequence_of_operations_stores_what_the_oracle_says(config: CacheConfig, data: st.DataObject) -> None:
    store, expected = LayerStore(config), like(config)
    batch, seed = 2, 0
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["append", "append", "append", "crop", "select", "repeat", "reorder", "copy"]))
        if what == "append" or store.length == 0:
            n = data.draw(st.sampled_from([1, 1, 2, 8, 33, 70, 130]))
            pair = kv(n, batch=batch, heads=1, seed=seed, growing=1.5, **SIZES)
            seed += 1
            store.append(*pair)
            add(expected, pair)
        elif what == "crop":
            keep = data.draw(st.integers(1, store.length))
            store.crop(keep)
            expected.crop(keep)
        elif what == "copy":
            store = copy.deepcopy(store) if data.draw(st.booleans()) else pickle.loads(pickle.dumps(store))
        else:
            if what == "select":
                rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=2))
            elif what == "repeat":
                rows = [b for b in range(batch) for _ in range(2 if batch <= 2 else 1)]
            else:
                rows = data.draw(st.permutations(range(batch)))
            index = torch.tensor(rows)
            store.map_batch(lambda x, index=index: x.index_select(0, index))
            expected.map_batch(rows)
            batch = len(rows)
            assert store.shape[0] == batch
        assert_equals(store, expected)


def as_equalized(config: CacheConfig, like: LayerStore, pair: Pair) -> LayerStore:
    """A store of the tokens whose keys are equalized as those of another one."""
    transform = like._transforms[0] if config.equalize else None
    given_vectors = (
        {} if transform is None else {"key_centre": transform.centre, "key_multiplier": transform.multiplier}
    )
    return filled(config, pair, **given_vectors)


def assert_follows(
    config: CacheConfig, pair: Pair, more: Pair, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A store whose batch is changed between the two goes on as one that had the new batch from the beginning."""
    store = filled(config, pair, [70])
    store.map_batch(function)
    store.append(*(function(x) for x in more))
    # Each row alone: growth for one row of a batch starts a new segment for all, but changes no scale of another.
    whole = joined(tuple(function(x) for x in pair), tuple(function(x) for x in more))
    assert_same(store, as_equalized(config, store, whole))
    assert store.shape[0] == whole[0].shape[0]


@each_setup
def test_every_part_of_the_state_follows_the_batch(setup: str) -> None:
    """Case 6: sinks, packed segments, the residual window and the scales per head."""
    config = config_of(setup, residual_length=9, sink_tokens=4)
    pair = kv(170, batch=3, growing=1.0, **sizes(setup))
    more = kv(30, batch=3, seed=3, growing=1.0, **sizes(setup))
    assert_follows(config, pair, more, lambda x: x.index_select(0, torch.tensor([2, 0, 2, 1])))


@some_setups
def test_every_part_of_the_state_follows_every_change_of_the_batch(setup: str) -> None:
    config = config_of(setup, residual_length=9, sink_tokens=4)
    pair = kv(170, batch=3, growing=1.0, **sizes(setup))
    more = kv(30, batch=3, seed=3, growing=1.0, **sizes(setup))
    assert_follows(config, pair, more, lambda x: x.index_select(0, torch.tensor([2, 0, 1])))  # beam search
    assert_follows(config, pair, more, lambda x: x[torch.tensor([1]), ...])
    assert_follows(config, pair, more, lambda x: x.repeat_interleave(2, dim=0))


@pytest.mark.parametrize("rows", [[1], [0, 0, 1, 1], [1, 0]], ids=str)
def test_scales_per_head_follow_the_batch_also_where_a_later_crop_takes_them_back(rows: list[int]) -> None:
    keys, values = kv(120)
    keys[1, 0, 64, 0] = float("nan")  # its scale can only be that of the warm-up
    keys[:, :, 65] *= 30
    config, index = CacheConfig("int8", granularity="head", equalize=False), torch.tensor(rows)
    store = filled(config, (keys, values))
    store.map_batch(lambda x: x[index])
    store.crop(65)
    more = tuple(x[index] for x in kv(20, seed=1))
    store.append(*more)
    assert_same(store, filled(config, joined((keys[index][:, :, :65], values[index][:, :, :65]), more)))


def test_a_batch_change_before_the_first_token_is_followed() -> None:
    store = LayerStore(CacheConfig("int8"))
    store.append(*kv(0))
    store.map_batch(lambda x: x.repeat_interleave(2, dim=0))
    store.append(*kv(3, batch=4))
    assert store.shape == (4, 2, 6, 5)


@pytest.mark.parametrize("setup", ["int8 head", "int8 token equalized", "int3 channel"])
def test_a_batch_change_that_fails_changes_nothing(setup: str) -> None:
    store = filled(config_of(setup, residual_length=5, sink_tokens=2), kv(150))
    before = snapshot(store)
    with pytest.raises(IndexError):
        store.map_batch(lambda x: x[torch.tensor([7])])
    assert snapshot(store) == before


@pytest.mark.parametrize("setup", ["int8 token", "int4 group"])
def test_what_was_cropped_is_not_kept_in_memory(setup: str) -> None:
    config = config_of(setup)
    store = filled(config, kv(1000, **sizes(setup)))
    store.crop(10)
    assert store.nbytes() == filled(config, kv(256, **sizes(setup))).nbytes()  # the segment that the 10 are in


def test_of_channels_a_crop_keeps_the_groups_that_it_cut_and_no_more() -> None:
    config = CacheConfig("int8", granularity="channel", group_size=32)
    store = filled(config, kv(1000))
    store.crop(10)
    assert store.packed[0].capacity == 10
    assert sum(x.nbytes for plane in store.packed[0].planes() for x in plane.tensors()) == 2 * 2 * 32 * (6 + 5) + (
        2 * 2 * (6 + 5) * 2
    )


@some_setups
@pytest.mark.parametrize("length", [150, 151, 5000])
def test_cropping_to_the_length_or_more_changes_nothing(setup: str, length: int) -> None:
    store = filled(config_of(setup, residual_length=5), kv(150, **sizes(setup)))
    before = snapshot(store)
    store.crop(length)
    assert snapshot(store) == before


@some_setups
def test_a_negative_length_is_refused(setup: str) -> None:
    store = filled(config_of(setup, residual_length=5, sink_tokens=2), kv(150, **sizes(setup)))
    before = snapshot(store)
    with pytest.raises(ValueError, match="at least 0, not -3"):
        store.crop(-3)
    assert snapshot(store) == before


# ---- sliding windows -----------------------------------------------------------------------------------------------


def slide(store: LayerStore, whole: LayerStore, window: int, pair: Pair) -> None:
    """Adds tokens to both; of the first, those out of the window leave. What it shows is what the other one has."""
    seen = max(0, store.length - window + 1)
    store.append(*pair)
    whole.append(*pair)
    left = max(0, store.length - window + 1)
    # Tokens that leave before they are encoded change no scale of later ones; none of these is seen as stored then.
    if window > store.config.residual_length:
        assert_shows(store, whole, seen)
    store.drop_before(left)
    assert_shows(store, whole, left)


def assert_shows(store: LayerStore, whole: LayerStore, first: int) -> None:
    for found, expected in zip(decoded(store, first), decoded(whole), strict=True):
        np.testing.assert_array_equal(found, expected[:, :, first:])


@each_setup
def test_a_sliding_window_shows_what_a_store_of_all_tokens_shows(setup: str) -> None:
    """Case 7. Also where the window is smaller than a group of tokens, or than the warm-up."""
    config = config_of(setup, residual_length=3, sink_tokens=2)
    pair = kv(300, batch=1, heads=1, growing=1.0, **sizes(setup))
    store, whole = LayerStore(config, window=True), LayerStore(config)
    for start, end in pairwise([0, 40, 131, 150, 151, 230, 300]):
        slide(store, whole, 7, part(pair, start, end))
    # Tokens in front went: what is held besides the window is what waits for its group, and what is too young to go.
    assert store.length - store.first <= max(7, config.residual_length + GROUP_TOKENS)
    assert store.nbytes() < whole.nbytes()


@settings(max_examples=40, deadline=None)
@given(
    config=configs(),
    window=st.sampled_from([1, 2, 10, 33, 100, 200]),
    static=st.booleans(),
    data=st.data(),
)
def test_any_sequence_of_operations_on_a_sliding_window_shows_what_a_store_of_all_tokens_shows(
    config: CacheConfig, window: int, static: bool, data: st.DataObject
) -> None:
    store, whole = LayerStore(config, window=True, capacity=900 if static else None), LayerStore(config)
    for seed in range(data.draw(st.integers(2, 9))):
        what = data.draw(st.sampled_from(["append", "append", "append", "crop", "batch"]))
        if what == "append" or store.length == 0:
            n = data.draw(st.sampled_from([1, 1, 2, 20, 33, 70, 130]))
            if store.length + n <= 900:
                batch = store.shape[0] if store.shape is not None else 2
                slide(store, whole, window, kv(n, batch=batch, heads=1, seed=seed, growing=1.5, **SIZES))
        elif what == "crop":
            # The window would reach back to a token that is gone.
            least = store.first + window if store.first else 1
            if least < store.length:
                keep = data.draw(st.integers(least, store.length))
                store.crop(keep)
                whole.crop(keep)
        else:
            rows = torch.tensor(data.draw(st.permutations(range(store.shape[0]))))
            store.map_batch(lambda x, rows=rows: x[rows])
            whole.map_batch(lambda x, rows=rows: x[rows])


# ---- a static layout -----------------------------------------------------------------------------------------------


def places(store: LayerStore) -> list[int]:
    """Where the memory lies."""
    segments = (*store.segments(), *store._empty)
    return sorted(x.data_ptr() for s in segments for plane in s.planes() for x in plane.tensors())


@each_setup
def test_a_static_layout_takes_its_memory_once_and_stores_the_same(setup: str) -> None:
    config = config_of(setup, residual_length=3, sink_tokens=2)
    pair = tuple(x.clamp(-2, 2) for x in kv(250, batch=1, **sizes(setup)))  # scales per head do not grow
    store, growing = LayerStore(config, capacity=250), LayerStore(config)
    taken: list[int] = []
    for start, end in pairwise([0, 1, 40, 41, 131, 132, 151, 200, 249, 250]):
        store.append(*part(pair, start, end))
        growing.append(*part(pair, start, end))
        if store.packed:
            taken = taken or places(store)
            assert places(store) == taken
    assert_same(store, growing)
    assert taken
    before = snapshot(store)
    with pytest.raises(ValueError, match="holds 250 of at most 250 tokens: 1 more do not fit"):
        store.append(*part(pair, 0, 1))
    assert snapshot(store) == before


@some_setups
@pytest.mark.parametrize(("residual", "n"), [(64, 33), (80, 50), (5, 7)])
def test_in_a_static_layout_tokens_leave_the_window_before_others_take_their_place(
    setup: str, residual: int, n: int
) -> None:
    config = config_of(setup, residual_length=residual)
    pair = kv(400, batch=1, heads=1, **sizes(setup))
    store, growing = LayerStore(config, capacity=400), filled(config, pair)
    for start in range(0, 400, n):
        store.append(*part(pair, start, start + n))
    assert_same(store, growing)


@settings(max_examples=30, deadline=None)
@given(config=configs(), data=st.data())
def test_any_sequence_of_operations_on_a_static_layout_stores_the_same(
    config: CacheConfig, data: st.DataObject
) -> None:
    store, growing = LayerStore(config, capacity=300), LayerStore(config)
    for seed in range(data.draw(st.integers(2, 9))):
        what = data.draw(st.sampled_from(["append", "append", "append", "crop", "reset"]))
        if what == "append":
            n = min(data.draw(st.sampled_from([1, 1, 2, 20, 33, 70, 130])), 300 - store.length)
            pair = kv(n, batch=1, heads=1, seed=seed, growing=1.5, **SIZES)
            store.append(*pair)
            growing.append(*pair)
        elif what == "crop" and store.length:
            keep = data.draw(st.integers(0, store.length))
            store.crop(keep)
            growing.crop(keep)
        elif what == "reset":
            store.reset()
            growing.reset()
        if store.length:
            assert_same(store, growing)
    # However often it was cropped, to the end it has room.
    rest = kv(300 - store.length, batch=1, heads=1, seed=99, **SIZES)
    store.append(*rest)
    growing.append(*rest)
    assert_same(store, growing)
