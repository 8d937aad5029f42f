"""The store of one layer: what is in it depends on the tokens alone, and nothing in it changes once it is there."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from instruction_sets import INSTRUCTION_SETS, using
from setups import GROUP_TOKENS, SETUPS
from stores import (
    SIZES,
    SOME,
    Pair,
    add,
    assert_equals,
    assert_same,
    bits,
    config_of,
    configs,
    contents,
    decoded,
    each_setup,
    exact_by_the_book,
    exact_tokens,
    filled,
    group_of,
    joined,
    kv,
    like,
    options_of,
    part,
    sizes,
    snapshot,
    some_setups,
    stepwise,
    vectors,
)

from qkv.config import CacheConfig
from qkv.equalizer import WARM_UP_TOKENS as EQUALIZER_TOKENS
from qkv.formats import formats, get_format
from qkv.head_scale import HEAD_ROOM, WARM_UP_TOKENS
from qkv.storage import SEGMENT_TOKENS, Late, LayerStore
from qkv.view import KVView

QUANTIZED = [name for name in formats() if name != "none"]
PER_HEAD = [name for name in QUANTIZED if "head" in get_format(name).granularities]
per_head = pytest.mark.parametrize("name", PER_HEAD)


# ---- what is stored depends on the tokens alone --------------------------------------------------------------------


@each_setup
def test_in_pieces_the_bits_of_one_pass_are_stored_and_they_are_those_of_the_oracle(setup: str) -> None:
    config = config_of(setup, residual_length=3, sink_tokens=2)
    n = max(45, LayerStore(config).warm + 25)
    pair = kv(n, batch=1, heads=1, growing=1.5, **(SIZES if sizes(setup) else {}))
    expected = like(config)
    add(expected, pair)
    whole = filled(config, pair)
    assert_equals(whole, expected)
    assert whole.packed_length >= 30
    assert_same(filled(config, pair, [1, 2, 3, 10, n - 27, n - 26, n - 1]), whole)


@settings(max_examples=80, deadline=None)
@given(
    config=configs(),
    n=st.sampled_from([1, 2, 63, 64, 65, 130, 131, 150, 257]),
    cuts=st.lists(st.integers(0, 260), max_size=6),
    steps=st.integers(0, 40),
    odd=st.lists(st.integers(0, 259), max_size=2),
    seed=st.integers(0, 99),
)
def test_one_pass_pieces_and_steps_store_the_same_bits(
    config: CacheConfig, n: int, cuts: list[int], steps: int, odd: list[int], seed: int
) -> None:
    pair = kv(n, batch=1, seed=seed, growing=2.0, **SIZES)
    for t in odd:
        pair[t % 2][0, t % 2, min(t, n - 1), 1] = float("nan")
    whole = filled(config, pair)
    assert_same(filled(config, pair, cuts), whole)
    # Single steps where it matters most: at the beginning, around the end of a warm-up, and at the end.
    warm = LayerStore(config).warm
    single = [t for t in range(n) if t < 3 or abs(t - warm) < 4 or n - steps < t]
    assert_same(filled(config, pair, single), whole)


@settings(max_examples=40, deadline=None)
@given(
    config=configs(quantized=False),
    beyond=st.sampled_from([-1, 0, 1, 15, 40, 70]),
    cuts=st.lists(st.integers(0, 250), max_size=4),
    seed=st.integers(0, 99),
)
def test_what_is_stored_equals_the_oracle(config: CacheConfig, beyond: int, cuts: list[int], seed: int) -> None:
    n = max(1, LayerStore(config).warm + beyond)
    pair = kv(n, batch=1, heads=1, seed=seed, growing=2.0, **SIZES)
    expected = like(config)
    add(expected, pair)
    assert_equals(filled(config, pair, cuts), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_with_nothing_said_but_its_name_a_format_stores_what_the_oracle_says(name: str) -> None:
    config = CacheConfig(name)
    if name not in oracle.FORMATS:
        format = get_format(name)
        way = format.granularities[0]
        config = CacheConfig(name, granularity=way, group_size=format.block or 64 if way == "group" else None)
    n = max(70, LayerStore(CacheConfig(name)).warm + 10)
    pair = kv(n, batch=1, heads=1, key_dim=64, value_dim=64)
    expected = like(config)
    add(expected, pair)
    assert_equals(filled(CacheConfig(name), pair, [20, n - 7]), expected)
    if name not in oracle.FORMATS:
        assert_same(filled(CacheConfig(name), pair), filled(config, pair))


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiled kernels")
@some_setups
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_compiled_kernels_the_same_bits_are_stored(setup: str, dtype: torch.dtype) -> None:
    pair = tuple(x.to(dtype) for x in kv(170, growing=1.5, **sizes(setup)))
    config = config_of(setup, residual_length=5, sink_tokens=3)
    cuts = [7, 71, 90, *range(140, 147)]
    with using("none"):
        expected = filled(config, pair, cuts)
        numbers = decoded(expected)
    for isa in INSTRUCTION_SETS:
        with using(isa):
            store = filled(config, pair, cuts)
            assert_same(store, expected)
            for a, b in zip(decoded(store), numbers, strict=True):
                np.testing.assert_array_equal(a, b)


@each_setup
def test_keys_and_values_as_models_give_them_need_not_be_contiguous(setup: str) -> None:
    config = config_of(setup, residual_length=3, sink_tokens=2)
    warm = LayerStore(config).warm
    keys, values = kv(max(40, warm + 12), **sizes(setup))
    # A projection gives [batch, tokens, heads, dim], transposed.
    transposed = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    broadcast = (keys[:1].expand(2, -1, -1, -1), values[:1].expand(2, -1, -1, -1))
    every_second = tuple(x.repeat_interleave(2, dim=3)[..., ::2] for x in (keys, values))
    assert not transposed[0].is_contiguous()
    cuts = [9, warm + 8, warm + 9]
    expected = filled(config, (keys, values), cuts)
    for way in (transposed, every_second):
        assert_same(filled(config, way, cuts), expected)
    assert_same(filled(config, broadcast, cuts), filled(config, tuple(x.contiguous() for x in broadcast), cuts))


@some_setups
@pytest.mark.parametrize("n", [30, 150])
def test_the_caller_may_change_its_tensors_after_append(setup: str, n: int) -> None:
    keys, values = kv(n, **sizes(setup))
    store = filled(config_of(setup, residual_length=8, sink_tokens=4), (keys, values))
    before = decoded(store)
    keys.zero_()
    values.zero_()
    for a, b in zip(decoded(store), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", [*INSTRUCTION_SETS, "none"])
@pytest.mark.parametrize("setup", ["none", *SOME])
def test_no_graph_of_gradients_is_kept(isa: str, setup: str) -> None:
    keys, values = (x.requires_grad_() for x in kv(150, growing=2.0, **sizes(setup)))
    config = config_of(setup, residual_length=5, sink_tokens=2)
    with using(isa):
        store = filled(config, (keys * 1, values * 1), [70, 149])
        assert_same(copy.deepcopy(store), filled(config, (keys.detach(), values.detach())))
    held = [x for s in store.segments() for plane in s.planes() for x in plane.tensors()]
    assert not any(x.requires_grad for x in [*held, *vectors(store)])


# ---- what is exact -------------------------------------------------------------------------------------------------


def assert_exact(store: LayerStore, pair: Pair, expected: list[bool]) -> None:
    """Those tokens are what came, and the others are not, neither keys nor values."""
    for found, x in zip(decoded(store), pair, strict=True):
        same = (torch.from_numpy(found) == x[:, :, : store.length].double()).all(dim=-1).all(dim=0).all(dim=0)
        assert same.tolist() == expected


@each_setup
def test_the_first_and_the_last_tokens_are_exact_at_every_length_and_the_others_are_not(setup: str) -> None:
    """Case 4: the window moves with every token, it is never flushed."""
    config = config_of(setup, residual_length=5, sink_tokens=3)
    store = LayerStore(config)
    warm = store.warm
    pair = kv(warm + 40, **sizes(setup))
    before = 0
    for end in sorted({3, 4, 8, 9, max(10, warm - 1), max(11, warm), *(warm + n for n in (20, 21, 22, 36, 37, 38))}):
        store.append(*part(pair, before, end))
        before = end
        assert_exact(store, pair, exact_by_the_book(config, end, warm))


@pytest.mark.parametrize("setup", ["int8 token", "int8 token equalized", "int4 group", "int3 channel", "int8 head"])
@pytest.mark.parametrize(("residual", "sink"), [(1, 0), (5, 4), (64, 0), (70, 4)])
def test_at_every_step_the_last_tokens_are_exact(setup: str, residual: int, sink: int) -> None:
    config = config_of(setup, residual_length=residual, sink_tokens=sink)
    pair = kv(160, batch=1, heads=1, **sizes(setup))
    store = LayerStore(config)
    for t in range(160):
        store.append(*part(pair, t, t + 1))
        if t % 5 == 0 or t > 150:
            assert_exact(store, pair, exact_by_the_book(config, t + 1, store.warm))


@pytest.mark.parametrize("name", PER_HEAD)
@pytest.mark.parametrize("equalize", [False, True])
def test_tokens_of_the_warm_up_are_exact_until_its_last_one_comes(name: str, equalize: bool) -> None:
    config = CacheConfig(name, granularity="head", sink_tokens=3, equalize=equalize)
    warm = 3 + (EQUALIZER_TOKENS if equalize else WARM_UP_TOKENS)
    pair = kv(warm + 10)
    store = LayerStore(config)
    for t in range(warm + 10):
        store.append(*part(pair, t, t + 1))
        assert exact_tokens(store) == [t + 1 < warm or j < 3 for j in range(t + 1)]


def seen_by(store: LayerStore, late: Late | None, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values up to the position ``query`` as the query there sees them in the pass that ends the store."""
    keys, values = (x[:, :, : query + 1] for x in decoded(store))
    if late is None:
        return keys, values
    position = late.first + torch.arange(late.segment.length)
    exact = position[(position <= query) & ~late.stored(torch.tensor(query), position)]
    for x, plane in zip((keys, values), late.segment.planes(), strict=True):
        x[:, :, exact] = plane.codes[:, :, exact - late.first].double().numpy()
    return keys, values


