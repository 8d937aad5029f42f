"""Triton's kernels in Triton's interpreter, on CPU tensors: test_triton.py runs this file in a process of its own.

Attention is held against the oracle on identical codes. How much it may be off is what attending.py says: in
float32 what a kernel may; in bfloat16 and float16, in which these kernels multiply, twice the error of plain attention
in that type. Codes lie as on a GPU: those of 8 bits in rows.
"""

# ruff: noqa: E402

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "Triton decides when it is imported; run test_triton.py"

from attending import Data, Shape, Wanted, f64, pass_over, random_data, rms, some_mask, view_of, with_infinities
from setups import SETUPS, fits

from qkv import planes
from qkv.attention import attention, choose, triton_decode
from qkv.config import CacheConfig
from qkv.formats import get_format, triton_encode
from qkv.formats.layout import ROWS, layout_for
from qkv.planes import Plane, Scaling
from qkv.storage import LayerStore
from qkv.transform import Transform, rotation_signs
from qkv.view import KVView

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What a GPU is asked for by default, and the kinds of scales that are unpacked two numbers at a time.
FAST: list[dict[str, Any]] = [
    {"format": "int8"},
    {"format": "int8", "granularity": "head"},
    {"format": "fp8_e4m3"},
    {"format": "fp8_e5m2"},
    {"format": "int4"},
    {"format": "int4_rot"},
    {"format": "int4", "value_format": "int8"},
    {"format": "int8", "value_format": "none"},
]
each_fast = pytest.mark.parametrize("options", FAST, ids=lambda o: " ".join(map(str, o.values())))


@pytest.fixture(autouse=True)
def codes_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        planes, "layout_for", lambda device, key, bits=8: ROWS if bits == 8 else layout_for(device, key, bits)
    )


def check(data: Data, view: KVView, hard: bool = False, **how: Any) -> None:
    out = attention(data.query, view, backend="triton", **how)
    wanted = Wanted(data, view, hard, **{**how, **({"mask": with_infinities(how["mask"])} if "mask" in how else {})})
    wanted.check("triton" if data.query.dtype == torch.float32 else "dense", out)


@pytest.mark.parametrize("number", range(5))
def test_every_setup_equals_the_oracle(number: int) -> None:
    for i, options in enumerate(SETUPS.values()):
        if i % 5 == number:
            shape = Shape(1, 1, 2, 1 + i % 2, 60, 32, 64 if i % 3 else 32)
            data = random_data(shape, DTYPES[(1, 2, 1, 0)[i // 5 % 4]], seed=i)
            check(data, view_of(data, CacheConfig(**options)))


# Head sizes that are no power of two, groups of heads, blocks of queries, tokens at the edges of tiles and rows.
SHAPES = [
    Shape(1, 1, 1, 1, 1, 64, 64),
    Shape(2, 1, 3, 1, 16, 80, 80),
    Shape(1, 2, 7, 2, 17, 96, 64),
    Shape(1, 1, 8, 8, 65, 64, 112),
    Shape(1, 1, 71, 1, 33, 64, 64),
    Shape(1, 1, 3, 1, 129, 128, 128),
    Shape(1, 1, 2, 5, 40, 192, 128),
    Shape(1, 1, 1, 1, 257, 256, 256),
    Shape(1, 1, 2, 3, 400, 16, 48),
]


@each_fast
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_usual_formats_equal_the_oracle_for_ugly_sizes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """One of the shapes for each type and format, others for its neighbours."""
    number = (FAST.index(options) + 3 * DTYPES.index(dtype)) % len(SHAPES)
    data = random_data(SHAPES[number], dtype, seed=number)
    check(data, view_of(data, CacheConfig(**options)))


@pytest.mark.parametrize("seed", range(8))
def test_any_mask_softcap_and_sinks_equal_the_oracle(seed: int) -> None:
    chance = random.Random(seed)
    shape = Shape(chance.choice([1, 2]), chance.choice([1, 2]), chance.choice([1, 2, 3]), chance.choice([1, 2, 8]), 70)
    shape = shape._replace(kv_len=chance.choice([8, 31, 70, 140]))
    key, value = chance.choice(FAST)["format"], chance.choice(FAST)["format"]
    dtype = DTYPES[seed % 3]
    data = random_data(shape, dtype, seed)
    kind = ["none", "left padding", "boolean", "additive", "lowest"][seed % 5]
    mask = some_mask(kind, shape, seed, chance.choice([torch.float32, dtype]))
    sinks = torch.randn(shape.kv_heads * shape.group, generator=torch.Generator().manual_seed(seed))
    view = view_of(data, CacheConfig(key, value_format=value, sink_tokens=3, residual_length=chance.choice([0, 9])))
    how = {"mask": mask, "softcap": chance.choice([None, 3.0, 50.0]), "sinks": sinks if seed % 2 else None}
    check(data, view, causal=chance.random() < 0.7, softmax_scale=chance.choice([None, 0.3]), **how)


@pytest.mark.parametrize("options", [FAST[0], FAST[4]], ids=str)
def test_rows_that_see_nothing_give_zeros(options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 1, 2, 3, 40, 32, 32), torch.bfloat16)
    mask = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    mask[:, :, 1] = False
    out = attention(data.query, view_of(data, CacheConfig(**options)), mask, backend="triton")
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert bool((out[:, 0] != 0).any())


def test_a_mask_and_queries_of_any_strides_are_read() -> None:
    data = random_data(Shape(1, 2, 2, 3, 40, 32, 32))
    view = view_of(data, CacheConfig("int8"))
    mask = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).t()[None, None] < 0.7
    expected = attention(data.query, view, mask.contiguous(), backend="triton")
    strided = data.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attention(strided, view, mask, backend="triton"), expected)
    assert torch.equal(
        attention(data.query.transpose(2, 3).contiguous().transpose(2, 3), view, mask, backend="triton"), expected
    )


