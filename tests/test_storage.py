"""The store of one layer: what is in it depends on the tokens alone, and nothing in it changes once it is there."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import INSTRUCTION_SETS, using

from qkv.config import CacheConfig
from qkv.formats import formats
from qkv.head_scale import HEAD_ROOM, WARM_UP_TOKENS
from qkv.storage import SEGMENT_TOKENS, LayerStore
from qkv.view import KVView

QUANTIZED = [name for name in formats() if name != "none"]
each_format = pytest.mark.parametrize("name", QUANTIZED)
each_granularity = pytest.mark.parametrize("granularity", ["token", "head"])

Pair = tuple[torch.Tensor, torch.Tensor]


def kv(
    n: int, batch: int = 2, heads: int = 2, key_dim: int = 6, value_dim: int = 5, seed: int = 0, growing: float = 0.0
) -> Pair:
    """Keys and values of ``n`` tokens; with ``growing``, some tokens are larger by up to ten to that power."""
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for dim in (key_dim, value_dim):
        x = torch.randn(batch, heads, n, dim, generator=generator)
        power = torch.rand(batch, heads, n, 1, generator=generator) ** 8 * growing
        pair.append(x * 10.0**power)
    return pair[0], pair[1]


def part(pair: Pair, start: int, end: int) -> Pair:
    return pair[0][:, :, start:end], pair[1][:, :, start:end]


def filled(config: CacheConfig, pair: Pair, cuts: list[int] | None = None, **scales: torch.Tensor) -> LayerStore:
    """A store of the tokens, appended in the pieces that ``cuts`` make of them."""
    store = LayerStore(config, **scales)
    total = pair[0].shape[2]
    edges = [0, *sorted(min(c, total) for c in cuts or []), total]
    for start, end in pairwise(edges):
        store.append(*part(pair, start, end))
    return store


def stepwise(config: CacheConfig, pair: Pair, **scales: torch.Tensor) -> LayerStore:
    return filled(config, pair, list(range(1, pair[0].shape[2])), **scales)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, in which a NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def contents(store: LayerStore) -> list[torch.Tensor]:
    """Everything stored, as bit patterns by token: keys, their scales, values, their scales; and what is exact."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(5)]
    for run in store.runs():
        for side, plane in enumerate(run.segment.planes()):
            span = slice(run.offset, run.offset + run.length)
            exact = plane.format is None
            if exact:
                rows, scale = bits(plane.codes[:, :, span]).long(), torch.ones(*store.shape[:2], run.length)
            else:
                rows = plane.read_codes(run.offset, run.length).view(torch.uint8).long()
                scale = plane.read_scale(run.offset, run.length).float().expand(-1, -1, run.length)
            parts[2 * side].append(rows)
            parts[2 * side + 1].append(bits(scale))
            if side == 0:
                parts[4].append(torch.full((run.length,), exact))
    return [torch.cat(p, dim=0 if i == 4 else 2) for i, p in enumerate(parts)]


def assert_same(a: LayerStore, b: LayerStore) -> None:
    assert a.length == b.length
    for x, y in zip(contents(a), contents(b), strict=True):
        assert torch.equal(x, y)


def snapshot(store: LayerStore) -> dict[str, Any]:
    """Every byte and number of a store."""
    state: dict[str, Any] = {
        name: getattr(store, name) for name in ("length", "shape", "packed_length", "version", "changes", "_open")
    }
    for i, segment in enumerate(store.segments()):
        state[f"segment {i}"] = (segment.start, segment.length, segment.capacity)
        for j, plane in enumerate(segment.planes()):
            for k, tensor in enumerate(plane.tensors()):
                state[f"tensor {i} {j} {k}"] = (tensor.data_ptr(), bits(tensor).flatten().tolist())
    for name in ("_key_head", "_value_head"):
        scale = getattr(store, name)
        state[name] = None if scale is None or scale.current is None else scale.current.tolist()
    return state


def decoded(store: LayerStore) -> tuple[np.ndarray, np.ndarray]:
    keys, values = KVView(store).decode(torch.float64)
    return keys.numpy(), values.numpy()


