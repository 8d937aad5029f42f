"""Attention over stored codes: every backend against the oracle on identical codes.

How much a result may be off, unless a test says otherwise, as root mean square over the output:

* Decoding followed by torch in bfloat16 and float16: twice the error of plain attention in that type, and eight units
  in the last place for when that was lucky. In float32, and of the kernel where nothing is quantized, likewise.
* Kernel over 8 bits: on top of that a twentieth of the error that quantization itself makes, which is that of exact
  attention over the stored numbers against exact attention over the given ones.
* Kernel over fewer bits: what it rounds (the query and the weights, to 16 bits) does not depend on the bits of codes,
  while the error of quantization doubles with every bit less. So it is a twentieth of ``2**(bits - 8)`` of it. Codes
  with a zero point do not lie around zero, and meet that rounding three times as large: three times as much.
* In bfloat16 and float16 the rounding of the output comes on top, which nobody can avoid.

On hard data, made to break it, a tenth of the error of quantization, whatever the bits. A quarter where quantization
leaves less than half of what attention says, so that its error cannot grow any more; and where one channel is huge in
queries and keys both, and keys have a scale per channel: it takes the bits of the others.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import INSTRUCTION_SETS, each_instruction_set, needs_kernels, using
from setups import GROUP_TOKENS, SETUPS, fits, format_of
from stores import like

from qkv import native
from qkv.attention import attention, choose, dense, reference, tiled
from qkv.attention.cpu import MAX_QUERIES, supports
from qkv.config import CacheConfig
from qkv.formats import get_format, register
from qkv.storage import LayerStore, Run
from qkv.view import KVView

QUANTIZED = [name for name in SETUPS if name != "none"]
each_setup = pytest.mark.parametrize("name", SETUPS)
each_quantized_setup = pytest.mark.parametrize("name", QUANTIZED)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Instruction sets of the kernel, and the backends that need none.
BACKENDS = [*INSTRUCTION_SETS, "dense", "reference"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Shape(NamedTuple):
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    q_len: int = 1
    kv_len: int = 40
    key_dim: int = 16
    value_dim: int = 16


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
# Three of everything: a format of 8 bits, one with zero points, rotated or not, a code book.
CHANNELS = {"key_format": "int4", "key_granularity": "channel", "key_group_size": GROUP_TOKENS, "equalize": False}
SOME: list[dict[str, Any]] = [
    {"format": "int8", "equalize": False},
    {"format": "int8", "granularity": "head", "equalize": True},
    {"format": "int4_rot", "key_format": "fp8_e4m3"},
    {"format": "int3_rot", **CHANNELS},
    {"format": "nf4", "key_format": "int5_rot", "key_granularity": "group", "equalize": True},
]
each_of_some = pytest.mark.parametrize("options", SOME, ids=lambda o: " ".join(map(str, o.values())))


class Data(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def random_data(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    return Data(
        normal(shape.batch, shape.kv_heads * shape.group, shape.q_len, shape.key_dim),
        normal(shape.batch, shape.kv_heads, shape.kv_len, shape.key_dim),
        normal(shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim),
    )


def store_for(data: Data, config: CacheConfig) -> LayerStore:
    """An empty store; where keys are to be equalized the vectors are given, so that it begins with the first token."""
    return LayerStore(config, **(vectors_for(data.keys) if config.equalize else {}))


def vectors_for(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """A centre and a multiplier of keys; of a few tokens, and not those that would be chosen."""
    heads, dim = keys.shape[1], keys.shape[3]
    multiplier = 10.0 ** (torch.rand(heads, dim, generator=torch.Generator().manual_seed(dim)) - 0.5)
    centre = keys.float().nan_to_num(0.0, 0.0, 0.0).mean(dim=(0, 2)) if keys.shape[2] else torch.ones(heads, dim)
    return {"key_centre": centre, "key_multiplier": multiplier}


def view_of(data: Data, config: CacheConfig) -> KVView:
    """A view of a store of the keys and values, without exact copies for early queries."""
    store = store_for(data, config)
    store.append(data.keys, data.values)
    return KVView(store)


def config_of(name: str, **more: Any) -> CacheConfig:
    return CacheConfig(**{**SETUPS[name], **more})


def f64(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    return x.numpy() if x.dtype == torch.bool else x.double().numpy()


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any) -> np.ndarray:
    """The oracle's attention."""
    tensors = {name: f64(x) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    return oracle.attention(f64(query), f64(keys), f64(values), **tensors)


def run(backend: str, query: torch.Tensor, view: KVView, **how: Any) -> torch.Tensor:
    """One backend's attention: an instruction set of the kernel, ``dense`` or ``reference``."""
    if backend == "dense":
        with using("none"):
            assert choose(query, view) == "dense"
            return attention(query, view, **how)
    if backend == "reference":
        return attention(query, view, backend="reference", **how)
    with using(backend):
        return attention(query, view, backend="cpu", **how)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def plain(data: Data, dtype: torch.dtype, **how: Any) -> np.ndarray:
    """Attention as a model computes it in one type: scores and weighted values in ``dtype``, softmax in float32."""
    group = data.query.shape[1] // data.keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (data.keys, data.values))
    scores = (data.query.to(dtype) @ keys.transpose(2, 3)).float()
    scale = how.get("softmax_scale") or data.keys.shape[3] ** -0.5
    scores *= scale
    if how.get("softcap") is not None:
        scores = torch.tanh(scores / how["softcap"]) * how["softcap"]
    q_len, kv_len = scores.shape[2:]
    mask = how.get("mask")
    if mask is None and how.get("causal", True):
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if how.get("sinks") is not None:
        column = how["sinks"].float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights.nan_to_num(0.0).to(dtype) @ values).transpose(1, 2).double().numpy()