def test_queries_of_another_type_than_the_cache_are_served() -> None:
    for cache_type, query_type in itertools.permutations(DTYPES, 2):
        data = random_data(Shape(1, 1, 2, 2, 40, 32, 32), cache_type)
        data = data._replace(query=data.query.to(query_type))
        view = view_of(data, CacheConfig("int4", residual_length=9))
        error = rms(f64(attention(data.query, view, backend="triton")) - Wanted(data, view).exact)
        assert error < (1e-6 if query_type == torch.float32 else 2e-3)


@pytest.mark.parametrize(
    ("options", "sink", "residual"),
    [({"format": "int8"}, 0, 0), ({"format": "int4"}, 4, 33), ({"format": "none"}, 4, 33)],
    ids=str,
)
def test_every_step_reads_what_is_stored_by_then(options: dict[str, Any], sink: int, residual: int) -> None:
    """The table of addresses is made when memory changes; lengths, the residual window and a crop are seen at once."""
    data = random_data(Shape(1, 1, 2, 1, 310, 16, 16), torch.bfloat16)
    store = LayerStore(CacheConfig(**options, sink_tokens=sink, residual_length=residual))
    tables = set()
    done = 0
    for n in (135, 1, 132, 1):
        store.append(data.keys[:, :, done : done + n], data.values[:, :, done : done + n])
        done += n
        held = data._replace(keys=data.keys[:, :, :done], values=data.values[:, :, :done])
        check(held, KVView(store))
        tables.add(id(store.kernel_regions))
    assert len(tables) < 4 or options["format"] == "none"
    store.crop(137)
    check(data._replace(keys=data.keys[:, :, :137], values=data.values[:, :, :137]), KVView(store))


@pytest.mark.parametrize("options", [{"format": "int8"}, {"format": "int4"}], ids=str)
def test_a_sliding_window_hides_what_has_left(options: dict[str, Any]) -> None:
    data = random_data(Shape(1, 1, 2, 1, 350, 16, 16), torch.bfloat16)
    store = LayerStore(CacheConfig(**options, residual_length=5), window=True)
    for start in range(0, 350, 50):
        store.append(data.keys[:, :, start : start + 50], data.values[:, :, start : start + 50])
        if start < 150:
            continue
        store.drop_before(start - 90)
        first = store.first
        shown = data._replace(keys=data.keys[:, :, first : start + 50], values=data.values[:, :, first : start + 50])
        check(shown, KVView(store))
        later = shown._replace(keys=shown.keys[:, :, 13:], values=shown.values[:, :, 13:])
        check(later, KVView(store, first=first + 13))


