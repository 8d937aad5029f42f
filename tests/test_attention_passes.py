"""Passes of several tokens: what each of them sees, and keys that are equalized."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from attending import (
    BACKENDS,
    CHANNELS,
    Data,
    Shape,
    Wanted,
    config_of,
    each_backend,
    each_of_some,
    each_quantized_setup,
    exact,
    f64,
    pass_over,
    random_data,
    rms,
    run,
)
from instruction_sets import INSTRUCTION_SETS
from setups import SETUPS
from stores import like

from qkv.attention import attention, dense
from qkv.attention.cpu import MAX_QUERIES
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView


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