class Wanted:
    """What attention over a view is to give, and how much a backend may be off."""

    def __init__(self, data: Data, view: KVView, hard: bool = False, **how: Any):
        self.data, self.view, self.how, self.hard = data, view, how, hard
        self.stored = Data(data.query, *view.decode(torch.float64))
        self.exact = exact(*self.stored, **how)
        self.quantization = rms(self.exact - exact(*data, **how))

    def allowed(self, backend: str, dtype: torch.dtype) -> float:
        if backend == "reference":
            # Double precision throughout: 1e-12 for another order of summation.
            return 1e-12 * float(np.abs(self.exact).max(initial=1.0))
        plain_type = dtype if backend == "dense" else torch.float32
        floor = 2 * rms(plain(self.stored, plain_type, **self.how) - self.exact)
        floor += 2.0**-20 * float(np.abs(self.exact).max(initial=0.0))
        return floor if plain_type != torch.float32 else floor + self.quantization * self.part()

    def part(self) -> float:
        """Of the error of quantization, that a kernel may make."""
        store = self.view.store
        used = [format for format in (store.key_format, store.value_format) if format is not None]
        if self.hard:
            query, keys = (x.abs().amax(dim=(0, 1, 2)) for x in (self.data.query, self.data.keys))
            huge = (query > 20 * query.median()) & (keys > 20 * keys.median())
            taken = bool(huge.any()) and store.key_granularity == "channel"
            return 1 / 4 if taken or self.quantization > rms(self.exact) / 2 else 1 / 10
        if not used:
            return 0.0
        return min(2.0 ** (f.bits - 8) for f in used) / 20 * (3 if any(f.offset for f in used) else 1)

    def check(self, backend: str, out: torch.Tensor | None = None) -> None:
        """The backend's result is as near to the oracle's as the top of this file says."""
        if out is None:
            out = run(backend, self.data.query, self.view, **self.how)
        assert out.dtype == self.data.query.dtype
        assert out.is_contiguous()
        assert out.shape == self.exact.shape
        error = rms(f64(out) - self.exact)
        rounding = rms(f64(torch.from_numpy(self.exact).to(out.dtype)) - self.exact)
        if backend in INSTRUCTION_SETS and self.data.query.shape[2] > MAX_QUERIES:
            backend = "dense"  # which served
        allowed = rounding * (1 + 1e-6) + self.allowed(backend, out.dtype)
        told = f"{backend}: off by {error:.3g}, not {allowed:.3g}; quantization {self.quantization:.3g}"
        assert error <= allowed, told


def assert_close(backend: str, data: Data, view: KVView, **how: Any) -> None:
    Wanted(data, view, **how).check(backend)


def assert_all_close(data: Data, view: KVView, **how: Any) -> None:
    """As :class:`Wanted`, of all backends."""
    wanted = Wanted(data, view, **how)
    for backend in BACKENDS:
        wanted.check(backend)


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


def mixed(key: str, value: str, **more: Any) -> CacheConfig:
    """Keys as one setup says, values as another."""
    keys, values = SETUPS[key], SETUPS[value]
    return CacheConfig(
        "none",
        key_format=keys["format"],
        value_format=values["format"],
        key_granularity=keys.get("granularity"),
        value_granularity=values.get("granularity"),
        key_group_size=keys.get("group_size"),
        value_group_size=values.get("group_size"),
        equalize=keys.get("equalize"),
        **more,
    )


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


# ---- masks, softcap, sinks, threads --------------------------------------------------------------------------------


