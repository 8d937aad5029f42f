"""Attention over stored codes: every backend against the oracle on identical codes.

How much a result may be off, unless a test says otherwise, as root mean square over the output:

* Kernel, and decoding followed by torch in float32: a twentieth of the error that quantization itself makes, which is
  that of exact attention over the stored numbers against exact attention over the given ones. Where nothing is
  quantized: twice the error of plain float32 attention, and eight units in the last place for when that was lucky.
* Decoding followed by torch in bfloat16 and float16: twice the error of plain attention in that type, likewise.
* In bfloat16 and float16 the rounding of the output comes on top, which nobody can avoid.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import INSTRUCTION_SETS, each_instruction_set, needs_kernels, using

from qkv import native
from qkv.attention import attention, choose, dense, reference
from qkv.attention.cpu import MAX_QUERIES, supports
from qkv.config import CacheConfig
from qkv.formats import formats, get_format, register
from qkv.head_scale import WARM_UP_TOKENS
from qkv.storage import LayerStore, Run
from qkv.view import KVView

QUANTIZED = [name for name in formats() if name != "none"]
each_format = pytest.mark.parametrize("name", QUANTIZED)
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
    Shape(1, 1, 71, 8, 33, 64, 64),  # one kv head for all, as in Falcon
    Shape(1, 2, 3, 20, 60, 64, 64),  # a prompt behind other tokens
    Shape(2, 1, 2, 30, 30, 16, 24),  # a whole prompt
    Shape(1, 1, 1, 600, 700, 8, 8),  # longer than a piece
]


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


def view_of(data: Data, config: CacheConfig) -> KVView:
    """A view of a store of the keys and values, without exact copies for early queries."""
    store = LayerStore(config)
    store.append(data.keys, data.values)
    return KVView(store)


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


def assert_close(backend: str, data: Data, view: KVView, **how: Any) -> None:
    """The backend's result is as near to the oracle's as the top of this file says."""
    out = run(backend, data.query, view, **how)
    assert out.dtype == data.query.dtype
    assert out.is_contiguous()
    stored = Data(data.query, *view.decode(torch.float64))
    wanted, unquantized = exact(*stored, **how), exact(*data, **how)
    assert out.shape == wanted.shape
    error = rms(f64(out) - wanted)
    rounding = rms(f64(torch.from_numpy(wanted).to(out.dtype)) - wanted)
    if backend in INSTRUCTION_SETS and data.query.shape[2] > MAX_QUERIES:
        backend = "dense"  # which served
    if backend == "reference":
        # Double precision throughout: only the rounding of the output, and 1e-12 for another order of summation.
        assert error <= rounding * (1 + 1e-6) + 1e-12 * np.abs(wanted).max(initial=1.0)
        return
    plain_type = out.dtype if backend == "dense" else torch.float32
    allowed = 2 * rms(plain(stored, plain_type, **how) - wanted) + 2.0**-20 * np.abs(wanted).max(initial=0.0)
    quantization = rms(wanted - unquantized)
    if quantization > 0 and plain_type == torch.float32:
        allowed = quantization / 20
    assert error <= allowed + rounding


# ---- formats, types, shapes ----------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_backends_equal_the_oracle_for_every_format_and_shape(backend: str, shape: Shape) -> None:
    for seed, name in enumerate(formats()):
        data = random_data(shape, seed=seed)
        assert_close(backend, data, view_of(data, CacheConfig(name)))


@each_backend
@each_dtype
@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[8], SHAPES[14]], ids=lambda s: "-".join(map(str, s)))
def test_backends_equal_the_oracle_in_every_type(backend: str, dtype: torch.dtype, name: str, shape: Shape) -> None:
    data = random_data(shape, dtype)
    assert_close(backend, data, view_of(data, CacheConfig(name)))


@each_backend
@pytest.mark.parametrize("key", formats())
@pytest.mark.parametrize("value", formats())
def test_keys_and_values_may_have_different_formats(backend: str, key: str, value: str) -> None:
    data = random_data(Shape(2, 2, 3, 2, 70, 24, 40))
    assert_close(backend, data, view_of(data, CacheConfig("int8", key_format=key, value_format=value)))


@each_backend
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("granularity", ["token", "head"])
@pytest.mark.parametrize(("sink", "residual"), [(0, 0), (4, 0), (0, 30), (5, 33)], ids=str)
def test_sinks_packed_segments_and_the_residual_window_share_one_softmax(
    backend: str, name: str, granularity: str, sink: int, residual: int
) -> None:
    data = random_data(Shape(2, 2, 3, 1, 600, 24, 40))
    data.keys[:, :, 400] *= 3  # starts a segment of its own with a scale per head
    config = CacheConfig(name, granularity=granularity, sink_tokens=sink, residual_length=residual)
    view = view_of(data, config)
    assert len(view.runs()) >= 3
    assert_close(backend, data, view)


def test_queries_of_another_type_than_the_cache_are_served() -> None:
    for cache_type in (torch.float32, torch.bfloat16, torch.float16):
        for query_type in (torch.float32, torch.bfloat16, torch.float16):
            data = random_data(Shape(1, 2, 2, 2, 50), cache_type)
            data = data._replace(query=data.query.to(query_type))
            view = view_of(data, CacheConfig("int8", residual_length=9))
            for backend in INSTRUCTION_SETS:
                assert_close(backend, data, view)


@each_instruction_set
def test_strided_queries_are_served(isa: str) -> None:
    data = random_data(Shape(2, 2, 3, 4, 50))
    view = view_of(data, CacheConfig("int8"))
    expected = run(isa, data.query, view)
    transposed = data.query.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.cat([data.query, data.query], dim=3)[..., :16]
    every_second = data.query.repeat_interleave(2, dim=3)[..., ::2]
    for query in (transposed, sliced, every_second):
        assert not query.is_contiguous()
        assert torch.equal(run(isa, query, view), expected)


@each_instruction_set
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dim", [64, 256, 516, 517, 1000, 2048])
def test_no_sum_of_products_overflows(isa: str, name: str, dim: int) -> None:
    """All numbers the largest of their vector, so that all products are as large as they can be."""
    signs = torch.tensor([1.0, -1.0]).repeat(dim // 2 + 1)[:dim]
    tokens = torch.full((1, 1, 300, dim), 0.7) * signs
    query = torch.cat([signs, -signs]).view(1, 2, 1, dim)
    view = view_of(Data(query, tokens, tokens), CacheConfig(name))
    for scale in (dim**-0.5, 1e-4):
        out = run(isa, query, view, softmax_scale=scale)
        wanted = exact(query, *view.decode(torch.float64), softmax_scale=scale)
        # Equal tokens have equal weights: what is left is the rounding of the weights to 16 bits.
        np.testing.assert_allclose(f64(out), wanted, rtol=2.0**-14)


@each_instruction_set
def test_the_default_device_of_torch_does_not_matter(isa: str) -> None:
    data = random_data(Shape(1, 2, 2, 3, 50))
    view = view_of(data, CacheConfig("int8", residual_length=5))
    expected = run(isa, data.query, view)
    with torch.device("meta"):
        out = run(isa, data.query, view)
    assert torch.equal(out, expected)


@each_instruction_set
@pytest.mark.parametrize("name", ["none", "int8", "fp8_e4m3"])
def test_a_residual_window_that_rolls_is_read_where_it_is_now(isa: str, name: str) -> None:
    """Its first token lies anywhere in its memory; those in front of it have left."""
    data = random_data(Shape(1, 2, 2, 1, 150, 24, 32))
    store = LayerStore(CacheConfig(name, residual_length=30))
    for t in range(150):
        store.append(data.keys[:, :, t : t + 1], data.values[:, :, t : t + 1])
        so_far = Data(data.query, data.keys[:, :, : t + 1], data.values[:, :, : t + 1])
        assert_close(isa, so_far, KVView(store))
        assert_close(isa, so_far, KVView(store), mask=(torch.arange(t + 1) > t - 50).view(1, 1, 1, -1))


@each_instruction_set
@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("hidden", [1, 15, 16, 17, 100, 255, 256, 257, 299])
def test_the_first_tokens_of_a_run_can_be_hidden(isa: str, name: str, hidden: int) -> None:
    """As sliding windows need it: tokens leave in front without a copy, whatever the tile they are in."""
    shape = Shape(2, 2, 3, 2, 300, 24, 10)
    data = random_data(shape)
    data.keys[:, :, hidden - 1], data.values[:, :, hidden - 1, 3] = float("nan"), float("inf")
    config = CacheConfig(name, residual_length=10, sink_tokens=2)
    seen = Data(data.query, data.keys[:, :, hidden:], data.values[:, :, hidden:])
    for mask in (None, torch.rand(2, 1, 2, 300 - hidden) < 0.5, torch.randn(2, 6, 2, 300 - hidden)):
        view = view_of(data, config)
        runs, left = [], hidden
        for whole in view.runs():
            skip = min(left, whole.length)
            left -= skip
            if skip < whole.length:
                runs.append(Run(whole.segment, whole.offset + skip, whole.length - skip))
        view._runs, view.length = runs, 300 - hidden
        assert_close(isa, seen, view, mask=mask)


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


@each_backend
@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    shape=st.builds(
        Shape,
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 5, 7, 8]),
        q_len=st.integers(1, 9),
        kv_len=st.sampled_from([1, 2, 15, 16, 17, 31, 64, 100, 255, 256, 257, 300]),
        key_dim=st.sampled_from([1, 3, 8, 16, 33, 64]),
        value_dim=st.sampled_from([1, 5, 8, 16, 33, 64]),
    ),
    name=st.sampled_from(list(formats())),
    granularity=st.sampled_from(["token", "head"]),
    kind=st.sampled_from(["none", "left padding", "boolean", "additive", "lowest"]),
    softcap=st.sampled_from([None, 0.5, 3.0, 50.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_combination_of_shape_mask_softcap_and_sinks_equals_the_oracle(
    backend: str,
    data: st.DataObject,
    shape: Shape,
    name: str,
    granularity: str,
    kind: str,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    shape = shape._replace(q_len=min(shape.q_len, shape.kv_len))
    if backend not in ("dense", "reference"):
        shape = shape._replace(q_len=min(shape.q_len, MAX_QUERIES))
    heads = shape.kv_heads * shape.group
    # The error that quantization makes in a few channels can be small by luck: at least 32 are looked at.
    shape = shape._replace(batch=max(shape.batch, math.ceil(32 / (shape.kv_heads * shape.value_dim))))
    inputs = random_data(shape, seed=seed)
    config = CacheConfig(
        name,
        granularity=granularity,
        residual_length=data.draw(st.sampled_from([0, 0, 3, 40])),
        sink_tokens=data.draw(st.sampled_from([0, 0, 2])),
    )
    view = view_of(inputs, config)
    mask = some_mask(kind, shape, seed, torch.float32)
    logits = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if sinks else None
    how = {
        "mask": with_infinities(mask),
        "softmax_scale": data.draw(st.sampled_from([None, 0.01, 1.0])),
        "causal": data.draw(st.booleans()),
        "softcap": softcap,
        "sinks": logits,
    }
    assert_close(backend, inputs, view, **how)
    out = run(backend, inputs.query, view, **{**how, "mask": mask})
    wanted = exact(inputs.query, *view.decode(torch.float64), **how)
    # A row that sees nothing gives zeros, whatever says that it sees nothing; and nothing else does.
    nothing = (wanted == 0).all(axis=-1)
    assert bool((out[torch.from_numpy(nothing)] == 0).all())
    assert torch.equal(out, run(backend, inputs.query, view, **how))


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["none", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("q_len", [1, 4, 12])
def test_rows_that_see_nothing_give_zeros(backend: str, dtype: torch.dtype, name: str, q_len: int) -> None:
    """Case 15: a left-padded batch with grouped heads; the queries of the padding see nothing."""
    data = random_data(Shape(3, 2, 3, q_len, 20), dtype)
    view = view_of(data, CacheConfig(name, residual_length=2))
    mask = torch.ones(3, 1, q_len, 20, dtype=torch.bool).tril(20 - q_len)
    mask[0, :, :, :14] = False
    mask[1] = False
    mask[2, :, 0] = False
    lowest = torch.zeros(mask.shape, dtype=dtype)
    blind = ~mask.any(dim=-1)
    assert bool(blind.any())
    for how in (
        mask,
        lowest.masked_fill(~mask, -torch.inf),
        lowest.masked_fill(~mask, torch.finfo(dtype).min),
    ):
        for sinks in (None, torch.zeros(6)):
            out = run(backend, data.query, view, mask=how, sinks=sinks)
            assert bool(out.isfinite().all())
            for b, _, i in blind.nonzero().tolist():
                assert not bool(out[b, i].any())
            for b, _, i in (~blind).nonzero().tolist():
                assert bool((out[b, i] != 0).all())


@each_instruction_set
@pytest.mark.parametrize("threads", [1, 2, 5])
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
@pytest.mark.usefixtures("keep_threads")
def test_the_number_of_threads_does_not_matter(isa: str, threads: int, shape: Shape) -> None:
    torch.set_num_threads(threads)
    data = random_data(shape)
    view = view_of(data, CacheConfig("int8", value_format="fp8_e4m3", sink_tokens=3, residual_length=40))
    mask = some_mask("left padding", shape, 3, torch.float32)
    assert_close(isa, data, view, mask=mask, sinks=torch.zeros(shape.kv_heads * shape.group))
    assert_close(isa, data, view)


@each_instruction_set
@pytest.mark.usefixtures("keep_threads")
def test_a_head_of_which_one_part_sees_nothing_is_merged_from_the_others(isa: str) -> None:
    data = random_data(Shape(1, 1, 2, 1, 4000, 64, 64))
    view = view_of(data, CacheConfig("int8"))
    for seen in (slice(0, 100), slice(3900, 4000), slice(1900, 2100)):
        mask = torch.zeros(1, 1, 1, 4000, dtype=torch.bool)
        mask[..., seen] = True
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert_close(isa, data, view, mask=mask)


def test_a_mask_longer_than_the_cache_is_cut() -> None:
    data = random_data(Shape(2, 1, 2, 2, 30))
    view = view_of(data, CacheConfig("int8"))
    mask = torch.rand(2, 1, 2, 50) < 0.7
    assert torch.equal(attention(data.query, view, mask), attention(data.query, view, mask[..., :30].contiguous()))


@each_backend
def test_more_queries_than_tokens_see_what_is_before_them(backend: str) -> None:
    data = random_data(Shape(1, 1, 2, 8, 5))
    assert_close(backend, data, view_of(data, CacheConfig("int8")))


@each_backend
@pytest.mark.parametrize("q_len", [1, 20])
def test_an_empty_cache_gives_zeros(backend: str, q_len: int) -> None:
    data = random_data(Shape(2, 1, 2, q_len, 0))
    view = view_of(data, CacheConfig("int8"))
    if backend in INSTRUCTION_SETS and q_len > MAX_QUERIES:
        backend = "reference"
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
    "scores that rise",
]


@each_instruction_set
@pytest.mark.parametrize("kind", HARD)
def test_on_hard_data_the_error_of_the_kernel_stays_below_a_twentieth_of_that_of_quantization(
    isa: str, kind: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        data, how = hard_data(kind, dtype)
        for name in formats():
            assert_close(isa, data, view_of(data, CacheConfig(name)), **how)
    data, how = hard_data(kind, torch.float32)
    assert_close(isa, data, view_of(data, CacheConfig("int8", granularity="head", residual_length=40)), **how)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_on_hard_data_the_other_backends_equal_the_oracle_too(backend: str, kind: str) -> None:
    data, how = hard_data(kind, torch.float32)
    for name in ("int8", "none"):
        assert_close(backend, data, view_of(data, CacheConfig(name)), **how)


def test_int8_survives_keys_with_a_few_huge_constant_channels() -> None:
    """Case 1: with a scale per token and head, not even half of what attention says is lost."""
    data = random_data(Shape(1, 2, 3, 1, 600, 64, 64))
    data.keys.mul_(4)
    data.keys[..., 5] += 150.0
    data.keys[..., 40] -= 100.0
    view = view_of(data, CacheConfig("int8"))
    wanted = exact(*data)
    assert rms(exact(data.query, *view.decode(torch.float64)) - wanted) < 0.5 * rms(wanted)


# ---- not a number --------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("kind", ["causal", "boolean", "additive", "lowest"])
def test_a_number_that_is_not_finite_shows_in_the_rows_that_attend_to_it_and_in_no_other(
    backend: str, name: str, odd: float, side: str, kind: str
) -> None:
    shape = Shape(2, 2, 3, 4, 30)
    for position, config in ((10, CacheConfig(name)), (0, CacheConfig(name, sink_tokens=2)), (28, CacheConfig(name))):
        clean = random_data(shape)
        data = random_data(shape)
        getattr(data, side)[1, 0, position, 3] = odd
        seen = torch.ones(2, 1, 4, 30, dtype=torch.bool).tril(26)
        if kind != "causal":
            seen[:, :, 1] = False  # a row that sees nothing
            seen[:, :, 2, position] = False
        mask = {
            "causal": None,
            "boolean": seen,
            "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
            "lowest": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
        }[kind]
        out, expected = (run(backend, x.query, view_of(x, config), mask=mask) for x in (data, clean))
        kept = name == "none" or config.sink_tokens > 0  # as it is; a packed vector becomes NaN as a whole
        for b, h, i in np.ndindex(2, 6, 4):
            if b == 0 or h >= 3 or not bool(seen[b, 0, i, position]):
                # The same numbers, but for the order of summation in torch's attention.
                torch.testing.assert_close(out[b, i, h], expected[b, i, h], rtol=1e-5, atol=1e-6)
            elif side == "values":
                shows = ~out[b, i, h].isfinite()
                assert shows.tolist() == [channel == 3 or not kept for channel in range(16)]
            elif math.isnan(odd) or not kept:
                assert bool(out[b, i, h].isnan().all())
            # What is left is an infinite key: the sign of the query's channel says whether it has all weight or none.


@each_backend
def test_a_query_that_is_not_finite_spoils_its_own_row_only(backend: str) -> None:
    data = random_data(Shape(1, 2, 2, 3, 50))
    view = view_of(data, CacheConfig("int8", residual_length=4))
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
    names = tuple(None if name == "none" else name for name in (config.format, config.value_format or config.format))
    granularity = config.granularity or "token"
    store = oracle.Store(names, (granularity, granularity), config.residual_length, config.sink_tokens)
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


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig("int8"),
        CacheConfig("int8", residual_length=5),
        CacheConfig("fp8_e4m3", residual_length=3, sink_tokens=4),
        CacheConfig("int8", granularity="head"),
        CacheConfig("int8", granularity="head", residual_length=6, sink_tokens=2),
        CacheConfig("int8", granularity="head", residual_length=80),
        CacheConfig("none", value_format="int8", residual_length=5),
    ],
    ids=["token", "residual", "fp8 residual sinks", "head", "head residual sinks", "head long residual", "mixed"],
)
@pytest.mark.parametrize(("before", "n"), PASSES, ids=str)
def test_a_pass_of_several_tokens_equals_single_steps(config: CacheConfig, before: int, n: int) -> None:
    """Case 11: every query sees what it would have seen one token at a time."""
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
def test_a_pass_of_several_tokens_equals_single_steps_under_left_padding(n: int, kind: str) -> None:
    before = 70
    config = CacheConfig("int8", residual_length=5, sink_tokens=2)
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


def test_a_pass_of_more_queries_than_a_piece_equals_single_steps() -> None:
    n = dense.PIECE + 60
    config = CacheConfig("int8", residual_length=7)
    data = random_data(Shape(1, 1, 1, n, n, 8, 8))
    out = attention(data.query, pass_over(config, data, 0, n))
    wanted, unquantized = one_by_one(config, data, 0, n)
    assert rms(f64(out) - wanted) <= rms(wanted - unquantized) / 20


@pytest.mark.parametrize(("before", "n"), [(0, 8), (0, 70), (30, 8), (70, 4), (50, 40)], ids=str)
@pytest.mark.parametrize("granularity", ["token", "head"])
@pytest.mark.parametrize(("residual", "sink"), [(0, 0), (5, 0), (3, 4)], ids=str)
def test_with_exact_prefill_the_tokens_of_a_pass_see_each_other_unquantized(
    before: int, n: int, granularity: str, residual: int, sink: int
) -> None:
    config = CacheConfig("int8", granularity=granularity, residual_length=residual, sink_tokens=sink, prefill="exact")
    data = random_data(Shape(2, 1, 2, n, before + n, 12, 10))
    view = pass_over(config, data, before, n)
    wanted, _ = one_by_one(config, data, before, n, whole=True)
    for backend in BACKENDS:
        if backend in INSTRUCTION_SETS and n > MAX_QUERIES:
            continue
        # int8 quantization alone is off by 5e-3: this is a hundredth of it.
        assert rms(f64(run(backend, data.query, view)) - wanted) <= 5e-5
    if before == 0:
        full = exact(data.query, data.keys, data.values)
        assert rms(wanted - full) == 0


def test_a_single_step_behind_an_exact_prefill_sees_what_is_stored() -> None:
    data = random_data(Shape(1, 1, 1, 1, 41))
    view = pass_over(CacheConfig("int8", prefill="exact"), data, 40, 1)
    assert view.late is None
    assert not view.runs_changed
    out = attention(data.query, view)
    stored = exact(data.query, *view.decode(torch.float64))
    assert rms(f64(out) - stored) <= rms(stored - exact(*data)) / 20


def test_after_crop_into_the_warm_up_a_pass_equals_single_steps() -> None:
    """What was encoded stays so, and what comes is encoded at once: the warm-up is over."""
    config = CacheConfig("int8", granularity="head")
    data = random_data(Shape(1, 1, 1, 8, WARM_UP_TOKENS + 30))
    results = []
    for sizes in ([8], [1] * 8):
        store = LayerStore(config)
        store.append(data.keys[:, :, :80], data.values[:, :, :80])
        store.crop(20)
        rows, at = [], 0
        for n in sizes:
            span = slice(80 + at, 80 + at + n)
            late = store.append(data.keys[:, :, span], data.values[:, :, span])
            rows.append(attention(data.query[:, :, at : at + n], KVView(store, late), backend="reference"))
            at += n
        results.append(torch.cat(rows, dim=1))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


# ---- channel vectors of keys ---------------------------------------------------------------------------------------


@each_backend
@each_dtype
@each_format
@pytest.mark.parametrize("which", ["multiplier", "centre", "both"])
def test_a_multiplier_and_a_centre_of_keys_are_as_if_keys_had_been_stored_with_them(
    backend: str, dtype: torch.dtype, name: str, which: str
) -> None:
    shape = Shape(2, 2, 3, 2, 90, 24, 16)
    data = random_data(shape, dtype)
    generator = torch.Generator().manual_seed(4)
    multiplier = 10.0 ** (2 * torch.rand(2, 24, generator=generator) - 1) if which != "centre" else None
    centre = 3 * torch.randn(2, 24, generator=generator) if which != "multiplier" else None
    sink = 3
    packed = data.keys.double()
    if centre is not None:
        packed = packed - centre.double().unsqueeze(1)
    if multiplier is not None:
        packed = packed / multiplier.double().unsqueeze(1)
    # Exact regions hold the keys themselves, packed ones what is left of them.
    keys = torch.cat([data.keys[:, :, :sink], packed[:, :, sink:].to(dtype)], dim=2)
    store = LayerStore(CacheConfig(name, sink_tokens=sink))
    store.append(keys, data.values)
    view = KVView(store, key_multiplier=multiplier, key_centre=centre)
    folded, values = KVView(store).decode(torch.float64)
    unquantized = keys.double()
    for k in (folded, unquantized):
        if multiplier is not None:
            k[:, :, sink:] *= multiplier.double().unsqueeze(1)
        if centre is not None:
            k[:, :, sink:] += centre.double().unsqueeze(1)
    torch.testing.assert_close(view.decode(torch.float64)[0], folded, rtol=1e-12, atol=0)
    wanted = exact(data.query, folded, values)
    quantization = rms(wanted - exact(data.query, unquantized, data.values))
    out = run(backend, data.query, view)
    rounding = rms(f64(torch.from_numpy(wanted).to(dtype)) - wanted)
    if backend == "dense" and dtype != torch.float32:
        stored = Data(data.query, folded, values)
        assert rms(f64(out) - wanted) <= 2 * rms(plain(stored, dtype) - wanted) + rounding
    else:
        assert rms(f64(out) - wanted) <= quantization / 20 + rounding


@each_backend
def test_a_multiplier_and_a_centre_leave_exact_copies_of_a_pass_alone(backend: str) -> None:
    data = random_data(Shape(1, 1, 2, 6, 50, 8, 8))
    multiplier, centre = torch.full((1, 8), 2.0), torch.full((1, 8), 0.5)
    keys = torch.cat([(data.keys[:, :, :44] - 0.5) / 2, data.keys[:, :, 44:]], dim=2)
    store = LayerStore(CacheConfig("int8", residual_length=6))
    store.append(keys[:, :, :44], data.values[:, :, :44])
    late = store.append(keys[:, :, 44:], data.values[:, :, 44:])
    view = KVView(store, late, multiplier, centre)
    assert view.late is not None
    outs = [run(which, data.query, view) for which in (backend, "reference")]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-3)


# ---- which backend serves, and what is refused ---------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("change", ["append", "crop and append", "batch", "reset"])
def test_a_view_is_refused_once_its_layer_was_updated(backend: str, change: str) -> None:
    data = random_data(Shape(2, 1, 2, 1, 30))
    view = view_of(data, CacheConfig("int8"))
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
        CacheConfig("int8"),
        CacheConfig("int8", residual_length=20, sink_tokens=4),
        CacheConfig("int8", granularity="head"),
        CacheConfig("none", sink_tokens=70),
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
        view = view_of(data, CacheConfig("int8"))
        told: list[str] = []
        view.on_served = told.append
        assert choose(data.query, view) == choose(data.query, view, "cpu") == served
        attention(data.query, view)
        attention(data.query, view, backend="reference")
        assert told == [served, "reference"]


def test_without_kernels_auto_decodes_and_cpu_is_refused_with_the_reason() -> None:
    data = random_data(Shape())
    view = view_of(data, CacheConfig("int8"))
    with using("none"):
        assert choose(data.query, view) == "dense"
        assert choose(data.query, view, "reference") == "reference"
        with pytest.raises(ValueError, match="backend 'cpu' cannot be used: switched off by a test"):
            attention(data.query, view, backend="cpu")


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones() -> None:
    data = random_data(Shape())
    with pytest.raises(ValueError, match="unknown backend 'gpu'; use one of auto, cpu, reference"):
        attention(data.query, view_of(data, CacheConfig("int8")), backend="gpu")


def test_types_that_the_kernel_does_not_know_are_decoded() -> None:
    data = random_data(Shape(1, 1, 2, 2, 30), torch.float64)
    view = view_of(data, CacheConfig("int8"))
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
    view = view_of(data, CacheConfig("int8"))
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
for (name, granularity), (query, keys, values) in torch.load(sys.argv[1]).items():
    store = LayerStore(CacheConfig(name, granularity=granularity, residual_length=3, sink_tokens=2))
    store.append(keys, values)
    view = KVView(store)
    assert choose(query, view) == "dense"
    results[name, granularity] = attention(query, view), *view.decode()
torch.save(results, sys.argv[2])
"""


def test_without_the_compiled_library_the_results_are_the_same(tmp_path: Path) -> None:
    cases = {
        (name, granularity): tuple(random_data(Shape(2, 2, 3, 2, 120), seed=seed))
        for seed, name in enumerate(formats())
        for granularity in ("token", "head")
    }
    torch.save(cases, tmp_path / "cases.pt")
    command = [sys.executable, "-c", OFF, str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(command, env={**os.environ, "QKV_KERNELS": "off"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    for (name, granularity), inputs in cases.items():
        data = Data(*inputs)
        view = view_of(data, CacheConfig(name, granularity=granularity, residual_length=3, sink_tokens=2))
        out, keys, values = results[name, granularity]
        for a, b in zip((keys, values), view.decode(), strict=True):
            assert torch.equal(a, b)
        wanted = exact(data.query, *view.decode(torch.float64))
        allowed = rms(wanted - exact(*data)) / 20
        if name == "none":
            allowed = 1e-6  # float32
        assert rms(f64(out) - wanted) <= allowed
        assert rms(f64(attention(data.query, view)) - wanted) <= allowed


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