def like(config: CacheConfig, **given_scales: torch.Tensor) -> oracle.Store:
    """The oracle's store of the same description."""
    names = (config.key_format or config.format, config.value_format or config.format)
    granularity = config.granularity or "token"
    scales = [given_scales.get(name) for name in ("key_scale", "value_scale")]
    return oracle.Store(
        tuple(None if name == "none" else name for name in names),
        (granularity, granularity),
        config.residual_length,
        config.sink_tokens,
        tuple(None if s is None else s.double().numpy() for s in scales),
    )


def configs(quantized: bool = True) -> st.SearchStrategy[CacheConfig]:
    names = st.sampled_from(QUANTIZED if quantized else list(formats()))
    return st.builds(
        CacheConfig,
        format=names,
        key_format=st.none() | st.sampled_from(list(formats())),
        granularity=st.sampled_from(["token", "head"]),
        residual_length=st.sampled_from([0, 0, 1, 5, 64, 80]),
        sink_tokens=st.sampled_from([0, 0, 1, 4, 70]),
        prefill=st.sampled_from(["stored", "exact"]),
    )


# ---- what is stored depends on the tokens alone --------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    config=configs(),
    n=st.sampled_from([1, 2, 63, 64, 65, 130, 256, 257, 300]),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    odd=st.lists(st.integers(0, 299), max_size=2),
    seed=st.integers(0, 99),
)
def test_one_pass_pieces_and_steps_store_the_same_bits(
    config: CacheConfig, n: int, cuts: list[int], odd: list[int], seed: int
) -> None:
    pair = kv(n, batch=1, key_dim=3, value_dim=4, seed=seed, growing=2.0)
    for t in odd:
        pair[t % 2][0, t % 2, min(t, n - 1), 1] = float("nan")
    whole = filled(config, pair)
    assert_same(filled(config, pair, cuts), whole)
    assert_same(stepwise(config, pair), whole)


@settings(max_examples=60, deadline=None)
@given(
    config=configs(quantized=False),
    n=st.sampled_from([1, 40, 64, 65, 90, 170]),
    cuts=st.lists(st.integers(0, 170), max_size=4),
    seed=st.integers(0, 99),
)
def test_what_is_stored_equals_the_oracle(config: CacheConfig, n: int, cuts: list[int], seed: int) -> None:
    pair = kv(n, batch=1, key_dim=3, value_dim=4, seed=seed, growing=2.0)
    expected = like(config)
    for t in range(n):
        expected.append(pair[0][:, :, t].double().numpy(), pair[1][:, :, t].double().numpy())
    for found, wanted in zip(decoded(filled(config, pair, cuts)), expected.now(), strict=True):
        np.testing.assert_array_equal(found, wanted)


@each_format
@each_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_without_compiled_kernels_the_same_bits_are_stored(name: str, granularity: str, dtype: torch.dtype) -> None:
    pair = tuple(x.to(dtype) for x in kv(150, growing=1.5))
    config = CacheConfig(name, granularity=granularity, residual_length=5, sink_tokens=3)
    with using("none"):
        expected = filled(config, pair, [7, 71, 90])
        numbers = decoded(expected)
    for isa in INSTRUCTION_SETS:
        with using(isa):
            store = filled(config, pair, [7, 71, 90])
            assert_same(store, expected)
            for a, b in zip(decoded(store), numbers, strict=True):
                np.testing.assert_array_equal(a, b)


@each_format
def test_keys_and_values_as_models_give_them_need_not_be_contiguous(name: str) -> None:
    keys, values = kv(40)
    config = CacheConfig(name, residual_length=3, sink_tokens=2)
    # A projection gives [batch, tokens, heads, dim], transposed.
    transposed = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    broadcast = (keys[:1].expand(2, -1, -1, -1), values[:1].expand(2, -1, -1, -1))
    wide = (torch.cat([keys, keys], dim=3)[..., :6], torch.cat([values, values], dim=3)[..., 5:])
    every_second = tuple(x.repeat_interleave(2, dim=3)[..., ::2] for x in (keys, values))
    assert not transposed[0].is_contiguous()
    assert_same(filled(config, transposed, [9]), filled(config, (keys, values), [9]))
    assert_same(filled(config, wide, [9]), filled(config, (keys, values), [9]))
    assert_same(filled(config, every_second, [9]), filled(config, (keys, values), [9]))
    assert_same(filled(config, broadcast, [9]), filled(config, tuple(x.contiguous() for x in broadcast), [9]))