def some_mask(kind: str, shape: Shape, seed: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of one kind; every dimension that can be broadcast sometimes is."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    heads = shape.kv_heads * shape.group
    size = [n if bool(torch.rand(1, generator=generator) < 0.5) else 1 for n in (shape.batch, heads, shape.q_len)]
    position = torch.arange(shape.kv_len)
    if kind == "left padding":
        pad = torch.randint(0, shape.kv_len + 1, (shape.batch,), generator=generator)
        rows = torch.arange(shape.kv_len - shape.q_len, shape.kv_len).view(1, 1, -1, 1)
        return (position >= pad.view(-1, 1, 1, 1)) & (position <= rows)
    seen = torch.rand(*size, shape.kv_len, generator=generator) < 0.6
    seen[:, :, -1:] &= torch.rand(1, generator=generator) < 0.5  # sometimes a row that sees nothing
    if kind == "boolean":
        return seen
    added = torch.randn(*size, shape.kv_len, generator=generator).to(dtype)
    lowest = -torch.inf if kind == "additive" else torch.finfo(dtype).min
    return added.masked_fill(~seen, lowest)


def with_infinities(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask with the lowest number of its type, which stands for not seen, as -inf."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, -torch.inf)


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


# ---- hard data -----------------------------------------------------------------------------------------------------


def hard_data(kind: str, dtype: torch.dtype) -> tuple[Data, dict[str, Any]]:
    """Data of one kind for one query of three heads over 600 tokens, and further arguments of attention."""
    data = random_data(Shape(1, 2, 3, 1, 600, 64, 64), seed=len(kind))
    generator = torch.Generator().manual_seed(1)
    query, keys, values = data
    how: dict[str, Any] = {}
    if kind == "huge key channels":  # case 1: a bias of the key projection, as in Qwen2.5
        keys[..., 5] += 300.0
        keys[..., 40] -= 120.0
    elif kind == "huge key channels that differ by token":
        keys[..., 5] *= 200.0
        keys[..., 40] *= 50.0
    elif kind == "huge query channel":
        query[..., 7] *= 100.0
    elif kind == "huge query channel where keys are small":
        query[..., 7] *= 300.0
        keys[..., 7] /= 300.0
    elif kind == "huge channels of query and keys":
        query[..., 7] *= 100.0
        keys[..., 7] += 300.0
    elif kind == "value scales that vary by 1e4":
        values *= 10.0 ** (4 * torch.rand(*values.shape[:3], 1, generator=generator) - 2)
    elif kind == "key scales that vary by 1e4":
        keys *= 10.0 ** (4 * torch.rand(*keys.shape[:3], 1, generator=generator) - 3.5)
    elif kind == "a first token with nearly all the weight and a tiny value":
        keys[:, :, 0] = 4 * query.view(1, 2, 3, 64).mean(dim=2)
        query += 2 * keys[:, :, :1].repeat_interleave(3, dim=1) / 4
        values[:, :, 0] *= 1e-3
    elif kind == "a huge value without weight":
        values[:, :, 17] *= 1e4
        how["mask"] = torch.ones(1, 1, 1, 600, dtype=torch.bool)
        how["mask"][..., 17] = False
    elif kind == "a huge value with little weight":
        values[:, :, 17] *= 1e4
        keys[:, :, 17] = -1.5 * query.view(1, 2, 3, 64).mean(dim=2)
    elif kind == "very peaked":
        query *= 8.0
    elif kind == "very flat":
        query *= 1e-3
    elif kind == "a large softmax scale":
        how["softmax_scale"] = 20.0
    elif kind == "a small softmax scale":
        how["softmax_scale"] = 1e-6
    elif kind == "a negative softmax scale":
        how["softmax_scale"] = -0.3
    elif kind == "small numbers":
        query, keys, values = query * 1e-4, keys * 1e-4, values * 1e-4
        how["softmax_scale"] = 1e7
    elif kind == "tiny numbers":
        query, keys, values = query * 1e-15, keys * 1e-15, values * 1e-25
        how["softmax_scale"] = 1e29
    elif kind == "huge numbers":
        query, keys, values = query * 1e12, keys * 1e12, values * 1e30
        how["softmax_scale"] = 1e-25
    elif kind == "one channel alone":
        values[..., 1:] = 0.0
        keys[..., 1:] = 0.0
    elif kind == "equal tokens":
        keys, values = keys[:, :, :1].expand_as(keys), values[:, :, :1].expand_as(values)
    elif kind == "a group of huge key channels where the query is small":
        keys[..., 32:] *= 1e3
        query[..., 32:] /= 1e3
    elif kind == "a group of huge query channels where keys are small":
        query[..., 32:] *= 300.0
        keys[..., 32:] /= 300.0
    elif kind == "values of some tokens huge and with little weight":
        keys[:, :, 64:128] = 0.1 * keys[:, :, 64:128] - 1.5 * query.view(1, 2, 3, 64).mean(dim=2, keepdim=True)
        values[:, :, 64:128] *= 1e3
    elif kind == "value channels that vary by 1e4":
        values *= 10.0 ** (4 * torch.rand(64, generator=generator) - 2)
    elif kind == "values far from zero":
        values += 30.0 * torch.randn(64, generator=generator)
    elif kind == "scores that rise":
        keys += 0.1 * torch.arange(600).view(1, 1, -1, 1) * query.view(1, 2, 3, 64).mean(dim=2, keepdim=True) / 10
    return Data(query.to(dtype), keys.to(dtype).contiguous(), values.to(dtype).contiguous()), how


HARD = [
    "huge key channels",
    "huge key channels that differ by token",
    "huge query channel",
    "huge query channel where keys are small",
    "huge channels of query and keys",
    "value scales that vary by 1e4",
    "key scales that vary by 1e4",
    "a first token with nearly all the weight and a tiny value",
    "a huge value without weight",
    "a huge value with little weight",
    "very peaked",
    "very flat",
    "a large softmax scale",
    "a small softmax scale",
    "a negative softmax scale",
    "small numbers",
    "tiny numbers",
    "huge numbers",
    "one channel alone",
    "equal tokens",
    "a group of huge key channels where the query is small",
    "a group of huge query channels where keys are small",
    "values of some tokens huge and with little weight",
    "value channels that vary by 1e4",
    "values far from zero",
    "scores that rise",
]


@pytest.mark.parametrize("kind", HARD)
def test_on_hard_data_the_error_of_the_kernel_stays_far_below_that_of_quantization(kind: str) -> None:
    half = [pair for pair in enumerate(SETUPS) if pair[0] % 2 == HARD.index(kind) % 2]
    for index, name in [*half, (2, "int8 channel"), (0, "int4 group"), (1, "int4 channel")]:
        dtype = torch.float32 if (index + len(kind)) % 4 < 2 else torch.bfloat16
        data, how = hard_data(kind, dtype)
        wanted = Wanted(data, view_of(data, config_of(name, residual_length=index % 3 * 20)), hard=True, **how)
        for isa in INSTRUCTION_SETS:
            wanted.check(isa)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_on_hard_data_the_other_backends_equal_the_oracle_too(backend: str, kind: str) -> None:
    data, how = hard_data(kind, torch.float32)
    for options in ({"format": "none"}, *SOME):
        assert_close(backend, data, view_of(data, CacheConfig(**options)), hard=True, **how)


def with_huge_channels(factor: float) -> Data:
    """Keys of which two channels are huge in every token, as a large bias of the key projection makes them."""
    data = random_data(Shape(1, 2, 3, 1, 600, 64, 64))
    data.keys.mul_(4)
    data.keys[..., 5] += 150.0 * factor
    data.keys[..., 40] -= 100.0 * factor
    return data


def lost(data: Data, **options: Any) -> float:
    """The part of what attention says that storing keys and values changes."""
    store = LayerStore(CacheConfig(**options))
    store.append(data.keys, data.values)
    wanted = exact(*data)
    return rms(exact(data.query, *KVView(store).decode(torch.float64)) - wanted) / rms(wanted)


def test_int8_survives_keys_with_a_few_huge_constant_channels() -> None:
    """Case 1: with a scale per token and head not even half of what attention says is lost; equalized, a little."""
    assert lost(with_huge_channels(1), format="int8", equalize=False) < 0.5
    for factor in (0.0, 1.0, 1000.0):
        assert lost(with_huge_channels(factor), format="int8") < 0.03


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_scale_per_channel_and_zero_points_survive_keys_with_a_few_huge_constant_channels(bits: int) -> None:
    """Case 1: such keys lose as little as others do; with a scale per token or group they lose all that they say."""

    def with_keys(data: Data, **options: Any) -> float:
        return lost(data, format="none", key_format=f"int{bits}", **options)

    usual, huge = with_huge_channels(0.0), with_huge_channels(1.0)
    assert with_keys(huge, granularity="channel") < 2 * with_keys(usual, granularity="channel")
    assert with_keys(huge, granularity="channel") < 0.5 * with_keys(huge, granularity="token")
    assert with_keys(huge, equalize=True) < 2 * with_keys(usual, equalize=True)


# ---- not a number --------------------------------------------------------------------------------------------------


def spoilt_channels(view: KVView, options: dict[str, Any], channel: int, dim: int) -> set[int]:
    """The channels of a value that one channel that is not finite makes not-a-number."""
    format, scaling = format_of(options, "value"), view.store.scalings[1]
    assert format is not None
    assert scaling is not None

    def whole(channels: set[int], size: int) -> set[int]:
        return {first + i for first in {c // size * size for c in channels} for i in range(size)}

    # A rotation mixes the channels of its block, on the way in and on the way out.
    block = dim & -dim if format.rotated else 1
    size = {"group": scaling.group, "channel": 1}.get(scaling.granularity, dim)
    return whole(whole(whole({channel}, block), size), block)


@each_setup
def test_a_number_that_is_not_finite_shows_in_the_rows_that_attend_to_it_and_in_no_other(name: str) -> None:
    """A key in the whole row, a value in the channels that share its scale; per channel, all tokens of the group do."""
    shape, channel = Shape(2, 2, 3, 5, 80, 32, 96), 40
    chance = random.Random(name)
    for side, position, sink in itertools.product(("keys", "values"), (10, 78, 0), (0, 2)):
        odd = chance.choice([math.nan, math.inf, -math.inf])
        kind = chance.choice(["causal", "boolean", "additive", "lowest"])
        config = config_of(name, sink_tokens=sink)
        clean, data = random_data(shape), random_data(shape)
        getattr(data, side)[1, 0, position, channel if side == "values" else 3] = odd
        views = []
        for x in (clean, data):
            store = store_for(clean, config)
            store.append(x.keys, x.values)
            views.append(KVView(store))
        # Exact tokens stay as they are; of what is encoded together all or nothing is a number.
        kept = name == "none" or position < sink or position >= sink + store.packed_length
        together = GROUP_TOKENS if "channel" in name and not kept else 1
        start = position // together * together
        span = slice(max(start, sink if not kept else 0), start + together)
        seen = torch.ones(2, 1, 5, 80, dtype=torch.bool).tril(75)
        if kind != "causal":
            seen[:, :, 1] = False  # a row that sees nothing
            seen[:, :, 2, position] = False
            seen[:, :, 3, span] = False
        mask = {
            "causal": None,
            "boolean": seen,
            "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
            "lowest": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
        }[kind]
        attends = torch.zeros(2, 5, 6, dtype=torch.bool)
        attends[1, :, :3] = seen[1, 0, :, span].any(dim=-1).unsqueeze(1)
        # The same numbers, but for the order of summation; a scale per head may be smaller without the token.
        atol = 0.02 if "head" in name else 1e-5
        for backend in BACKENDS:
            expected, out = (run(backend, clean.query, view, mask=mask) for view in views)
            torch.testing.assert_close(out[~attends], expected[~attends], rtol=1e-5, atol=atol, msg=backend)
            if side == "values":
                shows = {channel} if kept else spoilt_channels(views[1], SETUPS[name], channel, 96)
                wanted = torch.tensor([c in shows for c in range(96)])
                assert torch.equal(~out[attends].isfinite(), wanted.expand(int(attends.sum()), 96)), backend
            elif math.isnan(odd) or not kept:
                assert bool(out[attends].isnan().all()), backend
            # What is left is an infinite key: the sign of the query's channel says whether it has all weight or none.


@each_backend
@each_of_some
def test_a_query_that_is_not_finite_spoils_its_own_row_only(backend: str, options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 2, 2, 3, 50, 32, 32))
    view = view_of(data, CacheConfig(**options, residual_length=4))
    expected = run(backend, data.query, view)
    query = data.query.clone()
    query[0, 1, 2, 5] = float("nan")
    out = run(backend, query, view)
    assert bool(out[0, 2, 1].isnan().all())
    out[0, 2, 1] = expected[0, 2, 1]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# ---- passes of several tokens --------------------------------------------------------------------------------------


def pass_over(config: CacheConfig, data: Data, before: int, n: int) -> KVView:
    """A view as attention gets it in a pass over the ``n`` tokens behind the first ``before``."""
    store = LayerStore(config)
    if before:
        store.append(data.keys[:, :, :before], data.values[:, :, :before])
    late = store.append(data.keys[:, :, before : before + n], data.values[:, :, before : before + n])
    return KVView(store, late)


def one_by_one(
    config: CacheConfig, data: Data, before: int, n: int, mask: torch.Tensor | None = None, whole: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """What each query of the pass would have got had its tokens come one at a time, and without quantization.

    With ``whole`` the tokens of the pass see each other exactly (``prefill="exact"``).
    """
    store = like(config)
    keys, values = f64(data.keys), f64(data.values)
    for t in range(before):
        store.append(keys[:, :, t], values[:, :, t])
    encoded_before = [t.codes is not None for t in store.tokens]
    rows, unquantized = [], []
    for i in range(n):
        t = before + i
        store.append(keys[:, :, t], values[:, :, t])
        seen = store.now()
        if whole:
            visible = [x.now if j < before and encoded_before[j] else x.exact for j, x in enumerate(store.tokens)]
            seen = tuple(np.stack([x[side] for x in visible], axis=2) for side in (0, 1))
        part = None if mask is None else f64(mask[:, :, i : i + 1, : t + 1])
        query = f64(data.query[:, :, i : i + 1])
        rows.append(oracle.attention(query, *seen, mask=part))
        unquantized.append(oracle.attention(query, keys[:, :, : t + 1], values[:, :, : t + 1], mask=part))
    return np.concatenate(rows, axis=1), np.concatenate(unquantized, axis=1)


PASSES = [(0, 8), (0, 30), (0, 64), (0, 70), (60, 8), (62, 3), (63, 2), (40, 40), (70, 8), (100, 20), (5, 90)]
# Where the vectors of equalized keys come: with the 128th token, behind the sinks.
LONG_PASSES = [(0, 140), (120, 8), (125, 5), (127, 1), (128, 8), (60, 80), (131, 4)]
PLAIN = CacheConfig("int8", equalize=False)
WAYS: dict[str, CacheConfig] = {
    "token": PLAIN,
    "residual": replace(PLAIN, residual_length=5),
    "fp8 residual sinks": CacheConfig("fp8_e4m3", residual_length=3, sink_tokens=4),
    "head": replace(PLAIN, granularity="head"),
    "head residual sinks": replace(PLAIN, granularity="head", residual_length=6, sink_tokens=2),
    "head long residual": replace(PLAIN, granularity="head", residual_length=80),
    "mixed": CacheConfig("none", value_format="int8", residual_length=5),
    "group": CacheConfig("int4_rot", granularity="group", equalize=False),
    "channel": CacheConfig("int4", granularity="channel", group_size=16, equalize=False),
    "channel residual sinks": CacheConfig("int4_rot", **CHANNELS, residual_length=5, sink_tokens=3),
    "channels of two sizes": CacheConfig(
        "int3", granularity="channel", key_group_size=32, value_group_size=16, equalize=False, residual_length=20
    ),
    "equalized": CacheConfig("int8"),
    "equalized residual sinks": CacheConfig("int8", residual_length=6, sink_tokens=3),
    "equalized channel": CacheConfig("int8", **{**CHANNELS, "equalize": True}, residual_length=2),
}


@pytest.mark.parametrize(
    ("way", "before", "n"),
    [(way, *sizes) for way in WAYS for sizes in (LONG_PASSES if "equalized" in way else PASSES)],
    ids=str,
)
def test_a_pass_of_several_tokens_equals_single_steps(way: str, before: int, n: int) -> None:
    """Case 11: every query sees what it would have seen one token at a time."""
    config = WAYS[way]
    data = random_data(Shape(1, 1, 2, n, before + n, 12, 10))
    if before + n > 66:
        data.keys[0, 0, 66] *= 4  # a scale per head grows here
    view = pass_over(config, data, before, n)
    wanted, unquantized = one_by_one(config, data, before, n)
    allowed = rms(wanted - unquantized) / 20 + 1e-6  # the second for passes in which nothing is encoded: float32
    for backend in BACKENDS:
        if backend in INSTRUCTION_SETS and n > MAX_QUERIES:
            continue
        assert rms(f64(run(backend, data.query, view)) - wanted) <= allowed


@pytest.mark.parametrize("n", [6, 40])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("way", ["residual", "channel residual sinks"])
def test_a_pass_of_several_tokens_equals_single_steps_under_left_padding(n: int, kind: str, way: str) -> None:
    before = 70
    config = replace(WAYS[way], sink_tokens=2)
    data = random_data(Shape(2, 1, 2, n, before + n, 12, 10))
    seen = torch.ones(2, 1, n, before + n, dtype=torch.bool).tril(before)
    seen[1, :, :, :72] = False  # the first queries of this row see nothing
    mask = seen if kind == "boolean" else torch.randn(2, 1, n, before + n).masked_fill(~seen, -torch.inf)
    view = pass_over(config, data, before, n)
    wanted, unquantized = one_by_one(config, data, before, n, mask)
    for backend in BACKENDS:
        if backend in INSTRUCTION_SETS and n > MAX_QUERIES:
            continue
        out = run(backend, data.query, view, mask=mask)
        assert rms(f64(out) - wanted) <= rms(wanted - unquantized) / 20
        assert not bool(out[1, :2].any())


@pytest.mark.parametrize("way", ["residual", "channel residual sinks"])
def test_a_pass_of_more_queries_than_a_piece_equals_single_steps(way: str) -> None:
    n = dense.PIECE + 60
    data = random_data(Shape(1, 1, 1, n, n, 8, 8))
    out = attention(data.query, pass_over(WAYS[way], data, 0, n))
    wanted, unquantized = one_by_one(WAYS[way], data, 0, n)
    assert rms(f64(out) - wanted) <= rms(wanted - unquantized) / 20


@pytest.mark.parametrize("sink", [0, 3])
def test_of_a_long_prompt_no_more_than_the_warm_up_is_kept_exact_beside_its_codes(sink: int) -> None:
    """Case 14: the queries behind it see what is stored, and need no copies."""
    data = random_data(Shape(1, 1, 1, 1, 900, 32, 32))
    store = LayerStore(CacheConfig("int8", sink_tokens=sink))
    late = store.append(data.keys[:, :, :600], data.values[:, :, :600])
    assert late is not None
    assert (late.first, late.segment.length) == (sink, 128)
    assert store.append(data.keys[:, :, 600:], data.values[:, :, 600:]) is None


@pytest.mark.parametrize("way", ["equalized", "residual", "channel residual sinks"])
@pytest.mark.parametrize(("before", "n"), [(0, 150), (125, 8), (100, 60)], ids=str)
def test_a_pass_in_which_tokens_see_later_ones_is_the_same_with_every_backend(way: str, before: int, n: int) -> None:
    """As the tokens of an image do, which see each other in both directions."""
    data = random_data(Shape(1, 1, 2, n, before + n, 32, 32))
    view = pass_over(WAYS[way], data, before, n)
    mask = torch.ones(1, 1, n, before + n, dtype=torch.bool).tril(before)
    mask[..., before : before + 6] = True
    wanted = run("reference", data.query, view, mask=mask)
    for backend in BACKENDS:
        if backend not in INSTRUCTION_SETS or n <= MAX_QUERIES:
            torch.testing.assert_close(run(backend, data.query, view, mask=mask), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("before", "n"), [(0, 8), (0, 70), (30, 8), (70, 4), (50, 40), (120, 40)], ids=str)
@pytest.mark.parametrize("way", ["token", "head", "channel", "equalized"])
@pytest.mark.parametrize(("residual", "sink"), [(0, 0), (5, 0), (3, 4)], ids=str)
def test_with_exact_prefill_the_tokens_of_a_pass_see_each_other_unquantized(
    before: int, n: int, way: str, residual: int, sink: int
) -> None:
    config = replace(WAYS[way], residual_length=residual, sink_tokens=sink, prefill="exact")
    data = random_data(Shape(2, 1, 2, n, before + n, 12, 10))
    view = pass_over(config, data, before, n)
    wanted, _ = one_by_one(config, data, before, n, whole=True)
    for backend in BACKENDS:
        if backend in INSTRUCTION_SETS and n > MAX_QUERIES:
            continue
        # int8 quantization alone is off by 5e-3, int4 by 5e-2: this is a hundredth of it.
        assert rms(f64(run(backend, data.query, view)) - wanted) <= (5e-4 if way == "channel" else 5e-5)
    if before == 0:
        full = exact(data.query, data.keys, data.values)
        assert rms(wanted - full) == 0


@each_of_some
def test_a_single_step_behind_an_exact_prefill_sees_what_is_stored(options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 1, 1, 1, 165, 32, 32))
    view = pass_over(CacheConfig(**options, prefill="exact"), data, 164, 1)
    assert view.late is None
    assert not view.runs_changed
    stored = exact(data.query, *view.decode(torch.float64))
    assert rms(stored - exact(*data)) > 1e-4
    assert rms(f64(attention(data.query, view)) - stored) <= rms(stored - exact(*data)) / 20


@pytest.mark.parametrize("way", ["head", "channel", "channel residual sinks", "equalized", "equalized channel"])
def test_after_crop_into_the_warm_up_or_a_group_a_pass_equals_single_steps(way: str) -> None:
    """What was encoded stays so; where it was a warm-up it is over, and a new group begins."""
    stored = 180 if "equalized" in way else 80
    data = random_data(Shape(1, 1, 1, 24, 220, 32, 32))
    results = []
    for sizes in ([24], [8, 16], [1] * 24):
        store = LayerStore(WAYS[way])
        store.append(data.keys[:, :, :stored], data.values[:, :, :stored])
        store.crop(20)
        rows, at = [], 0
        for n in sizes:
            span = slice(stored + at, stored + at + n)
            late = store.append(data.keys[:, :, span], data.values[:, :, span])
            rows.append(attention(data.query[:, :, at : at + n], KVView(store, late), backend="reference"))
            at += n
        results.append(torch.cat(rows, dim=1))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-6, atol=1e-7)


# ---- keys that are equalized ---------------------------------------------------------------------------------------


@each_quantized_setup
def test_equalized_keys_meet_a_query_that_is_folded_alike(name: str) -> None:
    """With centres far from zero, with learned sinks and a softcap, beside sinks that are stored exactly."""
    options = {**SETUPS[name], "equalize": None, "sink_tokens": 3}
    generator = torch.Generator().manual_seed(4)
    multiplier = 10.0 ** (2 * torch.rand(2, 64, generator=generator) - 1)
    centre = 30 * torch.randn(2, 64, generator=generator)
    softcap, sinks = {"softcap": 5.0}, {"sinks": torch.randn(6, generator=generator)}
    hows: list[dict[str, Any]] = [{}, softcap, sinks, {**softcap, **sinks}]
    for which, how, dtype in zip(
        [("multiplier",), ("centre",), ("multiplier", "centre"), ("centre", "multiplier")],
        random.Random(name).sample(hows, 4),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        strict=True,
    ):
        data = random_data(Shape(2, 2, 3, 2, 150, 64, 32), dtype)
        vectors, keys, query = {}, data.keys.float(), data.query.float()
        if "multiplier" in which:
            keys, query = keys * multiplier.unsqueeze(1), query / multiplier.repeat_interleave(3, dim=0).unsqueeze(1)
            vectors["key_multiplier"] = multiplier
        if "centre" in which:
            keys = keys + centre.unsqueeze(1)
            vectors["key_centre"] = centre
        data = Data(query.to(dtype), keys.to(dtype), data.values)
        store = LayerStore(CacheConfig(**options), **vectors)
        store.append(data.keys, data.values)
        wanted = Wanted(data, KVView(store), hard=True, **how)
        assert wanted.quantization > 0
        for backend in BACKENDS:
            wanted.check(backend)


@each_quantized_setup
def test_what_equalized_keys_decode_to_lies_as_near_to_them_as_without(name: str) -> None:
    data = random_data(Shape(1, 2, 3, 1, 160, 64, 64))
    errors = []
    for equalize in (False, True):
        store = LayerStore(config_of(name, equalize=equalize))
        store.append(data.keys, data.values)
        errors.append(rms(f64(KVView(store).decode(torch.float64)[0] - data.keys.double())))
    assert 0 < errors[1] < 1.5 * errors[0]


@each_backend
def test_vectors_that_keys_are_equalized_by_leave_exact_copies_of_a_pass_alone(backend: str) -> None:
    data = random_data(Shape(1, 1, 2, 6, 50, 8, 8))
    store = LayerStore(
        CacheConfig("int8", residual_length=6),
        key_multiplier=torch.full((1, 8), 2.0),
        key_centre=torch.full((1, 8), 0.5),
    )
    store.append(data.keys[:, :, :44], data.values[:, :, :44])
    late = store.append(data.keys[:, :, 44:], data.values[:, :, 44:])
    view = KVView(store, late)
    assert view.late is not None
    outs = [run(which, data.query, view) for which in (backend, "reference")]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-3)
    exact_rows = exact(*data)
    assert rms(f64(outs[0]) - exact_rows) < 0.02


# ---- which backend serves, and what is refused ---------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("change", ["append", "crop and append", "batch", "reset"])
def test_a_view_is_refused_once_its_layer_was_updated(backend: str, change: str) -> None:
    data = random_data(Shape(2, 1, 2, 1, 30))
    view = view_of(data, CacheConfig("int8", equalize=False))
    run(backend, data.query, view)
    store = view.store
    token = (data.keys[:, :, :1], data.values[:, :, :1])
    if change == "append":
        store.append(*token)
    elif change == "crop and append":  # the length is the same again
        store.crop(29)
        store.append(*token)
    elif change == "batch":
        store.map_batch(lambda x: x.flip(0))
    else:
        store.reset()
        store.append(data.keys.flip(2), data.values)
    with pytest.raises(RuntimeError, match="out of date"):
        run(backend, data.query, view)
    with pytest.raises(RuntimeError, match="out of date"):
        view.decode()
    outs = [run(which, data.query, KVView(store)) for which in (backend, "reference")]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-3)  # any other token would make more


