"""Attention under masks, softcap and sinks, in any combination and with any number of threads."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attending import (
    BACKENDS,
    SOME,
    Shape,
    Wanted,
    assert_close,
    each_backend,
    each_of_some,
    mixed,
    random_data,
    run,
    some_mask,
    view_of,
    with_infinities,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import INSTRUCTION_SETS
from setups import SETUPS, fits

from qkv.attention import attention, tiled
from qkv.attention.cpu import MAX_QUERIES
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize("kind", [None, "boolean", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sizes", [(300,), (70, 1, 130), (129, 2, 300), (200, 60, 60, 30)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"format": "int4"},
        {"format": "int8", "residual_length": 50},
        {"format": "k5v4"},
        {"format": "int4_rot", "sink_tokens": 4, "residual_length": 7},
    ],
    ids=str,
)
def test_a_long_prompt_of_which_some_tokens_are_seen_exactly_equals_the_short_way(
    options: dict[str, Any], sizes: tuple[int, ...], sinks: bool, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles and pieces, with what all queries see as stored apart, against one mask over stored and exact tokens."""
    data = random_data(Shape(2, 2, 3, sum(sizes), sum(sizes), 64, 64))
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1)) if sinks else None
    changes = {name: value for name, value in options.items() if name != "format"}
    store = LayerStore(replace(CacheConfig.of(options["format"]), **changes))
    done, late_passes = 0, 0
    for size in sizes:
        span = slice(done, done + size)
        view = KVView(store, store.append(data.keys[:, :, span], data.values[:, :, span]))
        query, done = data.query[:, :, span], done + size
        if size <= MAX_QUERIES:
            continue
        late_passes += view.late is not None
        mask = None if kind is None else padded_mask(kind, size, done)
        found = []
        for tile in (10**6, 64):
            monkeypatch.setattr(tiled, "TILE", tile)
            short = kind is None or (done > 2 * tile and size <= tile)
            assert tiled.serves_late(query, view, mask, True) == (tile == 64 and view.late is not None and short)
            found.append(attention(query, view, mask, sinks=logits))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=2e-6)
    assert late_passes


def padded_mask(kind: str, q_len: int, kv_len: int) -> torch.Tensor:
    """``[2, 1, q_len, kv_len]``: row 1 is padded in front, its first query sees nothing, and some see later tokens."""
    seen = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    seen[..., kv_len - 12 : kv_len - 6] |= torch.arange(q_len).unsqueeze(1) >= q_len - 12
    seen[1, :, :, :40] = False
    seen[1, :, 0] = False
    if kind == "boolean":
        return seen
    bias = torch.randn(2, 1, q_len, kv_len, generator=torch.Generator().manual_seed(2))
    return bias.masked_fill(~seen, -torch.inf)