def test_the_caller_may_change_its_tensors_after_append() -> None:
    keys, values = kv(30)
    store = filled(CacheConfig("int8", residual_length=8, sink_tokens=4), (keys, values))
    before = decoded(store)
    keys.zero_()
    values.zero_()
    for a, b in zip(decoded(store), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", [*INSTRUCTION_SETS, "none"])
@pytest.mark.parametrize("name", ["none", "int8"])
@each_granularity
def test_no_graph_of_gradients_is_kept(isa: str, name: str, granularity: str) -> None:
    keys, values = (x.requires_grad_() for x in kv(100, growing=2.0))
    config = CacheConfig(name, granularity=granularity, residual_length=5, sink_tokens=2)
    with using(isa):
        store = filled(config, (keys * 1, values * 1), [70])
        assert_same(copy.deepcopy(store), filled(config, (keys.detach(), values.detach())))
    assert not any(x.requires_grad for s in store.segments() for plane in s.planes() for x in plane.tensors())


# ---- what is exact -------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("residual", [1, 5, 64, 70])
@pytest.mark.parametrize("sink", [0, 4])
def test_the_first_and_the_last_tokens_are_exact_at_every_step_and_the_others_are_not(
    name: str, residual: int, sink: int
) -> None:
    """Case 4: the window moves with every token, it is never flushed."""
    pair = kv(200)
    store = LayerStore(CacheConfig(name, residual_length=residual, sink_tokens=sink))
    for t in range(200):
        store.append(*part(pair, t, t + 1))
        for found, x in zip(decoded(store), pair, strict=True):
            same = (torch.from_numpy(found) == x[:, :, : t + 1].double()).all(dim=-1).all(dim=0).all(dim=0)
            expected = torch.zeros(t + 1, dtype=torch.bool)
            expected[:sink] = True
            expected[max(0, t + 1 - residual) :] = True
            assert torch.equal(same, expected)


@each_format
def test_tokens_of_the_warm_up_are_exact_until_its_last_one_comes(name: str) -> None:
    pair = kv(80)
    store = LayerStore(CacheConfig(name, granularity="head", sink_tokens=3))
    for t in range(80):
        store.append(*part(pair, t, t + 1))
        exact = contents(store)[4]
        warm = t + 1 < 3 + WARM_UP_TOKENS
        assert exact.tolist() == [warm or j < 3 for j in range(t + 1)]


# ---- old codes never change ----------------------------------------------------------------------------------------


@each_format
@each_granularity
@pytest.mark.parametrize("residual", [0, 7])
def test_codes_once_written_are_never_written_again_and_full_segments_never_move(
    name: str, granularity: str, residual: int
) -> None:
    """Case 5: nothing is decoded and encoded again."""
    pair = kv(700, batch=1, key_dim=4, value_dim=4, growing=1.0)
    store = LayerStore(CacheConfig(name, granularity=granularity, residual_length=residual, sink_tokens=2))
    known: list[torch.Tensor] = []
    places: dict[int, list[int]] = {}
    for t in range(0, 700, 7):
        store.append(*part(pair, t, t + 7))
        now = contents(store)
        encoded = store.packed_length
        for before, after in zip(known, now, strict=False):
            assert torch.equal(after[:, :, 2 : 2 + before.shape[2]], before)
        known = [x[:, :, 2 : 2 + encoded].clone() for x in now[:4]]
        for i, segment in enumerate(store.packed[:-1]):  # all but the one that takes tokens
            place = [x.data_ptr() for plane in segment.planes() for x in plane.tensors()]
            assert places.setdefault(i, place) == place
    assert len(places) >= 2


@each_format
def test_with_a_scale_per_token_no_segment_ever_moves(name: str) -> None:
    pair = kv(600, batch=1, key_dim=4, value_dim=4)
    store = LayerStore(CacheConfig(name))
    places: dict[int, list[int]] = {}
    for t in range(0, 600, 3):
        store.append(*part(pair, t, t + 3))
        for i, segment in enumerate(store.packed):
            place = [x.data_ptr() for plane in segment.planes() for x in plane.tensors()]
            assert places.setdefault(i, place) == place
    assert len(places) == 5  # of 32, 64, 128 and then 256 tokens


# ---- scales per head -----------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("cuts", [[], [70], list(range(1, 200))], ids=["one pass", "prompt first", "steps"])
@pytest.mark.parametrize("factor", [1.2, 3.0, 1e4])
def test_later_larger_tokens_do_not_saturate(name: str, cuts: list[int], factor: float) -> None:
    """Case 2: the scale that the first tokens fixed must not clip those that come after."""
    keys, values = kv(200)
    keys[:, :, 100:] *= factor
    store = filled(CacheConfig(name, granularity="head"), (keys, values), cuts)
    found = torch.from_numpy(decoded(store)[0])
    step = {"int8": 1 / 254, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}[name]
    # A scale covers at most HEAD_ROOM times the largest magnitude so far: half of its step is the largest error.
    largest = keys.abs().amax(dim=(2, 3), keepdim=True).double()
    assert bool(((found - keys).abs() <= step * HEAD_ROOM * largest).all())
    tops = found.abs().amax(dim=(2, 3)) / keys.abs().amax(dim=(2, 3))
    assert bool((tops >= 1 - step * HEAD_ROOM).all())


@each_format
def test_a_scale_grows_with_head_room_and_only_for_the_heads_that_need_it(name: str) -> None:
    keys, values = kv(100, batch=1)
    keys[0, 1, 80] *= 50
    store = filled(CacheConfig(name, granularity="head"), (keys, values))
    before, after = store.packed[0].key.scale[0], store.packed[-1].key.scale[0]
    assert after[0] == before[0]
    largest = oracle.LARGEST[name]
    top = keys[0, 1, 80].abs().max().item()
    assert after[1].item() == pytest.approx(HEAD_ROOM * top / largest, rel=2.0**-22)  # two float32 roundings
    first = keys[0, :, :WARM_UP_TOKENS].abs().amax(dim=(1, 2)).double()
    assert before.double().tolist() == pytest.approx((HEAD_ROOM * first / largest).tolist(), rel=2.0**-22)
    assert torch.equal(store.packed[-1].value.scale, store.packed[0].value.scale)


@each_format
@each_granularity
@pytest.mark.parametrize("residual", [0, 9])
def test_after_reset_nothing_of_the_tokens_before_remains(name: str, granularity: str, residual: int) -> None:
    """Case 3: a warm-up pass with huge tokens, then reset."""
    config = CacheConfig(name, granularity=granularity, residual_length=residual, sink_tokens=2)
    warm_up, pair = kv(150, seed=1), kv(150, seed=2)
    store = filled(config, tuple(1e4 * x for x in warm_up), [80])
    store.reset()
    assert (store.length, store.shape, store.nbytes()) == (0, None, 0)
    for start in range(0, 150, 50):
        store.append(*part(pair, start, start + 50))
    assert_same(store, filled(config, pair))


def test_after_reset_another_batch_and_type_are_taken() -> None:
    store = filled(CacheConfig("int8", granularity="head"), kv(80))
    store.reset()
    other = tuple(x.bfloat16() for x in kv(70, batch=3, heads=1, key_dim=8, value_dim=8))
    store.append(*other)
    assert store.shape == (3, 1, 8, 8)
    assert_same(store, filled(CacheConfig("int8", granularity="head"), other))


@each_format
def test_given_scales_are_used_from_the_first_token_and_saturate(name: str) -> None:
    pair = kv(100)
    key_scale, value_scale = torch.tensor([0.01, 0.001]), torch.tensor([0.02, 0.5])
    store = stepwise(CacheConfig(name), pair, key_scale=key_scale, value_scale=value_scale)
    assert store.key_granularity == store.value_granularity == "head"
    assert not bool(contents(store)[4].any())
    for found, x, scale in zip(decoded(store), pair, (key_scale, value_scale), strict=True):
        limit = (scale * oracle.LARGEST[name]).double().view(1, 2, 1, 1)
        assert bool((torch.from_numpy(found).abs() <= limit * (1 + 2.0**-23)).all())  # the product is a float32
        for index in np.ndindex(x.shape[:3]):
            row = x[index].double().numpy()
            s = float(scale[index[1]])
            np.testing.assert_array_equal(found[index], oracle.decode(oracle.encode(row, s, name), s, name))


@each_format
def test_absurd_given_scales_change_what_is_stored(name: str) -> None:
    """Case 10: scales that are loaded are used."""
    pair = kv(100)
    usual = decoded(filled(CacheConfig(name, granularity="head"), pair))
    for size in (1e-6, 1e6):
        scale = torch.full((2,), size)
        absurd = decoded(filled(CacheConfig(name), pair, key_scale=scale, value_scale=scale))
        for a, b in zip(absurd, usual, strict=True):
            assert np.abs(a - b).max() > 1.0


def test_given_scales_survive_reset_and_stay_the_callers() -> None:
    pair, scale = kv(20), torch.tensor([0.01, 0.02])
    store = filled(CacheConfig("int8"), pair, key_scale=scale)
    first = contents(store)
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


@pytest.mark.parametrize(
    ("config", "scale", "message"),
    [
        (CacheConfig("int8", granularity="group"), None, "'int8' has no granularity 'group'; use one of token, head"),
        (
            CacheConfig("int8", granularity="token"),
            torch.ones(2),
            "static scales go with granularity 'head'",
        ),
        (CacheConfig("none"), torch.ones(2), "without scales"),
        (CacheConfig("int8", group_size=32), None, "group_size goes with"),
        (CacheConfig("int9"), None, "unknown format 'int9'; known formats: none, int8"),
    ],
    ids=["granularity", "static and token", "static and none", "group", "name"],
)
def test_descriptions_that_do_not_go_together_are_refused(
    config: CacheConfig, scale: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LayerStore(config, key_scale=scale)


# ---- not a number --------------------------------------------------------------------------------------------------


@each_format
@each_granularity
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 30, 63, 64, 99], ids=str)
def test_a_token_that_is_not_finite_is_nan_and_no_other_token_is_changed(
    name: str, granularity: str, odd: float, position: int
) -> None:
    keys, values = kv(100)
    # The largest of its head, so that it would fix the scale if it counted, is another token.
    keys[1, 0, 50, 0], values[1, 0, 50, 0] = 9.0, 9.0
    spoilt = (keys.clone(), values.clone())
    spoilt[0][1, 0, position, 2] = odd
    config = CacheConfig(name, granularity=granularity)
    clean, found = decoded(filled(config, (keys, values))), decoded(filled(config, spoilt))
    assert np.isnan(found[0][1, 0, position]).all()
    found[0][1, 0, position] = clean[0][1, 0, position]
    for a, b in zip(found, clean, strict=True):
        np.testing.assert_array_equal(a, b)