@each_instruction_set
def test_the_kernel_reads_what_is_stored_now_after_every_kind_of_change(isa: str) -> None:
    """The addresses of segments are kept between steps: none may be out of date."""
    shape = Shape(2, 1, 2, 1, 600)
    for config in (
        CacheConfig("int8", equalize=False),
        CacheConfig("int8", residual_length=20, sink_tokens=4),
        CacheConfig("int8", granularity="head"),
        CacheConfig("none", sink_tokens=70),
        CacheConfig("int4", **CHANNELS, value_format="int4_rot"),
        CacheConfig("int4", granularity="channel", residual_length=9),
        CacheConfig("int6_rot", equalize=True),
    ):
        store = LayerStore(config)

        def check(store: LayerStore = store) -> None:
            query = random_data(shape, seed=9).query[: store.shape[0]]
            out = run(isa, query, KVView(store))
            # Far below the difference that any other token would make, above what the kernel's rounding does.
            torch.testing.assert_close(out, attention(query, KVView(store), backend="reference"), rtol=0, atol=1e-3)

        for round_ in range(3):
            data = random_data(shape, seed=round_)
            for start, end in ((0, 3), (3, 4), (4, 80), (80, 81), (81, 82), (82, 400)):
                store.append(data.keys[:, :, start:end], data.values[:, :, start:end])
                check()
            store.crop(90)
            check()
            store.append(data.keys[:, :, 500:505], data.values[:, :, 500:505])
            check()
            store.map_batch(lambda x: x.flip(0))
            check()
            store.crop(1)
            check()
            store.append(data.keys[:, :, 400:600], data.values[:, :, 400:600])
            check()
            store.map_batch(lambda x: x[:1])
            check()
            store.reset()