def assert_a_pass_equals_steps(config: CacheConfig, pair: Pair, before: list[int], every: int = 1) -> None:
    """The last pass, from ``before[-1]`` on, shows each query what single steps would have shown it."""
    total, start = pair[0].shape[2], before[-1]
    store, steps = (filled(config, part(pair, 0, start), before) for _ in range(2))
    late = store.append(*part(pair, start, total))
    for query in range(start, total):
        steps.append(*part(pair, query, query + 1))
        if (total - query) % every == 0 or abs(query + 1 - steps.warm) <= 1:
            for found, expected in zip(seen_by(store, late, query), decoded(steps), strict=True):
                np.testing.assert_array_equal(found, expected)


@each_setup
def test_one_pass_shows_every_query_what_single_steps_show(setup: str) -> None:
    """Case 11."""
    config = config_of(setup, residual_length=3, sink_tokens=2)
    start = max(8, LayerStore(config).warm - 8)
    pair = kv(start + 34, batch=1, heads=1, **sizes(setup))
    assert_a_pass_equals_steps(config, pair, [5, start], every=7)


@settings(max_examples=40, deadline=None)
@given(
    config=configs(),
    before=st.lists(st.integers(0, 140), min_size=1, max_size=3).map(sorted),
    n=st.sampled_from([1, 2, 17, 33, 70]),
)
def test_any_pass_shows_every_query_what_single_steps_show(config: CacheConfig, before: list[int], n: int) -> None:
    config = CacheConfig(**{**config.to_dict(), "prefill": "stored"})
    pair = kv(before[-1] + n, batch=1, heads=1, growing=1.0, **SIZES)
    assert_a_pass_equals_steps(config, pair, before, every=4)