def test_in_the_exact_parts_a_number_that_is_not_finite_is_kept_as_it_is() -> None:
    keys, values = kv(30)
    keys[0, 0, 1, 0], keys[0, 0, 28, 1] = float("inf"), float("nan")
    found = decoded(filled(CacheConfig("int8", residual_length=4, sink_tokens=2), (keys, values)))[0]
    assert found[0, 0, 1, 0] == np.inf
    assert np.isnan(found[0, 0, 28]).tolist() == [False, True, False, False, False, False]


# ---- mixed formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", formats())
@pytest.mark.parametrize("value", formats())
@each_granularity
def test_keys_and_values_may_have_different_formats(key: str, value: str, granularity: str) -> None:
    config = CacheConfig("int8", key_format=key, value_format=value, granularity=granularity, residual_length=2)
    pair = kv(90, batch=1, growing=1.0)
    store = filled(config, pair, [30])
    expected = like(config)
    for t in range(90):
        expected.append(pair[0][:, :, t].double().numpy(), pair[1][:, :, t].double().numpy())
    for side, (found, wanted) in enumerate(zip(decoded(store), expected.now(), strict=True)):
        np.testing.assert_array_equal(found, wanted)
        if (key, value)[side] == "none":
            np.testing.assert_array_equal(found, pair[side].double().numpy())
    assert store.quantized == ((key, value) != ("none", "none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    pair = tuple(x.to(dtype) for x in kv(300))
    store = filled(CacheConfig("none", residual_length=3, sink_tokens=2), pair, [100, 101])
    for found, x in zip(KVView(store).decode(), pair, strict=True):
        assert found.dtype == dtype
        assert torch.equal(bits(found), bits(x))


# ---- memory --------------------------------------------------------------------------------------------------------


def spare_tokens(store: LayerStore) -> int:
    return sum(segment.capacity for segment in store.segments()) - store.length


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["int8", "none"]),
    granularity=st.sampled_from(["token", "head"]),
    residual=st.sampled_from([0, 1, 32, 100, 400]),
    sink=st.sampled_from([0, 4, 300, 1000]),
    first=st.integers(1, 5000),
    steps=st.integers(0, 200),
    crop=st.none() | st.integers(1, 5000),
)
def test_spare_room_is_at_most_256_tokens_or_an_eighth(
    name: str, granularity: str, residual: int, sink: int, first: int, steps: int, crop: int | None
) -> None:
    config = CacheConfig(name, granularity=granularity, residual_length=residual, sink_tokens=sink)
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
        CacheConfig("int8"),
        CacheConfig("fp8_e4m3", granularity="head"),
        CacheConfig("int8", residual_length=20, sink_tokens=4),
        CacheConfig("int8", key_format="none", granularity="head", residual_length=20),
        CacheConfig("none"),
    ],
    ids=["token", "head", "sinks and residual", "mixed", "none"],
)
def test_nbytes_is_what_the_tensors_hold(config: CacheConfig) -> None:
    """Case 17: everything is counted, spare room too."""
    store = filled(config, kv(700, growing=1.0), [100, 300])
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
    # Two full segments: but for the 64 bytes behind each plane that vector loads may touch, the memory is that too.
    assert store.nbytes() == bits_per_value / 8 * store.stored_values() + 2 * 2 * 64


