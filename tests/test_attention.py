"""Attention over stored codes: every backend against the oracle, in every format, type and shape.

``attending.py`` says how much a result may be off.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from attending import (
    BACKENDS,
    SOME,
    Data,
    Shape,
    Wanted,
    assert_close,
    config_of,
    each_quantized_setup,
    each_setup,
    exact,
    f64,
    mixed,
    random_data,
    run,
    store_for,
    view_of,
)
from instruction_sets import INSTRUCTION_SETS, each_instruction_set
from setups import GROUP_TOKENS, SETUPS, fits

from qkv.config import CacheConfig
from qkv.storage import Run
from qkv.view import KVView

SHAPES = [
    Shape(2, 2, 3, 1, 1, 64, 64),
    Shape(1, 3, 3, 1, 15, 64, 64),
    Shape(3, 1, 8, 2, 16, 8, 8),
    Shape(1, 2, 7, 3, 17, 50, 50),
    Shape(2, 1, 1, 8, 255, 72, 72),
    Shape(1, 1, 3, 5, 256, 80, 80),
    Shape(1, 2, 1, 4, 257, 96, 96),
    Shape(1, 1, 8, 1, 1000, 128, 128),
    Shape(1, 1, 3, 1, 1000, 64, 64),
    Shape(1, 1, 7, 6, 300, 112, 112),
    Shape(1, 1, 2, 1, 257, 192, 128),  # values smaller than keys, as in DeepSeek's models
    Shape(2, 1, 4, 7, 33, 256, 256),
    Shape(1, 1, 2, 2, 40, 7, 19),
    Shape(1, 1, 1, 1, 20, 1, 1),
    Shape(2, 1, 5, 1, 31, 24, 24),
    Shape(1, 2, 2, 5, 32, 32, 96),
    Shape(1, 1, 71, 8, 33, 64, 64),  # one kv head for all, as in Falcon
    Shape(1, 2, 3, 20, 60, 64, 64),  # a prompt behind other tokens
    Shape(2, 1, 2, 30, 30, 16, 24),  # a whole prompt
    Shape(1, 1, 1, 600, 700, 8, 8),  # longer than a piece
]
# Head sizes that every format has, and groups of tokens that end in the middle of a block.
USUAL = [Shape(2, 2, 3, 1, 97, 64, 64), Shape(1, 1, 7, 6, 300, 96, 32), Shape(1, 2, 2, 4, 257, 128, 64)]


def assert_all_close(data: Data, view: KVView, **how: Any) -> None:
    """As :class:`Wanted`, of all backends."""
    wanted = Wanted(data, view, **how)
    for backend in BACKENDS:
        wanted.check(backend)


# ---- formats, types, shapes ----------------------------------------------------------------------------------------


@each_setup
def test_backends_equal_the_oracle_for_every_format_and_shape(name: str) -> None:
    """Two thirds of the shapes for each, others for its neighbours."""
    for seed, shape in enumerate(SHAPES):
        if (seed + list(SETUPS).index(name)) % 3 and fits(SETUPS[name], shape.key_dim, shape.value_dim):
            data = random_data(shape, seed=seed)
            assert_all_close(data, view_of(data, config_of(name)))


@each_setup
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backends_equal_the_oracle_in_every_type(dtype: torch.dtype, name: str) -> None:
    for shape in USUAL:
        data = random_data(shape, dtype)
        assert_all_close(data, view_of(data, config_of(name)))


# Every setup once for the keys and once for the values, by chance together.
PAIRS = list(zip(SETUPS, random.Random(1).sample(list(SETUPS), len(SETUPS)), strict=True))


@pytest.mark.parametrize(("key", "value"), PAIRS, ids=" with ".join)
def test_keys_and_values_may_have_different_formats(key: str, value: str) -> None:
    data = random_data(Shape(2, 2, 3, 2, 70, 64, 32))
    assert_all_close(data, view_of(data, mixed(key, value)))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["int8", "int4", "int3_rot", "nf4"])
@pytest.mark.parametrize("granularity", ["group", "channel"])
def test_groups_of_every_size_are_read(name: str, granularity: str, size: int) -> None:
    for shape in (Shape(1, 1, 3, 2, 257, 128, 128), Shape(2, 1, 1, 1, 1000, 128, 256)):
        data = random_data(shape)
        config = CacheConfig(name, granularity=granularity, group_size=size, equalize=False)
        assert_all_close(data, view_of(data, config))


@each_quantized_setup
def test_sinks_packed_segments_and_the_residual_window_share_one_softmax(name: str) -> None:
    """Of what is not exact the sums may be of rotated values: they are rotated back, and the exact ones are not."""
    data = random_data(Shape(2, 2, 3, 1, 600, 32, 64))
    data.keys[:, :, 400] *= 3  # starts a segment of its own with a scale per head
    for sink, residual in ((0, 0), (4, 0), (0, 30), (5, 33)):
        view = view_of(data, config_of(name, sink_tokens=sink, residual_length=residual))
        assert len(view.runs()) >= 3
        assert_all_close(data, view)


def test_queries_of_another_type_than_the_cache_are_served() -> None:
    for cache_type in (torch.float32, torch.bfloat16, torch.float16):
        for query_type in (torch.float32, torch.bfloat16, torch.float16):
            for options in SOME:
                data = random_data(Shape(1, 2, 2, 2, 80), cache_type)
                data = data._replace(query=data.query.to(query_type))
                view = view_of(data, CacheConfig(**options, residual_length=9))
                for backend in INSTRUCTION_SETS:
                    assert_close(backend, data, view)


@each_instruction_set
def test_strided_queries_are_served(isa: str) -> None:
    data = random_data(Shape(2, 2, 3, 4, 50))
    view = view_of(data, CacheConfig("int8", equalize=False))
    expected = run(isa, data.query, view)
    transposed = data.query.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.cat([data.query, data.query], dim=3)[..., :16]
    every_second = data.query.repeat_interleave(2, dim=3)[..., ::2]
    for query in (transposed, sliced, every_second):
        assert not query.is_contiguous()
        assert torch.equal(run(isa, query, view), expected)


@each_quantized_setup
def test_no_sum_of_products_overflows(name: str) -> None:
    """All numbers the largest of their vector, so that all products are as large as they can be."""
    for dim in (256, 517, 2048):
        if not fits(SETUPS[name], dim, dim):
            continue
        signs = torch.tensor([1.0, -1.0]).repeat(dim // 2 + 1)[:dim]
        tokens = torch.full((1, 1, 304, dim), 0.7) * signs
        tokens[:, :, 1::2] *= -1  # for those that share a scale over tokens
        query = torch.cat([signs, -signs]).view(1, 2, 1, dim)
        view = view_of(Data(query, tokens, tokens), config_of(name, equalize=False))
        seen = (torch.arange(304) % 2 == 0).view(1, 1, 1, 304)
        for isa, scale in itertools.product(INSTRUCTION_SETS, (dim**-0.5, 1e-4)):
            out = run(isa, query, view, softmax_scale=scale, mask=seen)
            wanted = exact(query, *view.decode(torch.float64), softmax_scale=scale, mask=seen)
            # Equal tokens have equal weights: what is left is the rounding of the weights to 16 bits.
            atol = float(np.abs(wanted).max()) * 2.0**-14
            np.testing.assert_allclose(f64(out), wanted, rtol=0, atol=atol, err_msg=f"{isa} {dim}")


@each_instruction_set
def test_the_default_device_of_torch_does_not_matter(isa: str) -> None:
    for options in SOME:
        data = random_data(Shape(1, 2, 2, 3, 50))
        view = view_of(data, CacheConfig(**options, residual_length=5))
        expected = run(isa, data.query, view)
        with torch.device("meta"):
            out = run(isa, data.query, view)
        assert torch.equal(out, expected)


@each_instruction_set
@pytest.mark.parametrize("options", [{"format": "none"}, *SOME], ids=lambda o: " ".join(map(str, o.values())))
def test_a_residual_window_that_rolls_is_read_where_it_is_now(isa: str, options: dict[str, Any]) -> None:
    """Its first token lies anywhere in its memory; those in front of it have left."""
    data = random_data(Shape(1, 2, 2, 1, 150, 24, 32))
    store = store_for(data, CacheConfig(**options, residual_length=30))
    for t in range(150):
        store.append(data.keys[:, :, t : t + 1], data.values[:, :, t : t + 1])
        so_far = Data(data.query, data.keys[:, :, : t + 1], data.values[:, :, : t + 1])
        # Only a window or a few tokens of each format: what quantization did to so few can be little by luck.
        for mask in (None, (torch.arange(t + 1) > t - 50).view(1, 1, 1, -1)):
            Wanted(so_far, KVView(store), hard=True, mask=mask).check(isa)


@each_setup
def test_the_first_tokens_of_a_run_can_be_hidden(name: str) -> None:
    """As sliding windows need it: tokens leave in front without a copy, whatever tile or group they are in."""
    shape, sink = Shape(2, 2, 3, 2, 300, 32, 64), 2
    chance = random.Random(name)
    for hidden in chance.sample([1, 15, 16, 17, 27, 100, 255, 256, 257, 285], 5):
        data = random_data(shape)
        # A token that is not finite spoils all that have their scale from it: those are hidden all.
        together = GROUP_TOKENS if "channel" in name else 1
        odd = hidden // together * together - 1
        if odd >= 0:
            data.keys[:, :, odd], data.values[:, :, odd, 3] = float("nan"), float("inf")
        seen = Data(data.query, data.keys[:, :, hidden:], data.values[:, :, hidden:])
        for mask in (None, torch.rand(2, 1, 2, 300 - hidden) < 0.5, torch.randn(2, 6, 2, 300 - hidden)):
            view = view_of(data, config_of(name, residual_length=10, sink_tokens=sink))
            runs, left = [], hidden
            for whole in view.runs():
                skip = min(left, whole.length)
                left -= skip
                if skip < whole.length:
                    runs.append(Run(whole.segment, whole.offset + skip, whole.length - skip))
            view._runs, view.length = runs, 300 - hidden
            wanted = Wanted(seen, view, hard=hidden > 280, mask=mask)  # few tokens are left of those that are not exact
            for isa in INSTRUCTION_SETS:
                wanted.check(isa)


@each_quantized_setup
def test_a_group_that_a_crop_has_cut_is_read_beside_the_next(name: str) -> None:
    """Per channel the tokens that are left keep their codes, and the next group begins behind them."""
    shape = Shape(2, 1, 3, 3, 200, 32, 64)
    data, more = random_data(shape), random_data(shape, seed=1)
    store = store_for(data, config_of(name, sink_tokens=1))
    store.append(data.keys, data.values)
    for length, n in ((150, 40), (171, 70), (70, 33)):
        store.crop(length)
        store.append(more.keys[:, :, :n], more.values[:, :, :n])
    if "channel" in name and "head" not in name:
        assert [segment.start for segment in store.packed] == [1, 70 % GROUP_TOKENS]
    keys, values = (
        torch.cat([x[:, :, :70], y[:, :, :33]], dim=2) for x, y in ((data.keys, more.keys), (data.values, more.values))
    )
    assert_all_close(Data(data.query, keys, values), KVView(store))
