"""Plans of caches with limits: windows and files, to the byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, logits, make_cache
from planning import (
    EVERY,
    INT8,
    ROWS,
    WAYS,
    filled,
    held,
    planned,
    settled,
    small_config,
)
from transformers import (
    EncoderDecoderCache,
    PreTrainedModel,
)

import qkv
from qkv.model_shape import ModelShape
from qkv.plan import CachePlan, Places
from qkv.plan_rows import largest, plan_row

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


@pytest.fixture(scope="module", params=["full", "sliding and full"])
def small(request: pytest.FixtureRequest) -> ModelShape:
    return ModelShape.of(small_config(request.param), "float32")


# With a window, all layers keep the same first tokens.
WINDOWED = {name: options for name, options in EVERY.items() if name != "unlike layers"}
FULL: dict[str, Any] = {"on_full": "window", "max_tokens": 150}
PASSES = ((1, 0), (3, 2), (149, 0), (151, 0), (200, 60), (900, 0), (1000, 300))


@pytest.mark.parametrize("options", WINDOWED.values(), ids=WINDOWED)
def test_a_window_is_planned_to_the_byte(small: ModelShape, options: dict[str, Any]) -> None:
    plan = planned(small, **options, **FULL)
    for tokens, steps in PASSES:
        real = filled(small, tokens, steps, **options, **FULL)
        size = plan.size(tokens, ROWS, steps)
        assert size.allocated == real.nbytes(), (tokens, steps)
        assert size.bits / size.values == pytest.approx(real.stats()["bits_per_value"])
    assert plan.window(ROWS) == 150


@pytest.mark.parametrize("name", ["none", "int8", "k5v4", "a residual window and groups", "scales per head"])
def test_a_window_that_bytes_decide_is_planned_to_the_byte(small: ModelShape, name: str) -> None:
    options = WAYS.get(name, {"format": name})
    limits: dict[str, Any] = {"on_full": "window", "max_bytes": 800_000}
    plan = planned(small, **options, **limits)
    for tokens, steps in PASSES:
        real = filled(small, tokens, steps, **options, **limits)
        assert plan.nbytes(tokens, ROWS, steps=steps) == real.nbytes(), (tokens, steps)
        assert real.nbytes() <= limits["max_bytes"]
    layer: Any = real.layers[-1]
    many, one = plan.window(ROWS), plan.window(1)
    assert many is not None
    assert many == layer.window + layer.sinks.count
    assert one is not None
    assert one > many
    assert plan.nbytes(1 << 29, ROWS) == plan.nbytes((1 << 29) + plan.period, ROWS)


@pytest.fixture(scope="module", params=["full", "sliding and full"])
def deep(request: pytest.FixtureRequest) -> ModelShape:
    config = small_config(request.param)
    config.num_hidden_layers = 6
    if request.param != "full":
        config.layer_types = ["sliding_attention", "full_attention", "full_attention"] * 2
    return ModelShape.of(config, "float32")


# Shares of what the cache takes in all: nothing moves, little, much, more than can move.
SHARES = (1.0, 0.9, 0.6, 0.35, 0.25)


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_what_lies_in_a_file_is_planned_to_the_byte(deep: ModelShape, options: dict[str, Any], tmp_path: Path) -> None:
    for share, (tokens, steps) in zip(SHARES, ((700, 0), (1000, 3), (900, 1), (1500, 2), (800, 130)), strict=True):
        limits: dict[str, Any] = {"max_bytes": int(share * planned(deep, **options).nbytes(tokens, ROWS, steps=steps))}
        limits |= {"on_full": "offload", "offload_folder": tmp_path}
        plan = planned(deep, **options, **limits)
        try:
            real = filled(deep, tokens, steps, **limits, **options)
        except ValueError:  # what cannot move takes more, beside one layer
            assert share < 0.8
            assert not plan.fits(tokens, ROWS)
            continue
        assert settled(real).reading <= limits["max_bytes"]
        assert plan.nbytes(tokens, ROWS, steps=steps) == real.nbytes()
        assert plan.places(tokens, ROWS, steps) == settled(real), share
        assert (real.offloaded_bytes() > 0) == (share < 1), share


def test_what_does_not_move_is_in_memory(small: ModelShape) -> None:
    every: tuple[dict[str, Any], ...] = ({}, FULL, {"max_tokens": 900})
    for limits in every:
        plan = CachePlan(small, "int8", **limits)
        held = plan.nbytes(800, ROWS, steps=2)
        assert plan.places(800, ROWS, 2) == Places(held, 0, held)


@pytest.mark.parametrize("name", ["none", "int8", "k5v4", "scales per head", "groups of channels"])
def test_a_cache_takes_what_the_plan_says_it_takes_and_no_more(small: ModelShape, name: str) -> None:
    options = WAYS.get(name, {"format": name})
    limits: dict[str, Any] = {"max_bytes": 300_000}
    plan = planned(small, **options, **limits)
    most = largest(lambda n: plan.fits(n, ROWS), 1, 1 << 20)
    assert most is not None
    filled(small, most, **options, **limits)
    with pytest.raises(ValueError, match="max_bytes=300000"):
        filled(small, most + 1, **options, **limits)
    plan = planned(small, **options, max_tokens=77)
    assert plan.fits(77, ROWS)
    assert not plan.fits(78, ROWS)


@pytest.mark.parametrize("name", ["none", "int8", "k5v4"])
def test_a_file_takes_tokens_until_a_layer_has_no_room_in_memory(deep: ModelShape, name: str, tmp_path: Path) -> None:
    limit = 4_000_000 if name == "none" else 1_500_000
    limits: dict[str, Any] = {"on_full": "offload", "max_bytes": limit, "offload_folder": tmp_path}
    plan = CachePlan(deep, name, **limits)
    most = largest(lambda n: plan.fits(n, ROWS), plan.period, 1 << 20)
    assert most is not None
    for tokens, steps in ((most - plan.period, 2), (most, 0), (most - 1, 0)):
        real = filled(deep, tokens, steps, format=name, **limits)
        assert settled(real).reading <= limit < real.nbytes()
    assert not plan.fits(most, ROWS, free=limit - 100_000)
    assert plan.fits(most, ROWS, free=limit)
    refused = []
    for fewer in (0, 1, 65):  # of the next segment all, or all but one token, or a group less than that
        try:
            filled(deep, most + plan.period - fewer, format=name, **limits)
        except ValueError as error:
            refused.append(str(error))
    assert any("cannot move to the file" in message for message in refused)


@pytest.mark.parametrize("name", ["int8", "k5v4", "groups of other sizes", "a residual window and groups"])
def test_up_to_the_longest_context_every_number_of_tokens_fits(small: ModelShape, name: str) -> None:
    options = WAYS.get(name, {"format": name})
    plan = planned(small, **options)
    free = plan.nbytes(4096, ROWS) + 1000
    row = plan_row(small, name, qkv.CacheConfig(**options) if name in WAYS else name, 300, ROWS, free)
    most = row.max_context
    assert most is not None
    assert 1024 <= most <= 4096
    assert max(plan.nbytes(n, ROWS) for n in (*range(1, 400), *range(most - 300, most + 1))) <= free
    assert max(plan.nbytes(n, ROWS) for n in range(most + 1, most + 257)) > free


# Attention of their own, which qkv does not replace: a full window takes one sequence at a time there.
UNFUSED = ("GPT-J", "Falcon")


@pytest.mark.parametrize("name", FAMILIES)
def test_limits_are_planned_for_every_family(name: str, tmp_path: Path) -> None:
    model: PreTrainedModel = FAMILIES[name]()
    shape = ModelShape.of(model.config, "float32")
    encoder = 40 if model.config.model_type == "whisper" else 12 if model.config.is_encoder_decoder else 0
    text = model.config.get_text_config(decoder=True)
    tables = (
        getattr(text, table, None) for table in ("max_position_embeddings", "max_target_positions", "max_seq_len")
    )
    total = min([600, *(table for table in tables if table is not None)])
    qkv.enable(model)
    options: dict[str, Any]
    for options in ({"format": "none"}, {**INT8, "sink_tokens": 3}):
        limits: dict[str, Any] = {"on_full": "window", "max_tokens": 100}
        try:
            plan = planned(shape, **options, **limits)
        except ValueError as refused:
            with pytest.raises(ValueError, match=re.escape(str(refused))):
                make_cache(model, **options, **limits)
        else:
            if name not in UNFUSED:
                cache = make_cache(model, **options, **limits)
                logits(model, cache, [90, *[1] * 30])
                assert plan.nbytes(120, 2, steps=30, encoder_tokens=encoder) == held(cache), options
        whole = planned(shape, **options).nbytes(total, 2, steps=2, encoder_tokens=encoder)
        limits = {"on_full": "offload", "max_bytes": int(0.95 * whole), "offload_folder": tmp_path}
        cache = make_cache(model, **options, **limits)
        plan = planned(shape, **options, **limits)
        try:
            logits(model, cache, [total - 2, 1, 1])
        except ValueError:  # one layer is most of the cache, and has no room in memory
            assert not plan.fits(total, 2)
            continue
        assert plan.nbytes(total, 2, steps=2, encoder_tokens=encoder) == held(cache)
        parts = [cache]
        if isinstance(cache, EncoderDecoderCache):
            parts = [cache.self_attention_cache, cache.cross_attention_cache]
        real = sum((settled(part) for part in parts), start=Places(0, 0, 0))
        expected = plan.places(total, 2, 2, encoder)
        unseen = held(cache) - sum(part.nbytes() for part in parts)
        assert Places(real.memory + unseen, real.file, real.reading + unseen) == expected