@pytest.mark.parametrize(
    ("config", "key_bits", "value_bits", "exact"),
    [
        (CacheConfig("none"), 32.0, 32.0, 0),
        (CacheConfig("fp8_e5m2"), 8 + 16 / 8, 8 + 16 / 4, 0),
        (CacheConfig("int8", key_format="none"), 32.0, 8 + 16 / 4, 0),
        (CacheConfig("int8", residual_length=10, sink_tokens=6), 8 + 16 / 8, 8 + 16 / 4, 16),
    ],
    ids=["none", "fp8", "mixed", "sinks and residual"],
)
def test_stored_bits_count_codes_scales_sinks_and_residual(
    config: CacheConfig, key_bits: float, value_bits: float, exact: int
) -> None:
    store = filled(config, kv(100, key_dim=8, value_dim=4))
    heads = 2 * 2
    packed = 100 - exact
    expected = heads * packed * (8 * key_bits + 4 * value_bits) + heads * exact * (8 + 4) * 32
    assert store.stored_bits() == expected
    assert store.stored_values() == heads * 100 * (8 + 4)


def test_stored_bits_count_a_scale_per_head_once_for_each_segment() -> None:
    store = filled(CacheConfig("int8", granularity="head"), tuple(x.clamp(-1, 1) for x in kv(300)))
    assert len(store.packed) == 2
    heads = 2 * 2
    assert store.stored_bits() == heads * 300 * (6 + 5) * 8 + len(store.packed) * heads * 2 * 32