@some_setups
def test_with_exact_prefill_the_tokens_of_a_pass_are_seen_exactly_and_older_ones_as_they_were(setup: str) -> None:
    config = config_of(setup, residual_length=3, sink_tokens=2, prefill="exact")
    pair = kv(220, batch=1, **sizes(setup))
    store = filled(config, part(pair, 0, 150))
    before = decoded(store)
    late = store.append(*part(pair, 150, 220))
    for found, old, x in zip(KVView(store, late).decode(torch.float64), before, pair, strict=True):
        np.testing.assert_array_equal(found[:, :, :150].numpy(), old)
        assert torch.equal(found[:, :, 150:], x[:, :, 150:].double())


# ---- old codes never change ----------------------------------------------------------------------------------------


@each_setup
def test_codes_once_written_are_never_written_again_and_full_segments_never_move(setup: str) -> None:
    """Case 5: nothing is decoded and encoded again."""
    config = config_of(setup, residual_length=7, sink_tokens=2)
    pair = kv(340, batch=1, heads=1, growing=1.0, **sizes(setup))
    store = LayerStore(config)
    known: list[torch.Tensor] = []
    places: dict[int, list[int]] = {}
    for start, end in pairwise([0, 20, 131, 180, 181, 300, 339, 340]):
        store.append(*part(pair, start, end))
        now = contents(store)
        for before, after in zip(known, now, strict=False):
            assert torch.equal(after[:, :, 2 : 2 + before.shape[2]], before)
        known = [x[:, :, 2 : 2 + store.packed_length].clone() for x in now[:6]]
        for i, segment in enumerate(store.packed[:-1]):  # all but the one that takes tokens
            place = [x.data_ptr() for plane in segment.planes() for x in plane.tensors()]
            assert places.setdefault(i, place) == place
    assert len(places) >= 2
    assert known[0].shape[2] >= 340 - 2 - 7 - 15


@pytest.mark.parametrize("setup", ["int8 token", "fp8_e4m3 token", "int5 token", "int4 group", "nvfp4 group"])
def test_with_a_scale_per_token_or_group_no_segment_ever_moves(setup: str) -> None:
    pair = kv(600, batch=1, **sizes(setup))
    store = LayerStore(config_of(setup))
    places: dict[int, list[int]] = {}
    for t in range(0, 600, 3):
        store.append(*part(pair, t, t + 3))
        for i, segment in enumerate(store.packed):
            place = [x.data_ptr() for plane in segment.planes() for x in plane.tensors()]
            assert places.setdefault(i, place) == place
    assert len(places) == 5  # of 32, 64, 128 and then 256 tokens


# ---- scales per head -----------------------------------------------------------------------------------------------


@per_head
@pytest.mark.parametrize("cuts", [[], [70], list(range(1, 200))], ids=["one pass", "prompt first", "steps"])
@pytest.mark.parametrize("factor", [1.2, 3.0, 1e4])
def test_later_larger_tokens_do_not_saturate(name: str, cuts: list[int], factor: float) -> None:
    """Case 2: the scale that the first tokens fixed must not clip those that come after."""
    keys, values = kv(200)
    keys[:, :, 100:] *= factor
    store = filled(CacheConfig(name, granularity="head", equalize=False), (keys, values), cuts)
    found = torch.from_numpy(decoded(store)[0])
    step = {"int8": 1 / 254, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}[name]
    # A scale covers at most HEAD_ROOM times the largest magnitude so far: half of its step is the largest error.
    largest = keys.abs().amax(dim=(2, 3), keepdim=True).double()
    assert bool(((found - keys).abs() <= step * HEAD_ROOM * largest).all())
    tops = found.abs().amax(dim=(2, 3)) / keys.abs().amax(dim=(2, 3))
    assert bool((tops >= 1 - step * HEAD_ROOM).all())


@pytest.mark.parametrize("setup", [name for name in SETUPS if "equalized" in name])
@pytest.mark.parametrize("factor", [3.0, 1e3])
def test_later_larger_keys_do_not_saturate_though_vectors_are_those_of_the_first(setup: str, factor: float) -> None:
    """Case 2."""
    if setup.startswith("nvfp4"):
        factor = min(factor, 100.0)  # its scales end at 448, as NVIDIA says
    keys, values = kv(300, **sizes(setup))
    keys[:, :, 200:] *= factor
    store = filled(config_of(setup), (keys, values))
    found = torch.from_numpy(decoded(store)[0])[:, :, :288]
    # 2 bits: three steps over the range, of which half is the error, and the range is twice the largest number.
    bound = 0.6 if "int2" in setup else 0.25
    error = (found - keys[:, :, :288]).abs().amax(dim=3)
    if "channel" in setup:  # tokens of both sizes share a scale
        assert bool((error.amax(dim=2) <= bound * keys.abs().amax(dim=(2, 3))).all())
    else:
        assert bool((error <= bound * keys[:, :, :288].abs().amax(dim=3) + 1.0).all())