@needs_kernels
def test_auto_takes_the_kernel_for_up_to_eight_queries_and_decodes_for_more() -> None:
    for q_len, served in ((1, "cpu"), (MAX_QUERIES, "cpu"), (MAX_QUERIES + 1, "dense")):
        data = random_data(Shape(1, 1, 2, q_len, 20))
        view = view_of(data, CacheConfig("int8", equalize=False))
        told: list[str] = []
        view.on_served = told.append
        assert choose(data.query, view) == choose(data.query, view, "cpu") == served
        attention(data.query, view)
        attention(data.query, view, backend="reference")
        assert told == [served, "reference"]


def test_without_kernels_auto_decodes_and_cpu_is_refused_with_the_reason() -> None:
    data = random_data(Shape())
    view = view_of(data, CacheConfig("int8", equalize=False))
    with using("none"):
        assert choose(data.query, view) == "dense"
        assert choose(data.query, view, "reference") == "reference"
        with pytest.raises(ValueError, match="backend 'cpu' cannot be used: switched off by a test"):
            attention(data.query, view, backend="cpu")


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones() -> None:
    data = random_data(Shape())
    with pytest.raises(ValueError, match="unknown backend 'gpu'; use one of auto, cpu, triton, reference"):
        attention(data.query, view_of(data, CacheConfig("int8", equalize=False)), backend="gpu")