# ---- masks, softcap, sinks, threads --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    shape=st.builds(
        Shape,
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 5, 7, 8]),
        q_len=st.integers(1, MAX_QUERIES),
        kv_len=st.sampled_from([1, 2, 15, 16, 17, 31, 64, 100, 255, 256, 257, 300]),
        key_dim=st.sampled_from([1, 3, 8, 16, 33, 64]),
        value_dim=st.sampled_from([1, 5, 8, 16, 33, 64]),
    ),
    key=st.sampled_from(list(SETUPS)),
    value=st.sampled_from(list(SETUPS)),
    group_size=st.sampled_from([16, 32, 64]),
    kind=st.sampled_from(["none", "left padding", "boolean", "additive", "lowest"]),
    softcap=st.sampled_from([None, 0.5, 3.0, 50.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_combination_of_setups_shape_mask_softcap_and_sinks_equals_the_oracle(
    data: st.DataObject,
    shape: Shape,
    key: str,
    value: str,
    group_size: int,
    kind: str,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    shape = shape._replace(q_len=min(shape.q_len, shape.kv_len))
    heads = shape.kv_heads * shape.group
    # The error that quantization makes in a few channels can be small by luck: at least 32 are looked at.
    shape = shape._replace(batch=max(shape.batch, math.ceil(32 / (shape.kv_heads * shape.value_dim))))
    if not fits(SETUPS[key], shape.key_dim, 64):
        shape = shape._replace(key_dim=64)
    if not fits(SETUPS[value], 64, shape.value_dim):
        shape = shape._replace(value_dim=64)
    inputs = random_data(shape, seed=seed)
    config = mixed(
        key,
        value,
        residual_length=data.draw(st.sampled_from([0, 0, 3, 40])),
        sink_tokens=data.draw(st.sampled_from([0, 0, 2])),
    )
    by_channel = [side for side in ("key", "value") if getattr(config, f"{side}_granularity") == "channel"]
    sizes = {f"{side}_group_size": group_size for side in by_channel}
    view = view_of(inputs, replace(config, **sizes))
    mask = some_mask(kind, shape, seed, torch.float32)
    logits = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if sinks else None
    how = {
        "mask": with_infinities(mask),
        "softmax_scale": data.draw(st.sampled_from([None, 0.01, 1.0])),
        "causal": data.draw(st.booleans()),
        "softcap": softcap,
        "sinks": logits,
    }
    # Of a few tokens all may be exact but one: what quantization did to so few can be little by luck.
    wanted = Wanted(inputs, view, hard=True, **how)
    # A row that sees nothing gives zeros, whatever says that it sees nothing; and nothing else does.
    nothing = torch.from_numpy((wanted.exact == 0).all(axis=-1))
    for backend in BACKENDS:
        out = run(backend, inputs.query, view, **{**how, "mask": mask})
        wanted.check(backend, out)
        assert bool((out[nothing] == 0).all())
        assert torch.equal(out, run(backend, inputs.query, view, **how))


@each_backend
@each_dtype
@pytest.mark.parametrize("options", [{"format": "none"}, *SOME], ids=lambda o: " ".join(map(str, o.values())))
def test_rows_that_see_nothing_give_zeros(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Case 15: a left-padded batch with grouped heads; the queries of the padding see nothing."""
    for q_len in (1, 4, 12):
        data = random_data(Shape(3, 2, 3, q_len, 40), dtype)
        view = view_of(data, CacheConfig(**options, residual_length=2))
        mask = torch.ones(3, 1, q_len, 40, dtype=torch.bool).tril(40 - q_len)
        mask[0, :, :, :34] = False
        mask[1] = False
        mask[2, :, 0] = False
        lowest = torch.zeros(mask.shape, dtype=dtype)
        blind = ~mask.any(dim=-1).transpose(1, 2).expand(3, q_len, 6)
        assert bool(blind.any())
        for how in (
            mask,
            lowest.masked_fill(~mask, -torch.inf),
            lowest.masked_fill(~mask, torch.finfo(dtype).min),
        ):
            for sinks in (None, torch.zeros(6)):
                out = run(backend, data.query, view, mask=how, sinks=sinks)
                assert bool(out.isfinite().all())
                assert bool((out[blind] == 0).all())
                assert bool((out[~blind] != 0).any(dim=-1).all())


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 3, 1, 3000, 64, 64),  # one head cut into several parts
        Shape(1, 2, 1, 2, 2100, 64, 64),  # a part that ends one head and begins the next
        Shape(3, 3, 2, 1, 900, 64, 64),
        Shape(5, 1, 8, 8, 300, 64, 64),
    ],
    ids=lambda s: "-".join(map(str, s)),
)
@each_of_some
@pytest.mark.usefixtures("keep_threads")
def test_the_number_of_threads_does_not_matter(options: dict[str, Any], shape: Shape) -> None:
    data = random_data(shape)
    view = view_of(data, CacheConfig(**options, sink_tokens=3, residual_length=40))
    mask = some_mask("left padding", shape, 3, torch.float32)
    sinks = torch.zeros(shape.kv_heads * shape.group)
    for wanted in (Wanted(data, view, mask=mask, sinks=sinks), Wanted(data, view)):
        for isa, threads in itertools.product(INSTRUCTION_SETS, (2, 5)):
            torch.set_num_threads(threads)
            wanted.check(isa)


@each_of_some
@pytest.mark.usefixtures("keep_threads")
def test_a_head_of_which_one_part_sees_nothing_is_merged_from_the_others(options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 1, 2, 1, 4000, 64, 64))
    view = view_of(data, CacheConfig(**options))
    for seen in (slice(0, 100), slice(3900, 4000), slice(1900, 2100)):
        mask = torch.zeros(1, 1, 1, 4000, dtype=torch.bool)
        mask[..., seen] = True
        wanted = Wanted(data, view, mask=mask)
        for isa, threads in itertools.product(INSTRUCTION_SETS, (1, 4)):
            torch.set_num_threads(threads)
            wanted.check(isa)


def test_a_mask_longer_than_the_cache_is_cut() -> None:
    data = random_data(Shape(2, 1, 2, 2, 30))
    view = view_of(data, CacheConfig("int8", equalize=False))
    mask = torch.rand(2, 1, 2, 50) < 0.7
    assert torch.equal(attention(data.query, view, mask), attention(data.query, view, mask[..., :30].contiguous()))


@each_backend
def test_more_queries_than_tokens_see_what_is_before_them(backend: str) -> None:
    data = random_data(Shape(1, 1, 2, 8, 5, 64, 64))
    for options in SOME:
        assert_close(backend, data, view_of(data, CacheConfig(**options)))


@each_backend
@pytest.mark.parametrize("q_len", [1, 20])
def test_an_empty_cache_gives_zeros(backend: str, q_len: int) -> None:
    data = random_data(Shape(2, 1, 2, q_len, 0))
    if backend in INSTRUCTION_SETS and q_len > MAX_QUERIES:
        backend = "reference"
    for options in SOME:
        view = view_of(data, CacheConfig(**options))
        for _ in range(2):
            out = run(backend, data.query, view, sinks=torch.zeros(2))
            assert out.shape == (2, q_len, 2, 16)
            assert not bool(out.any())