@per_head
def test_a_scale_grows_with_head_room_and_only_for_the_heads_that_need_it(name: str) -> None:
    keys, values = kv(100, batch=1)
    keys[0, 1, 80] *= 50
    store = filled(CacheConfig(name, granularity="head", equalize=False), (keys, values))
    before, after = store.packed[0].key.scale[0], store.packed[-1].key.scale[0]
    assert after[0] == before[0]
    largest = oracle.LARGEST[name]
    top = keys[0, 1, 80].abs().max().item()
    assert after[1].item() == pytest.approx(HEAD_ROOM * top / largest, rel=2.0**-22)  # two float32 roundings
    first = keys[0, :, :WARM_UP_TOKENS].abs().amax(dim=(1, 2)).double()
    assert before.double().tolist() == pytest.approx((HEAD_ROOM * first / largest).tolist(), rel=2.0**-22)
    assert torch.equal(store.packed[-1].value.scale, store.packed[0].value.scale)


@pytest.mark.parametrize(("key", "value"), [("channel", "head"), ("head", "channel")])
def test_beside_a_scale_per_channel_a_scale_per_head_grows_for_whole_groups(key: str, value: str) -> None:
    sides = {"key_granularity": key, "value_granularity": value}
    group = {f"{'key' if key == 'channel' else 'value'}_group_size": GROUP_TOKENS}
    config = CacheConfig("int8", equalize=False, **sides, **group)
    pair = kv(200, batch=1)
    for x in pair:
        x[0, 1, 100] *= 50
        x[0, 0, 170, 2] = float("nan")
    expected = like(config)
    add(expected, pair)
    for cuts in ([], [1, 70, 99, 100, 101, 175]):
        assert_equals(filled(config, pair, cuts), expected)
    planes = [plane for segment in filled(config, pair).packed for plane in segment.planes() if plane.scale.dim() == 2]
    assert len({plane.scale[0, 1].item() for plane in planes}) == 2


@each_setup
def test_after_reset_nothing_of_the_tokens_before_remains(setup: str) -> None:
    """Case 3: a warm-up pass with huge tokens, then reset."""
    config = config_of(setup, residual_length=9, sink_tokens=2)
    warm_up, pair = kv(150, seed=1, **sizes(setup)), kv(160, seed=2, **sizes(setup))
    store = filled(config, tuple(1e4 * x for x in warm_up), [80])
    assert not all(exact_tokens(store))
    store.reset()
    assert (store.length, store.shape, store.nbytes()) == (0, None, 0)
    for start in range(0, 160, 80):
        store.append(*part(pair, start, start + 80))
    assert_same(store, filled(config, pair))


@pytest.mark.parametrize("setup", ["int8 head", "int8 token equalized", "int4 group", "int4_rot channel"])
def test_after_reset_another_batch_and_type_are_taken(setup: str) -> None:
    config = config_of(setup)
    store = filled(config, kv(150, **sizes(setup)))
    store.reset()
    other = tuple(x.bfloat16() for x in kv(140, batch=3, heads=1, key_dim=16, value_dim=16))
    store.append(*other)
    assert store.shape == (3, 1, 16, 16)
    assert not all(exact_tokens(store))
    assert_same(store, filled(config, other))


@per_head
def test_given_scales_are_used_from_the_first_token_and_saturate(name: str) -> None:
    pair = kv(100)
    key_scale, value_scale = torch.tensor([0.01, 0.001]), torch.tensor([0.02, 0.5])
    store = stepwise(CacheConfig(name), pair, key_scale=key_scale, value_scale=value_scale)
    assert store.key_granularity == store.value_granularity == "head"
    assert not any(exact_tokens(store))
    for found, x, scale in zip(decoded(store), pair, (key_scale, value_scale), strict=True):
        limit = (scale * oracle.LARGEST[name]).double().view(1, 2, 1, 1)
        assert bool((torch.from_numpy(found).abs() <= limit * (1 + 2.0**-23)).all())  # the product is a float32
        for index in np.ndindex(x.shape[:3]):
            row = x[index].double().numpy()
            s = float(scale[index[1]])
            np.testing.assert_array_equal(found[index], oracle.decode(oracle.encode(row, s, name), s, name))


@per_head
def test_absurd_given_scales_change_what_is_stored(name: str) -> None:
    """Case 10: scales that are loaded are used."""
    pair = kv(100)
    usual = decoded(filled(CacheConfig(name, granularity="head", equalize=False), pair))
    for size in (1e-6, 1e6):
        scale = torch.full((2,), size)
        absurd = decoded(filled(CacheConfig(name), pair, key_scale=scale, value_scale=scale))
        for a, b in zip(absurd, usual, strict=True):
            assert np.abs(a - b).max() > 1.0