def test_types_that_the_kernel_does_not_know_are_decoded() -> None:
    data = random_data(Shape(1, 1, 2, 2, 30), torch.float64)
    view = view_of(data, CacheConfig("int8", equalize=False))
    assert choose(data.query, view) == "dense"
    assert "float64" in str(supports(data.query, view))
    wanted = exact(data.query, *view.decode(torch.float64))
    assert rms(f64(attention(data.query, view)) - wanted) < 1e-12
    assert reference.supports(data.query, view) is None


def test_a_format_that_the_kernel_does_not_know_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["qkv.formats"]  # the attribute `qkv.formats` is the function
    monkeypatch.setattr(module, "_table", dict(module._table))
    kind = type(get_format("int8"))
    register(type("Other", (kind,), {"name": "other", "native_id": None}))
    data = random_data(Shape(2, 1, 2, 2, 70))
    view = view_of(data, CacheConfig("other", residual_length=3, granularity="head"))
    assert choose(data.query, view) == "dense"
    assert "other" in str(supports(data.query, view))
    assert_close("dense", data, view)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"query": torch.zeros(2, 4, 16)}, r"query must be \[batch=2, a multiple of 2 heads, q_len, head_dim=16\]"),
        ({"query": torch.zeros(1, 4, 2, 16)}, "query must be"),
        ({"query": torch.zeros(2, 3, 2, 16)}, "query must be"),
        ({"query": torch.zeros(2, 4, 2, 8)}, "query must be"),
        ({"mask": torch.ones(2, 30).bool()}, r"mask must be \[batch=2 or 1, heads=4 or 1, q_len=2, kv_len=30\]"),
        ({"mask": torch.ones(1, 1, 2, 29).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 1, 3, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(3, 1, 2, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 2, 2, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 1, 2, 30).long()}, "mask must be boolean, or additive and floating point"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[q_heads=4\], not \[2\]"),
        ({"sinks": torch.zeros(4, 1)}, "sinks must be"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(backend: str, how: dict[str, Any], message: str) -> None:
    data = random_data(Shape(2, 2, 2, 2, 30))
    view = view_of(data, CacheConfig("int8", equalize=False))
    with pytest.raises(ValueError, match=message):
        attention(**{"query": data.query, "view": view, "backend": backend, **how})


def test_a_layer_that_holds_nothing_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="the cache layer is empty"):
        attention(torch.zeros(1, 1, 1, 16), KVView(LayerStore(CacheConfig("int8"))))


OFF = """
import sys, warnings, torch
warnings.simplefilter("error")
from qkv import native
from qkv.attention import attention, choose
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView
assert native.library() is None and "QKV_KERNELS=off" in native.status(), native.status()
results = {}
for name, (options, query, keys, values) in torch.load(sys.argv[1]).items():
    store = LayerStore(CacheConfig(**options))
    store.append(keys, values)
    view = KVView(store)
    assert choose(query, view) == "dense"
    results[name] = attention(query, view), *view.decode()
torch.save(results, sys.argv[2])
"""


def test_without_the_compiled_library_the_results_are_the_same(tmp_path: Path) -> None:
    """The same codes, and the same numbers out of them, bit for bit."""
    cases = {}
    for seed, (name, options) in enumerate(SETUPS.items()):
        more = {"residual_length": 3, "sink_tokens": 2}
        cases[name] = {**options, **more}, *random_data(Shape(2, 2, 3, 2, 140, 64, 96), seed=seed)
    torch.save(cases, tmp_path / "cases.pt")
    command = [sys.executable, "-c", OFF, str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(command, env={**os.environ, "QKV_KERNELS": "off"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    for name, (options, *inputs) in cases.items():
        data, store = Data(*inputs), LayerStore(CacheConfig(**options))
        store.append(data.keys, data.values)
        view = KVView(store)
        out, keys, values = results[name]
        for a, b in zip((keys, values), view.decode(), strict=True):
            assert torch.equal(a, b), name
        wanted = Wanted(data, view)
        assert name == "none" or wanted.quantization > 0
        wanted.check("dense", out)
        wanted.check("portable", attention(data.query, view))


@needs_kernels
def test_an_instruction_set_that_is_not_there_is_refused_and_the_choice_stays() -> None:
    before = native.status()
    with pytest.raises(ValueError, match=f"kernels for 'neon' cannot be used here; in use: {before}"):
        native.select("neon")
    assert native.status() == before


@needs_kernels
@pytest.mark.parametrize("wanted", ["portable", "nonsense"])
def test_the_environment_chooses_the_instruction_set(wanted: str) -> None:
    code = "from qkv import native; print(native.library() is not None, native.status())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "QKV_KERNELS": wanted},
        capture_output=True,
        text=True,
    )
    expected = {
        "portable": "True portable",
        "nonsense": "False QKV_KERNELS=nonsense: this build or processor has no such",
    }
    assert done.stdout.startswith(expected[wanted])