def test_a_growing_store_copies_nothing_old() -> None:
    """Decoding allocates a segment when one is full, of 256 tokens once the first are through, and nothing between."""
    store = LayerStore(CacheConfig("int8"))
    pair = kv(3 * SEGMENT_TOKENS, batch=1)
    versions = []
    for t in range(3 * SEGMENT_TOKENS):
        store.append(*part(pair, t, t + 1))
        versions.append(store.version)
    changes = [t for t in range(1, len(versions)) if versions[t] != versions[t - 1]]
    assert changes == [32, 96, 224, 224 + SEGMENT_TOKENS, 224 + 2 * SEGMENT_TOKENS]


def test_a_short_store_has_little_room_to_spare() -> None:
    sizes = [filled(CacheConfig("int8"), kv(n)).nbytes() for n in (16, 32, 64, 128, 256)]
    assert sizes[0] == sizes[1]
    # The 64 bytes behind each plane weigh most in the smallest.
    assert all(a < b < 2.1 * a for a, b in itertools.pairwise(sizes[1:]))


# ---- crop, and changes of the batch --------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("keep", [0, 1, 3, 4, 60, 255, 256, 257, 299, 300])
def test_crop_then_append_equals_never_having_seen_the_cropped_tokens(name: str, sink: int, keep: int) -> None:
    config = CacheConfig(name, sink_tokens=sink)
    pair, other = kv(300, growing=1.0), kv(100, seed=5, growing=1.0)
    store = filled(config, pair)
    store.crop(keep)
    assert store.length == keep
    store.append(*other)
    assert_same(
        store, filled(config, tuple(torch.cat([x[:, :, :keep], y], 2) for x, y in zip(pair, other, strict=True)))
    )