@pytest.mark.parametrize("prefill", ["stored", "exact"])
@pytest.mark.parametrize("options", [{"format": "int8"}, {"format": "int4", "residual_length": 6}], ids=str)
def test_a_pass_of_several_tokens_sees_exact_copies(options: dict[str, Any], prefill: str) -> None:
    data = random_data(Shape(1, 1, 2, 7, 47, 16, 16))
    view = pass_over(CacheConfig(**options, prefill=prefill), data, 40, 7)
    out = attention(data.query, view, backend="triton")
    expected = attention(data.query, view, backend="reference")
    assert rms(f64(out) - f64(expected)) < 1e-6 * rms(f64(expected)) + 1e-7


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8 token", torch.bfloat16), ("int8 channel", torch.float32), ("fp8_e4m3 head", torch.float16),
        ("int4 group", torch.bfloat16), ("int4 channel", torch.float32), ("none", torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_is_not_finite_shows_in_the_rows_that_attend_to_it_and_in_no_other(
    dtype: torch.dtype, name: str
) -> None:
    data = random_data(Shape(1, 1, 2, 3, 80, 32, 32), dtype)
    clean = attention(data.query, view_of(data, CacheConfig(**SETUPS[name])), backend="triton", causal=False)
    for side in ("keys", "values"):
        spoilt = data._replace(**{side: getattr(data, side).clone()})
        getattr(spoilt, side)[0, 0, 20, 5] = math.nan
        view = view_of(spoilt, CacheConfig(**SETUPS[name]))
        mask = torch.ones(1, 1, 3, 80, dtype=torch.bool)
        mask[:, :, 1, 16:32] = False  # a whole group of tokens
        out = attention(data.query, view, mask, backend="triton")
        assert bool(out[:, 0, :, 5].isnan().all())
        assert bool(out[:, 2, :, 5].isnan().all())
        assert bool(out[:, 1].isfinite().all())
        if "head" not in name:
            expected = attention(data.query, view_of(data, CacheConfig(**SETUPS[name])), mask, backend="triton")
            assert torch.equal(out[:, 1], expected[:, 1])
    assert bool(clean.isfinite().all())


@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_tiny_and_huge_numbers_lose_no_accuracy(factor: float) -> None:
    """What float16 does not hold: scales are kept apart from codes."""
    for options in FAST[:6]:
        data = random_data(Shape(1, 1, 2, 1, 60, 32, 32), torch.bfloat16)
        data = data._replace(query=data.query / factor, keys=data.keys * factor, values=data.values * factor)
        check(data, view_of(data, CacheConfig(**{**options, "value_format": options["format"]})))


@pytest.mark.parametrize("options", [{"format": "int8"}, {"format": "int4"}], ids=str)
def test_lengths_in_memory_are_those_of_the_replay(options: dict[str, Any]) -> None:
    """What a recorded CUDA graph does: the same call with other numbers in the device's memory."""
    data = random_data(Shape(1, 1, 2, 1, 200, 16, 16))
    store = LayerStore(CacheConfig(**options), capacity=200)
    store.append(data.keys[:, :, :150], data.values[:, :, :150])
    lengths = triton_decode.Lengths(store)
    early = KVView(store)

    def call(view: KVView) -> torch.Tensor:
        return triton_decode.attend(data.query, view, None, 0.25, True, None, None, lengths)

    assert torch.equal(call(early), triton_decode.attend(data.query, early, None, 0.25, True, None, None))
    for n in range(150, 165):
        store.append(data.keys[:, :, n : n + 1], data.values[:, :, n : n + 1])
    expected = triton_decode.attend(data.query, KVView(store), None, 0.25, True, None, None)
    # Arguments are those of the first call but for the lengths.
    old = KVView(store)
    old.length = 150
    lengths.set(triton_decode.lengths_of(store))
    torch.testing.assert_close(call(old), expected, rtol=1e-5, atol=1e-6)


# ---- encoding ------------------------------------------------------------------------------------------------------


def rows_to_encode(n: int, dim: int, dtype: torch.dtype, odd: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 2, n, dim, generator=generator)
    x *= 10 ** (torch.rand(2, 2, n, 1, generator=generator) ** 4 * 3)
    x[0, 0, 1], x[0, 1, 2] = 0, x[0, 1, 2] * 1e-30
    x[1, 1, 4] *= 1e-5
    if odd:
        x[1, 0, 3, 5], x[1, 1, 5, 2] = math.nan, math.inf
    return x.to(dtype)


ENCODED = [
    (name, granularity, group)
    for name in ("int8", "fp8_e4m3", "fp8_e5m2", "int4", "int4_rot")
    for granularity, group in (("token", 0), ("head", 0), ("group", 16), ("channel", 32))
    if granularity in get_format(name).granularities
]


@pytest.mark.parametrize(("name", "granularity", "group"), ENCODED)
def test_the_encoder_gives_the_bits_that_python_gives(name: str, granularity: str, group: int) -> None:
    format = get_format(name)
    for is_key, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        cuts = [10, 32, 64] if granularity == "channel" else [0, 1, 2, 20]  # a group may have begun before
        x = rows_to_encode(cuts[-1], 48, dtype, odd=granularity != "head")
        generator = torch.Generator().manual_seed(0)
        centre, multiplier = torch.randn(2, 48, generator=generator), torch.rand(2, 48, generator=generator) + 0.1
        transform = None
        if format.rotated or is_key:
            vectors = (centre, multiplier) if is_key else (None, None)
            transform = Transform(rotation_signs(48) if format.rotated else None, *vectors)
        scale = torch.rand(2, 2, generator=generator) * 0.1 if granularity == "head" else None
        both = [Plane(x[:, :, :0], 64, format, is_key, Scaling(granularity, group), scale, transform) for _ in range(2)]
        for plane in both:  # what is not written stays
            plane.codes.random_(0, 255, generator=torch.Generator().manual_seed(3))
        for start, end in itertools.pairwise(cuts):
            both[0].write(start, x[:, :, start:end])
            position = torch.tensor([start], dtype=torch.int32) if end - start == 1 else None
            assert triton_encode.write(both[1], start if position is None else 0, x[:, :, start:end], position)
        for one, other in ((getattr(plane, part) for plane in both) for part in ("codes", "scale", "offset")):
            if one is not None:
                assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_formats_that_the_encoder_does_not_know_are_left_to_python() -> None:
    x = torch.randn(1, 1, 4, 32)
    for name in ("nf4", "int3", "mxfp4"):
        plane = Plane(x[:, :, :0], 16, get_format(name), True, Scaling("group", 32))
        assert not triton_encode.write(plane, 0, x)
        assert not bool(plane.codes.any())
    assert not triton_encode.write(Plane(x[:, :, :0], 16, None, True), 0, x)


# ---- the choice ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(Shape(1, 1, 1, 1, 20, 16, 16))
    view = view_of(data, CacheConfig("int8"))
    assert choose(data.query, view, "triton") == "triton"
    assert choose(random_data(Shape(1, 1, 1, 9, 20, 16, 16)).query, view, "triton") == "dense"
    with pytest.raises(ValueError, match="float64"):
        choose(data.query.double(), view, "triton")
    wide = random_data(Shape(1, 1, 1, 1, 20, 288, 16))
    with pytest.raises(ValueError, match="head_dim is 288"):
        choose(wide.query, view_of(wide, CacheConfig("int8")), "triton")
    monkeypatch.setattr(planes, "layout_for", layout_for)
    with pytest.raises(ValueError, match="tiles"):
        choose(data.query, view_of(data, CacheConfig("fp8_e4m3")), "triton")


def test_it_fits_every_format() -> None:
    """No format is decoded for want of a kernel."""
    for options in SETUPS.values():
        if fits(options, 32, 32):
            data = random_data(Shape(1, 1, 1, 1, 20, 32, 32))
            assert triton_decode.supports(data.query, view_of(data, CacheConfig(**options))) is None