def test_given_scales_survive_reset_and_stay_the_callers() -> None:
    pair, scale = kv(20), torch.tensor([0.01, 0.02])
    store = filled(CacheConfig("int8"), pair, key_scale=scale)
    first = contents(store)
    assert not bool(first[6].any())
    store.reset()
    store.append(*pair)
    for a, b in zip(contents(store), first, strict=True):
        assert torch.equal(a, b)
    assert scale.tolist() == torch.tensor([0.01, 0.02]).tolist()


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), ()])
def test_given_scales_of_a_wrong_shape_are_refused_and_nothing_is_stored(shape: tuple[int, ...]) -> None:
    store = LayerStore(CacheConfig("int8"), value_scale=torch.ones(shape))
    with pytest.raises(ValueError, match=r"value scales must be \[kv_heads\] = \[2\], not"):
        store.append(*kv(5))
    assert (store.length, store.shape) == (0, None)


VECTOR = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("config", "given_tensors", "message"),
    [
        (
            CacheConfig("int8", granularity="tensor"),
            {},
            "'int8' has no granularity 'tensor'; use one of token, head, gr",
        ),
        (
            CacheConfig("int4", granularity="head"),
            {},
            "'int4' has no granularity 'head'; use one of group, channel, tok",
        ),
        (CacheConfig("int4"), {"key_scale": torch.ones(2)}, "'int4' has no granularity 'head'"),
        (CacheConfig("int8", granularity="token"), {"key_scale": torch.ones(2)}, "static scales go with granularity"),
        (CacheConfig("none"), {"key_scale": torch.ones(2)}, "without scales"),
        (CacheConfig("int8", group_size=32), {}, "group_size goes with"),
        (CacheConfig("int8", granularity="channel", value_granularity="token", value_group_size=32), {}, "not 'token'"),
        (
            CacheConfig("int8", granularity="channel", group_size=48),
            {},
            "number of tokens, one of 16, 32, 64, 128; not 48",
        ),
        (CacheConfig("none"), {"key_centre": VECTOR}, "vectors for equalizing were given for keys that are not quant"),
        (CacheConfig("int8", equalize=False), {"key_multiplier": VECTOR}, "but equalize is false"),
        (CacheConfig("int8", equalize=True), {"key_scale": torch.ones(2)}, "without the vectors for equalizing"),
        (CacheConfig("int9"), {}, "unknown format 'int9'; known formats: none, int8"),
    ],
    ids=lambda x: "" if isinstance(x, str) else None,
)
def test_descriptions_that_do_not_go_together_are_refused(
    config: CacheConfig, given_tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LayerStore(config, **given_tensors)


@pytest.mark.parametrize(
    ("config", "key_dim", "message"),
    [
        (
            CacheConfig("int8", granularity="group", group_size=64),
            80,
            "keys have head_dim=80.*group_size=64; use 16, 80",
        ),
        (CacheConfig("int4", granularity="group", group_size=20), 80, "group_size=20; use 16, 80"),
        (CacheConfig("int4", granularity="group", group_size=48), 96, None),
        (CacheConfig("int4", granularity="group", group_size=6), 6, None),
        (CacheConfig("mxfp4"), 80, "mxfp4 has blocks of 32 channels, and keys have head_dim=80"),
        (CacheConfig("nvfp4", group_size=32), 64, "nvfp4 has blocks of 16 channels; group_size=32"),
    ],
    ids=str,
)
def test_a_group_that_does_not_divide_the_head_is_refused_and_nothing_is_stored(
    config: CacheConfig, key_dim: int, message: str | None
) -> None:
    """Case 9."""
    store = LayerStore(config)
    pair = kv(5, key_dim=key_dim, value_dim=key_dim)
    if message is None:
        store.append(*pair)
        return
    with pytest.raises(ValueError, match=message):
        store.append(*pair)
    assert (store.length, store.shape, store.nbytes()) == (0, None, 0)


# ---- not a number --------------------------------------------------------------------------------------------------


def spoilt_by(config: CacheConfig, position: int, channel: int, dim: int) -> tuple[slice, list[int]]:
    """The tokens and channels of keys that share something with one number."""
    format = get_format(config.format)

    def rotated(channels: set[int]) -> set[int]:
        block = oracle.rotation_block(dim) if format.rotated else 1
        return {other for c in channels for other in range(c // block * block, c // block * block + block)}

    size = {"group": format.block or config.group_size or dim, "channel": 1}.get(config.granularity, dim)
    channels = {other for c in rotated({channel}) for other in range(c // size * size, c // size * size + size)}
    start = position // group_of(config) * group_of(config)
    return slice(start, start + group_of(config)), sorted(rotated(channels))


@pytest.mark.parametrize("setup", [name for name, options in SETUPS.items() if options.get("equalize") is False])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_makes_what_shares_its_scale_nan_and_changes_no_other(
    setup: str, odd: float
) -> None:
    keys, values = kv(112, **sizes(setup))
    # The largest of its head, so that it would fix the scale if it counted, is another token.
    keys[1, 0, 50, 0], values[1, 0, 50, 0] = 9.0, 9.0
    config = config_of(setup)
    clean = decoded(filled(config, (keys, values)))
    for position in (0, 63, 64) if config.granularity == "head" else (0, 30):
        spoilt = (keys.clone(), values.clone())
        spoilt[0][1, 0, position, 2] = odd
        found = decoded(filled(config, spoilt))
        tokens, channels = spoilt_by(config, position, 2, keys.shape[3])
        shared = found[0][1, 0, tokens][:, channels]
        assert np.isnan(shared).all()
        found[0][1, 0, tokens, channels[0] : channels[-1] + 1] = clean[0][1, 0, tokens, channels[0] : channels[-1] + 1]
        for a, b in zip(found, clean, strict=True):
            np.testing.assert_array_equal(a, b)


def test_in_the_exact_parts_a_number_that_is_not_finite_is_kept_as_it_is() -> None:
    keys, values = kv(30)
    keys[0, 0, 1, 0], keys[0, 0, 28, 1] = float("inf"), float("nan")
    store = filled(CacheConfig("int8", residual_length=4, sink_tokens=2, equalize=False), (keys, values))
    found = decoded(store)[0]
    assert found[0, 0, 1, 0] == np.inf
    assert np.isnan(found[0, 0, 28]).tolist() == [False, True, False, False, False, False]


# ---- mixed formats -------------------------------------------------------------------------------------------------


NAMES = list(formats())
PAIRS = {(key, value) for shift in (1, 5) for key, value in zip(NAMES, NAMES[shift:] + NAMES[:shift], strict=True)}


@pytest.mark.parametrize(("key", "value"), sorted(PAIRS))
def test_keys_and_values_may_have_different_formats(key: str, value: str) -> None:
    config = CacheConfig(key, value_format=value, residual_length=2, equalize=False)
    pair = kv(90, batch=1, growing=1.0, key_dim=32, value_dim=64)
    store = filled(config, pair, [30])
    found = decoded(store)
    for side, name in enumerate((key, value)):
        if name == "none":
            np.testing.assert_array_equal(found[side], pair[side].double().numpy())
            continue
        # As beside keys or values that are not quantized, but for tokens that wait for a group of the other side.
        names = {"key_format": name, "value_format": "none"} if side == 0 else {"value_format": name}
        alone = decoded(filled(CacheConfig("none", **names, residual_length=2, equalize=False), pair))[side]
        encoded = store.packed_length
        assert encoded >= 64
        np.testing.assert_array_equal(found[side][:, :, :encoded], alone[:, :, :encoded])
        np.testing.assert_array_equal(found[side][:, :, encoded:], pair[side][:, :, encoded:].double().numpy())
    assert store.quantized


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    pair = tuple(x.to(dtype) for x in kv(300))
    store = filled(CacheConfig("none", residual_length=3, sink_tokens=2), pair, [100, 101])
    assert not store.quantized
    for found, x in zip(KVView(store).decode(), pair, strict=True):
        assert found.dtype == dtype
        assert torch.equal(bits(found), bits(x))


# ---- memory --------------------------------------------------------------------------------------------------------


def spare_tokens(store: LayerStore) -> int:
    return sum(segment.capacity for segment in store.segments()) - store.length


@settings(max_examples=60, deadline=None)
@given(
    setup=st.sampled_from(["none", *SOME, "fp8_e5m2 channel"]),
    group=st.sampled_from([16, 64, 128]),
    residual=st.sampled_from([0, 1, 32, 100, 400]),
    sink=st.sampled_from([0, 4, 300, 1000]),
    first=st.integers(1, 5000),
    steps=st.integers(0, 130),
    crop=st.none() | st.integers(1, 5000),
)
@example(setup="int8 token equalized", group=16, residual=1, sink=0, first=127, steps=10, crop=None)
@example(setup="int3 channel", group=128, residual=100, sink=1000, first=1853, steps=40, crop=None)
def test_spare_room_is_at_most_256_tokens_or_an_eighth(
    setup: str, group: int, residual: int, sink: int, first: int, steps: int, crop: int | None
) -> None:
    changes = {"group_size": group} if "channel" in setup else {}
    config = CacheConfig(**{**options_of(setup), **changes}, residual_length=residual, sink_tokens=sink)
    store = LayerStore(config)
    pair = tuple(x.clamp(-1, 1) for x in kv(first + steps, batch=1, heads=1, key_dim=2, value_dim=2))
    store.append(*part(pair, 0, first))
    assert spare_tokens(store) <= max(256, store.length // 8)
    if crop is not None and crop < first:
        store.crop(crop)
        assert spare_tokens(store) <= max(256, store.length // 8)
    for t in range(steps):
        store.append(*part(pair, first + t, first + t + 1))
        assert spare_tokens(store) <= max(256, store.length // 8)


@pytest.mark.parametrize(
    "config",
    [
        *(config_of(setup) for setup in SOME),
        CacheConfig("int8"),
        CacheConfig("int8", residual_length=20, sink_tokens=4),
        CacheConfig("int8", key_format="none", granularity="head", residual_length=20),
        CacheConfig("int8", granularity="head", equalize=True, residual_length=20),
        CacheConfig("int4_rot", residual_length=20, sink_tokens=4),
        CacheConfig("none"),
    ],
    ids=lambda config: "-".join(str(x) for x in config.to_dict().values()),
)
@pytest.mark.parametrize("window", [False, True])
def test_nbytes_is_what_the_tensors_hold(config: CacheConfig, window: bool) -> None:
    """Case 17: everything is counted, spare room too."""
    store = LayerStore(config, window=window)
    pair = kv(700, growing=1.0, key_dim=32, value_dim=64)
    for start, end in pairwise([0, 100, 300, 450, 700]):
        store.append(*part(pair, start, end))
        if window:
            store.drop_before(end - 150)
    storages, seen, stack = {}, {}, [store]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, (list, tuple, dict)) or (type(x).__module__.startswith("qkv.") and not isinstance(x, type)):
            stack.extend(gc.get_referents(x))
    assert store.nbytes() == sum(storages.values())


def test_int8_with_a_scale_per_token_takes_at_most_1_04_bytes_per_value_at_head_dim_64() -> None:
    store = filled(CacheConfig("int8"), kv(512, batch=1, key_dim=64, value_dim=64))
    bits_per_value = store.stored_bits() / store.stored_values()
    assert bits_per_value == 8 + 16 / 64  # a code, and its share of a bfloat16 scale
    assert bits_per_value <= 1.04 * 8
    # Two full segments: but for the 64 bytes behind each plane that vector loads may touch, the memory is that too; and
    # the two vectors of float32 by which the keys of two heads are equalized.
    assert store.nbytes() == bits_per_value / 8 * store.stored_values() + 2 * 2 * 64 + 2 * 2 * 64 * 4


# Codes, scales and zero points, at a head size of 128.
BITS_PER_VALUE = {
    "int8": 8 + 16 / 128,
    "fp8_e4m3": 8 + 16 / 128,
    "fp8_e5m2": 8 + 16 / 128,
    **{f"int{n}": n + (8 + 8) / 32 for n in (2, 3, 4, 5, 6)},
    **{f"int{n}_rot": n + (8 + 8) / 64 for n in (2, 3, 4, 5, 6)},
    **dict.fromkeys(("nf4", "fp4", "nf4_rot"), 4 + 16 / 64),
    "bnb8": 8 + 16 / 128,
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16,
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_per_value_are_those_of_the_codes_and_of_what_groups_share(name: str) -> None:
    store = filled(CacheConfig(name), kv(256, batch=1, heads=1, key_dim=128, value_dim=128))
    assert store.packed_length == 256
    assert store.stored_bits() / store.stored_values() == BITS_PER_VALUE[name]


@each_setup
def test_stored_bits_are_the_bytes_of_the_tensors_where_segments_are_full(setup: str) -> None:
    """Case 17."""
    pair = tuple(x.clamp(-1, 1) for x in kv(256, **sizes(setup)))  # scales per head do not grow
    store = filled(config_of(setup), pair)
    assert store.packed_length == store.length == sum(segment.capacity for segment in store.packed)
    held = sum(x.nbytes for segment in store.packed for plane in segment.planes() for x in plane.tensors())
    assert store.stored_bits() == 8 * held
    # Beyond that: the 64 bytes behind each plane, scales per head once more, vectors, an empty residual window.
    window = [x for s in (store.residual,) if s is not None for plane in s.planes() for x in plane.tensors()]
    current = [x.current for x in (store._key_head, store._value_head) if x is not None]
    beyond = sum(x.nbytes for x in [*window, *current, *set(vectors(store))])
    assert store.nbytes() == held + beyond + 64 * 2 * len(store.packed)


@pytest.mark.parametrize(
    ("config", "key_bits", "value_bits", "exact"),
    [
        (CacheConfig("none"), 32.0, 32.0, 0),
        (CacheConfig("fp8_e5m2"), 8 + 16 / 32, 8 + 16 / 64, 0),
        (CacheConfig("int8", key_format="none"), 32.0, 8 + 16 / 64, 0),
        (CacheConfig("int8", residual_length=10, sink_tokens=6, equalize=False), 8 + 16 / 32, 8 + 16 / 64, 16),
        (CacheConfig("int8", granularity="group", group_size=16, equalize=False), 9, 9, 0),
        (CacheConfig("int3", granularity="group", group_size=32, sink_tokens=1), 3.5, 3.5, 1),
        (CacheConfig("int5", granularity="token"), 5 + 16 / 32, 5 + 16 / 64, 0),
        (CacheConfig("int4", granularity="channel", group_size=16), 5, 5, 100 - 96),
        (CacheConfig("int4", granularity="channel", group_size=64, residual_length=3), 4.25, 4.25, 100 - 64),
    ],
    ids=["none", "fp8", "mixed", "sinks and residual", "groups", "3 bits", "5 bits", "channels", "long groups"],
)
def test_stored_bits_count_codes_scales_zero_points_sinks_and_residual(
    config: CacheConfig, key_bits: float, value_bits: float, exact: int
) -> None:
    store = filled(config, kv(100, key_dim=32, value_dim=64))
    heads = 2 * 2
    packed = 100 - exact
    expected = heads * packed * (32 * key_bits + 64 * value_bits) + heads * exact * (32 + 64) * 32
    assert store.stored_bits() == expected
    assert store.stored_values() == heads * 100 * (32 + 64)


def test_stored_bits_count_a_scale_per_head_once_for_each_segment() -> None:
    config = CacheConfig("int8", granularity="head", equalize=False)
    store = filled(config, tuple(x.clamp(-1, 1) for x in kv(300)))
    assert len(store.packed) == 2
    heads = 2 * 2
    assert store.stored_bits() == heads * 300 * (6 + 5) * 8 + len(store.packed) * heads * 2 * 32


@pytest.mark.parametrize("setup", ["int8 token", "int4 group"])
def test_a_growing_store_copies_nothing_old(setup: str) -> None:
    """Decoding allocates a segment when one is full, of 256 tokens once the first are through, and nothing between."""
    store = LayerStore(config_of(setup))
    pair = kv(3 * SEGMENT_TOKENS, batch=1, heads=1, **sizes(setup))
    versions = []
    for t in range(3 * SEGMENT_TOKENS):
        store.append(*part(pair, t, t + 1))
        versions.append(store.version)
    changes = [t for t in range(1, len(versions)) if versions[t] != versions[t - 1]]
    assert changes == [32, 96, 224, 224 + SEGMENT_TOKENS, 224 + 2 * SEGMENT_TOKENS]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_short_store_has_little_room_to_spare(name: str) -> None:
    config = CacheConfig(name, granularity="token", equalize=False)
    stores = [filled(config, kv(n, key_dim=64, value_dim=64)).nbytes() for n in (16, 32, 64, 128, 256)]
    assert stores[0] == stores[1]
    # The 64 bytes behind each plane weigh most in the smallest.
    assert all(a < b < 2.1 * a for a, b in itertools.pairwise(stores[1:]))


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setup", "n"), [("int8 token", 20), ("int8 head", 100), ("int8 channel equalized", 150)])
@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (torch.zeros(2, 2, 6), torch.zeros(2, 2, 1, 5), r"keys must be \[batch, kv_heads, tokens, head_dim\]"),
        (torch.zeros(2, 2, 1, 6), torch.zeros(2, 1, 5), r"values must be \[batch"),
        (torch.zeros(2, 2, 1, 6).int(), torch.zeros(2, 2, 1, 5), "keys must be floating point, not torch.int32"),
        (torch.zeros(2, 2, 1, 6).cfloat(), torch.zeros(2, 2, 1, 5), "keys must be floating point, not torch.complex64"),
        (torch.zeros(2, 2, 1, 6), torch.zeros(2, 2, 2, 5), "agree in batch, kv_heads and tokens"),
        (torch.zeros(2, 2, 1, 6), torch.zeros(2, 1, 1, 5), "agree in batch, kv_heads and tokens"),
        (torch.zeros(2, 2, 1, 6), torch.zeros(2, 2, 1, 5).half(), "must have one dtype and device"),
        (torch.zeros(3, 2, 1, 6), torch.zeros(3, 2, 1, 5), r"batch is 3, but the cache holds 2; call reset\(\)"),
        (torch.zeros(2, 4, 1, 6), torch.zeros(2, 4, 1, 5), "kv_heads is 4, but the cache holds 2"),
        (torch.zeros(2, 2, 1, 7), torch.zeros(2, 2, 1, 5), "head_dim of keys is 7, but the cache holds 6"),
        (torch.zeros(2, 2, 1, 6), torch.zeros(2, 2, 1, 6), "head_dim of values is 6, but the cache holds 5"),
        (torch.zeros(2, 2, 1, 0), torch.zeros(2, 2, 1, 5), "must be at least 1"),
        (
            torch.zeros(2, 2, 1, 6).half(),
            torch.zeros(2, 2, 1, 5).half(),
            "keys are torch.float16 on cpu, but",
        ),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_the_store_is_unchanged_to_the_byte(
    setup: str, n: int, keys: torch.Tensor, values: torch.Tensor, message: str
) -> None:
    store = filled(config_of(setup, residual_length=3, sink_tokens=2), kv(n))
    before = snapshot(store)
    with pytest.raises(ValueError, match=message):
        store.append(keys, values)
    assert snapshot(store) == before


@pytest.mark.parametrize("shape", [(0, 2, 1, 6), (2, 0, 1, 6), (2, 2, 1, 0)])
def test_an_empty_store_refuses_sizes_of_0_and_stays_empty(shape: tuple[int, ...]) -> None:
    store = LayerStore(CacheConfig("int8"))
    with pytest.raises(ValueError, match="batch, kv_heads and head_dim must be at least 1"):
        store.append(torch.zeros(shape), torch.zeros(shape))
    assert (store.length, store.shape, store.nbytes()) == (0, None, 0)


@some_setups
def test_no_tokens_are_no_change(setup: str) -> None:
    store = filled(config_of(setup, residual_length=3, sink_tokens=2), kv(150, **sizes(setup)))
    before = contents(store)
    assert store.append(*kv(0, **sizes(setup))) is None
    for a, b in zip(contents(store), before, strict=True):
        assert torch.equal(a, b)


# ---- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("residual", [0, 20])
@some_setups
def test_a_copy_equals_the_original_and_shares_nothing_with_it(
    setup: str, residual: int, way: Callable[[LayerStore], LayerStore]
) -> None:
    """Case 12."""
    config = config_of(setup, residual_length=residual, sink_tokens=3)
    pair = kv(150, **sizes(setup))
    more, other = (kv(20, seed=seed, growing=2.0, **sizes(setup)) for seed in (1, 2))
    store = filled(config, pair, [70])
    fresh = way(store)
    assert_same(fresh, store)
    assert fresh.nbytes() == store.nbytes()
    places = [
        {
            x.untyped_storage().data_ptr()
            for x in (*vectors(s), *(x for s in s.segments() for plane in s.planes() for x in plane.tensors()))
        }
        for s in (store, fresh)
    ]
    assert not places[0] & places[1]
    store.append(*more)
    fresh.append(*other)
    assert_same(store, filled(config, joined(pair, more)))
    assert_same(fresh, filled(config, joined(pair, other)))


@pytest.mark.parametrize("setup", ["int8 token", "int8 token equalized", "int4 group", "int4_rot group", "nf4 token"])
def test_single_tokens_of_changing_strides_are_stored_like_all_at_once(setup: str) -> None:
    """What a step keeps from the last one must not outlive the memory or the shape that it was made for."""
    config = config_of(setup)
    warm = LayerStore(config).warm
    pair = kv(warm + 40, batch=2, **sizes(setup))
    store, whole = filled(config, part(pair, 0, warm + 1)), filled(config, pair)
    for t in range(warm + 1, warm + 40):
        keys, values = part(pair, t, t + 1)
        if t % 3 == 1:
            keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
        if t % 5 == 2:
            values = values.repeat(1, 1, 2, 1)[:, :, :1]
        if t % 7 == 3:
            store.map_batch(lambda x: x.clone())
        if t % 11 == 5:
            store = copy.deepcopy(store)
        store.append(keys, values)
    assert_same(store, whole)