@each_format
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
    config = CacheConfig(name, granularity="head")
    store = filled(config, (keys, values), first)
    store.crop(keep)
    store.append(*other)
    joined = tuple(torch.cat([x[:, :, :keep], y], dim=2) for x, y in zip((keys, values), other, strict=True))
    assert_same(store, filled(config, joined))


@settings(max_examples=80, deadline=None)
@given(config=configs(quantized=False), data=st.data())
def test_any_sequence_of_operations_stores_what_the_oracle_says(config: CacheConfig, data: st.DataObject) -> None:
    store, expected = LayerStore(config), like(config)
    batch, seed = 2, 0
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["append", "append", "append", "crop", "select", "repeat", "reorder", "copy"]))
        if what == "append" or store.length == 0:
            n = data.draw(st.sampled_from([1, 1, 2, 8, 33, 70]))
            keys, values = kv(n, batch=batch, heads=1, key_dim=3, value_dim=2, seed=seed, growing=1.5)
            seed += 1
            store.append(keys, values)
            for t in range(n):
                expected.append(keys[:, :, t].double().numpy(), values[:, :, t].double().numpy())
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
        assert store.length == len(expected.tokens)
        for found, wanted in zip(decoded(store), expected.now(), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig("int8", residual_length=9, sink_tokens=4),
        CacheConfig("fp8_e4m3", granularity="head", sink_tokens=4),
        CacheConfig("int8", granularity="head", key_format="none", residual_length=70),
    ],
    ids=["token", "head", "mixed"],
)
def test_every_part_of_the_state_follows_the_batch(config: CacheConfig) -> None:
    """Case 6: sinks, packed segments, the residual window and the scales per head."""
    pair = kv(150, batch=3, growing=1.0)
    more = kv(30, batch=3, seed=3, growing=1.0)
    for function in (
        lambda x: x.index_select(0, torch.tensor([2, 0, 1])),  # beam search
        lambda x: x[torch.tensor([1]), ...],
        lambda x: x.repeat_interleave(2, dim=0),
    ):
        store = filled(config, pair, [70])
        store.map_batch(function)
        store.append(*(function(x) for x in more))
        # Each row alone: growth for one row of a batch starts a new segment for all, but changes no scale of another.
        joined = tuple(torch.cat([function(x), function(y)], dim=2) for x, y in zip(pair, more, strict=True))
        assert_same(store, filled(config, joined))
        assert store.shape[0] == joined[0].shape[0]


@pytest.mark.parametrize("rows", [[1], [0, 0, 1, 1], [1, 0]], ids=str)
def test_scales_per_head_follow_the_batch_also_where_a_later_crop_takes_them_back(rows: list[int]) -> None:
    keys, values = kv(120)
    keys[1, 0, 64, 0] = float("nan")  # its scale can only be that of the warm-up
    keys[:, :, 65] *= 30
    config, index = CacheConfig("int8", granularity="head"), torch.tensor(rows)
    store = filled(config, (keys, values))
    store.map_batch(lambda x: x[index])
    store.crop(65)
    more = tuple(x[index] for x in kv(20, seed=1))
    store.append(*more)
    joined = tuple(torch.cat([x[index][:, :, :65], y], dim=2) for x, y in zip((keys, values), more, strict=True))
    assert_same(store, filled(config, joined))


def test_a_batch_change_before_the_first_token_is_followed() -> None:
    store = LayerStore(CacheConfig("int8"))
    store.append(*kv(0))
    store.map_batch(lambda x: x.repeat_interleave(2, dim=0))
    store.append(*kv(3, batch=4))
    assert store.shape == (4, 2, 6, 5)


def test_a_batch_change_that_fails_changes_nothing() -> None:
    store = filled(CacheConfig("int8", granularity="head", residual_length=5, sink_tokens=2), kv(100))
    before = snapshot(store)
    with pytest.raises(IndexError):
        store.map_batch(lambda x: x[torch.tensor([7])])
    assert snapshot(store) == before


def test_what_was_cropped_is_not_kept_in_memory() -> None:
    store = filled(CacheConfig("int8"), kv(1000))
    store.crop(10)
    assert store.nbytes() == filled(CacheConfig("int8"), kv(256)).nbytes()  # the segment that the 10 are in


@pytest.mark.parametrize("length", [100, 101, 5000])
def test_cropping_to_the_length_or_more_changes_nothing(length: int) -> None:
    store = filled(CacheConfig("int8", residual_length=5), kv(100))
    before = snapshot(store)
    store.crop(length)
    assert snapshot(store) == before


def test_a_negative_length_is_refused() -> None:
    store = filled(CacheConfig("int8", residual_length=5, sink_tokens=2), kv(100))
    before = snapshot(store)
    with pytest.raises(ValueError, match="at least 0, not -3"):
        store.crop(-3)
    assert snapshot(store) == before


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["token", "head"])
@pytest.mark.parametrize("n", [20, 100])
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
    granularity: str, n: int, keys: torch.Tensor, values: torch.Tensor, message: str
) -> None:
    store = filled(CacheConfig("int8", granularity=granularity, residual_length=3, sink_tokens=2), kv(n))
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


def test_no_tokens_are_no_change() -> None:
    store = filled(CacheConfig("int8", residual_length=3, sink_tokens=2), kv(100))
    before = contents(store)
    assert store.append(*kv(0)) is None
    for a, b in zip(contents(store), before, strict=True):
        assert torch.equal(a, b)


# ---- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "config",
    [
        CacheConfig("int8", residual_length=5, sink_tokens=3),
        CacheConfig("fp8_e5m2", granularity="head"),
        CacheConfig("none", value_format="int8", granularity="head", residual_length=100),
    ],
    ids=["token", "head", "mixed"],
)
def test_a_copy_equals_the_original_and_shares_nothing_with_it(config: CacheConfig, way: Any) -> None:
    """Case 12."""
    pair, more, other = kv(120), kv(20, seed=1, growing=2.0), kv(20, seed=2, growing=2.0)
    store = filled(config, pair, [70])
    fresh = way(store)
    assert_same(fresh, store)
    assert fresh.nbytes() == store.nbytes()
    places = [
        {
            x.untyped_storage().data_ptr()
            for segment in s.segments()
            for plane in segment.planes()
            for x in plane.tensors()
        }
        for s in (store, fresh)
    ]
    assert not places[0] & places[1]
    store.append(*more)
    fresh.append(*other)
    assert_same(store, filled(config, tuple(torch.cat(x, dim=2) for x in zip(pair, more, strict=True))))
    assert_same(fresh, filled(config, tuple(torch.cat(x, dim=2) for x in zip(pair, other, strict=True))))


def test_single_tokens_of_changing_strides_are_stored_like_all_at_once() -> None:
    """What a step keeps from the last one must not outlive the memory or the shape that it was made for."""
    pair = kv(40, batch=2)
    store, whole = LayerStore(CacheConfig("int8")), filled(CacheConfig("int8"), pair)
    store.append(*part(pair, 0, 1))
    for t in range(1, 40):
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
