"""Plans: sizes known from a configuration are those that caches have in the end, to the byte."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command
from families import FAMILIES, logits, make_cache
from setups import SETUPS
from transformers import (
    AutoConfig,
    EncoderDecoderCache,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import qkv
from qkv.cli.options import parse_bytes
from qkv.layers import QKVLayer
from qkv.named_caches import as_argument
from qkv.plan import CachePlan, Call, ModelShape, Places, largest, load_config, meta_model, plan_row
from qkv.shapes import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

HEADS, DIM, ROWS = 2, 32, 2
INT8 = {"format": "int8", "equalize": False}
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 16}
# What decides how memory is taken, beside the formats.
WAYS: dict[str, dict[str, Any]] = {
    "sinks": {**INT8, "sink_tokens": 5},
    "a long residual window": {**INT8, "residual_length": 70, "sink_tokens": 3},
    "a residual window and groups": {**CHANNELS, "residual_length": 7, "sink_tokens": 3},
    "groups of other sizes": {
        **CHANNELS,
        "key_group_size": 64,
        "value_granularity": "channel",
        "value_group_size": 128,
    },
    "scales per head": {**INT8, "granularity": "head", "sink_tokens": 2},
    "scales per head and groups": {"format": "fp8_e4m3", "key_granularity": "channel", "value_granularity": "head"},
    "groups of channels": {"format": "nf4", "granularity": "group", "group_size": 16},
    "exact prompts": {"format": "k5v4", "prefill": "exact"},
    "unlike layers": {"format": "int8", "layers": {0: {"format": "none"}, 1: {"sink_tokens": 9, "format": "int4"}}},
}
EVERY = {**SETUPS, **{name: {"format": name} for name in qkv.presets()}, **WAYS}


def bounded(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows ``[ROWS, HEADS, tokens, dim]`` that repeat after 64 tokens: no later one exceeds the first of them."""
    x = torch.randn(ROWS, HEADS, 64, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.repeat(1, 1, -(-tokens // 64), 1)[:, :, :tokens]


def small_config(kind: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 50}
    if kind == "full":
        config = LlamaConfig(**sizes)
    else:
        config = Gemma3TextConfig(
            **sizes, layer_types=["sliding_attention", "full_attention"], sliding_window=150, pad_token_id=0
        )
    config._attn_implementation = "qkv"  # what is stored is handed out packed, so nothing is decoded here
    return config


@pytest.fixture(scope="module", params=["full", "sliding and full"])
def small(request: pytest.FixtureRequest) -> ModelShape:
    return ModelShape.of(small_config(request.param), "float32")


def filled(shape: ModelShape, tokens: int, steps: int = 0, **options: Any) -> qkv.QKVCache:
    """A cache that was given so many tokens in one pass, and then one by one."""
    cache = qkv.QKVCache(shape.config, **options)
    for n in [tokens - steps] * (steps < tokens) + [1] * steps:
        for layer in range(len(cache.layers)):
            cache.update(bounded(n, DIM), bounded(n, DIM), layer)
    return cache


def settled(cache: qkv.QKVCache) -> Places:
    """Where the bytes of a real cache are: full segments that lie in the file are found by their addresses."""
    assert cache._limits is not None
    assert cache._limits.spill is not None
    file, filed = cache._limits.spill, []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, QKVLayer):
            continue
        mapped = {id(m.segment) for m in file._mapped.get(index, ()) if m.live}
        lying = [s for s in layer.store.packed if id(s) in mapped]
        tensors = [t for segment in lying for plane in segment.planes() for t in plane.tensors()]
        filed.append(sum(t.untyped_storage().nbytes() for t in tensors))
    memory = cache.nbytes() - sum(filed)
    return Places(memory, cache.offloaded_bytes(), memory + max(filed))


def planned(shape: ModelShape, **options: Any) -> CachePlan:
    options = {**options}
    return CachePlan(shape, options.pop("format"), **options)


def held(cache: Any) -> int:
    """``nbytes()``, and the states of linear attention if it does not count them."""
    if isinstance(cache, EncoderDecoderCache):
        return held(cache.self_attention_cache) + held(cache.cross_attention_cache)
    total: int = cache.nbytes()
    for layer in cache.layers:
        alone = qkv.QKVCache()
        alone.layers = [layer]
        states = [x for name in ("conv_states", "recurrent_states") for x in getattr(layer, name, {}).values()]
        store = layer.store.nbytes() if hasattr(layer, "store") else 0
        if alone.nbytes() == store:
            total += sum(x.nbytes for x in states if x is not None)
    return total


# ---- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_the_plan_is_nbytes_for_every_format_and_way(small: ModelShape, options: dict[str, Any]) -> None:
    plan = planned(small, **options)
    for tokens in (1, 200, 700):
        real = filled(small, tokens, **options)
        size = plan.size(tokens, ROWS)
        assert size.allocated == real.nbytes(), tokens
        assert size.bits / size.values == pytest.approx(real.stats()["bits_per_value"])


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_tokens_that_come_one_by_one_are_planned_as_well(small: ModelShape, options: dict[str, Any]) -> None:
    plan = planned(small, **options)
    for tokens, steps in ((40, 40), (250, 50), (330, 200)):
        assert plan.nbytes(tokens, ROWS, steps=steps) == filled(small, tokens, steps, **options).nbytes()


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_static_layout_is_planned_as_well(small: ModelShape, options: dict[str, Any]) -> None:
    for tokens, room in ((1, 77), (333, 400)):
        plan = planned(small, **options, max_cache_len=room)
        assert plan.nbytes(tokens, ROWS) == filled(small, tokens, **options, max_cache_len=room).nbytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_model_type_decides_what_is_exact(dtype: str) -> None:
    config = small_config("full")
    cache = qkv.QKVCache(config, "none", sink_tokens=4)
    for layer in range(2):
        cache.update(*[bounded(300, DIM, getattr(torch, dtype))] * 2, layer)
    assert CachePlan(ModelShape.of(config, dtype), "none", sink_tokens=4).nbytes(300, ROWS) == cache.nbytes()


def test_given_scales_and_vectors_are_planned(small: ModelShape) -> None:
    scales = {f"layers.0.{side}_scale": torch.full((HEADS,), 0.1) for side in ("key", "value")}
    vectors = {f"layers.1.key_{what}": torch.ones(HEADS, DIM) for what in ("centre", "multiplier")}
    options = {"format": "int8", "scales": {**scales, **vectors}}
    assert planned(small, **options).nbytes(200, ROWS) == filled(small, 200, **options).nbytes()


@pytest.mark.parametrize("name", ["int8", "k5v4", "a long residual window", "scales per head"])
def test_long_contexts_grow_evenly(small: ModelShape, name: str) -> None:
    """A plan tries a few thousand tokens and goes on from there."""
    options = WAYS.get(name, {"format": name})
    plan = planned(small, **options)
    for tokens in (4095, 4096, 4900, 5333, 9000):
        assert plan.nbytes(tokens, ROWS) == filled(small, tokens, **options).nbytes(), tokens
    # And further than there is memory for.
    far, near = (plan.nbytes(n + plan.period) - plan.nbytes(n) for n in (10**8, 20000))
    assert far == near


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_is_what_the_cache_of_every_family_holds(name: str) -> None:
    model: PreTrainedModel = FAMILIES[name]()
    shape = ModelShape.of(model.config, "float32")
    whisper = model.config.model_type == "whisper"
    encoder = 40 if whisper else 12 if model.config.is_encoder_decoder else 0
    assert shape.parameters == sum(x.numel() for x in model.parameters())
    pieces = [180, *[1] * 3]  # past the window, and past the tokens from which keys are equalized
    for options in ({"format": "none"}, {"format": "int8"}, {**CHANNELS, "sink_tokens": 3}):
        cache = make_cache(model, **options)
        logits(model, cache, pieces)
        plan = planned(shape, **options)
        assert plan.nbytes(183, 2, steps=3, encoder_tokens=encoder) == held(cache), options


# ---- limits --------------------------------------------------------------------------------------------------------

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


def test_a_model_whose_attention_is_ours_by_now_can_be_planned() -> None:
    model = FAMILIES["Llama"]()
    before = CachePlan(ModelShape.of(model.config), "int8").nbytes(300)
    qkv.enable(model)
    assert CachePlan(ModelShape.of(model.config), "int8").nbytes(300) == before
    assert model.config._attn_implementation == "qkv"


def test_planning_changes_no_configuration_and_takes_no_memory() -> None:
    config = SHAPES["llama-3.1-405b"].config()
    before = config.to_dict()
    plan = CachePlan(ModelShape.of(config), "k5v4")
    assert plan.nbytes(1 << 20, 64) > 1 << 43
    assert config.to_dict() == before
    for group in plan._parts[0].groups(1):
        assert all(x.device.type == "meta" for call in group._calls for x in made_by(call))


def made_by(call: Call) -> list[torch.Tensor]:
    taken: list[torch.Tensor] = []
    call.make(SimpleNamespace(**{call.method: lambda *tensors, **_: taken.extend(tensors)}), 1, 1)
    return taken


# ---- what is known without qkv -------------------------------------------------------------------------------------


@cache
def shape_of(name: str) -> ModelShape:
    return ModelShape.of(SHAPES[name].config())


def test_built_in_shapes_have_as_many_parameters_as_their_model_cards_say() -> None:
    for name, shape in SHAPES.items():
        parameters = sum(x.numel() for x in meta_model(shape.config()).parameters())
        assert parameters / 1e9 == pytest.approx(shape.billions, rel=0.01), name


# Shapes that configuration classes of transformers have as defaults, and what differs there.
DEFAULTS = {
    "llama-2-7b": {"max_position_embeddings": 2048},  # those of the first Llama
    "mistral-7b-v0.1": {"max_position_embeddings": 131072},
    "mixtral-8x7b": {"max_position_embeddings": 131072},
    "phi-3-mini": {"sliding_window": None},
    "gpt-oss-120b": {},
    "deepseek-v3": {"max_position_embeddings": 4096},  # before it is stretched
    "qwen3-next-80b": {"max_position_embeddings": 32768, "intermediate_size": 5632},
    "jamba-v0.1": {},
    "bamba-9b": {"vocab_size": 128000, "attn_layer_indices": None, "mamba_d_state": 256},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_built_in_shapes_are_those_that_transformers_has_as_defaults(name: str) -> None:
    shape = SHAPES[name]
    theirs, ours = AutoConfig.for_model(shape.model_type), shape.config()
    differ = {key for key in shape.values if getattr(ours, key) != getattr(theirs, key)}
    assert {key: getattr(theirs, key) for key in differ} == DEFAULTS[name]


def test_built_in_shapes_say_where_they_were_checked() -> None:
    assert all(shape.checked for shape in SHAPES.values())


def test_bytes_per_token_are_those_of_the_closed_form() -> None:
    """Layers that grow x (keys and values) x kv_heads x head_dim x two bytes."""
    expected = {
        "llama-2-7b": 32 * 2 * 32 * 128 * 2,
        "llama-3.1-70b": 80 * 2 * 8 * 128 * 2,
        "mistral-7b-v0.1": 0,
        "gemma-2-9b": 21 * 2 * 8 * 256 * 2,
        "gpt-oss-20b": 12 * 2 * 8 * 64 * 2,
        "qwen3-next-80b": 12 * 2 * 2 * 256 * 2,
        "bamba-9b": 3 * 2 * 8 * 128 * 2,
    }
    for name, count in expected.items():
        assert plan_row(shape_of(name), "none", "none", 8192).bytes_per_token == count, name


def test_latent_attention_is_planned_as_this_transformers_keeps_it() -> None:
    (call,) = shape_of("deepseek-v3").calls[0]
    numbers = sum(shape[1] * shape[3] for shape, _ in call.tensors)
    assert numbers in (512 + 64, 128 * (192 + 128))  # the latents, or keys and values that were made of them
    assert plan_row(shape_of("deepseek-v3"), "none", "none", 8192).bytes_per_token == 61 * numbers * 2
    assert shape_of("deepseek-v3").layer_kinds() == {"latent": 61}


def test_the_states_of_linear_attention_are_counted_and_constant() -> None:
    shape = shape_of("qwen3-next-80b")
    assert shape.layer_kinds() == {"linear": 36, "full": 12}
    plan = CachePlan(shape, "none")
    # Per layer: 32 heads of 128 x 128 numbers, and 3 or 4 tokens of 2 x 2048 + 4096 channels for the convolution.
    rest = [plan.nbytes(n) - 12 * 2 * 2 * 256 * 2 * n for n in (4096, 8192)]
    assert rest[0] == rest[1]
    recurrent = 36 * 32 * 128 * 128
    assert recurrent * 2 <= rest[0] <= recurrent * 4 + 36 * 4 * 8192 * 4
    assert plan.nbytes(4096, 3) == 3 * plan.nbytes(4096)


def test_a_sliding_window_stops_growing() -> None:
    plan = CachePlan(shape_of("mistral-7b-v0.1"), "int8")
    assert plan.nbytes(8192) == plan.nbytes(1 << 20)
    row = plan_row(shape_of("mistral-7b-v0.1"), "int8", "int8", 8192, free=1 << 30)
    assert row.max_context is None
    assert row.bytes_per_token == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "bamba-9b"])
@pytest.mark.parametrize("static", [False, True])
def test_what_fits_fits_and_no_more(name: str, static: bool) -> None:
    free = 5 << 30
    for format in ("none", "k5v4"):
        row = plan_row(shape_of(name), format, format, 3000, 2, free, static=static)

        def nbytes(tokens: int, rows: int, format: str = format) -> int:
            """The most that so many tokens take, or fewer: one before a group of 64 is full, the most are exact."""
            plan = CachePlan(shape_of(name), format, tokens if static else None)
            return max(plan.nbytes(n, rows) for n in (tokens, (tokens + 1) // 64 * 64 - 1))

        assert row.max_context is not None
        assert row.max_batch is not None
        assert row.max_context % 256 == 0
        assert nbytes(row.max_context, 2) <= free < nbytes(row.max_context + 256, 2)
        assert nbytes(3000, row.max_batch) <= free < nbytes(3000, row.max_batch + 1)


def test_reading_takes_what_is_stored_and_not_what_is_spare() -> None:
    row = plan_row(shape_of("llama-3.1-8b"), "int8", "int8", 300, bandwidth=1e9)
    values = 300 * 32 * 2 * 8 * 128
    assert row.read_ms_per_token == pytest.approx(values * row.bits_per_value / 8 / 1e9 * 1e3)
    assert row.read_ms_per_token < row.kv_bytes / 1e9 * 1e3


def test_largest_finds_the_last_that_fits() -> None:
    assert largest(lambda n: n <= 1000, 1, 1 << 20) == 1000
    assert largest(lambda n: n <= 1000, 256, 1 << 20) == 768
    assert largest(lambda n: False, 256, 1 << 20) == 0
    assert largest(lambda n: True, 256, 1 << 20) is None


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5T", 15 * 10**11),
        ("80 gib", 80 << 30),
        ("1000", 1000),
        ("10kb", 10000),
        (".5GiB", 1 << 29),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "24XB", "-1GB", "0", "GiB", "24 Gi Bytes", "1e9", "nan"])
def test_a_bad_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"--memory: .* will not do; give one such as 24GiB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"context": 0}, "context must be a whole number of at least 1"),
        ({"context": 10, "batch": 0}, "batch must be a whole number of at least 1"),
        ({"context": 10.0}, "context must be a whole number"),
        ({"context": 10, "steps": 11}, "steps=11 are more than the 10 tokens"),
    ],
)
def test_bad_numbers_are_named(small: ModelShape, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CachePlan(small, "none").size(**numbers)


def test_a_configuration_of_no_language_model_is_refused() -> None:
    from transformers import ViTConfig

    with pytest.raises(ValueError, match=r"no model that writes text .* 'vit'"):
        ModelShape.of(ViTConfig())
    with pytest.raises(ValueError, match="not from a dict"):
        ModelShape.of({})  # type: ignore[arg-type]


def test_a_model_that_cannot_be_run_without_weights_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("looks at numbers\nand more")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    with pytest.raises(ValueError, match=r"a llama model cannot be planned: .* RuntimeError: looks at numbers$"):
        ModelShape.of(small_config("full"))


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_its_rows(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["--context", 4096, "--batch", 2, "--memory", "24GiB", "--formats", "none,k5v4", "--json", file]
    done = command("plan", "llama-3.1-8b", *arguments)
    assert done.status == 0
    assert "8.03 billion weights, 16.06 GB in bfloat16; layers: 32 full" in done.out
    assert "context in 24GiB" in done.out
    results = json.loads(file.read_text())
    none, k5v4 = results["rows"]
    figures = ["bits_per_value", "bytes_per_token", "kv_bytes", "max_context", "max_batch", "read_ms_per_token"]
    figures += ["memory_bytes", "file_bytes", "reading_bytes", "window", "refused"]
    assert list(none) == ["format", "context", "batch", *figures]
    assert none["kv_bytes"] == 2 * 4096 * 131072
    assert k5v4["kv_bytes"] == CachePlan(ModelShape.of(load_config("llama-3.1-8b")), "k5v4").nbytes(4096, 2)
    assert f"{k5v4['max_context']:,}" in done.out
    meta = results["meta"]
    assert meta["weights_bytes"] == meta["parameters"] * 2 == 2 * 8030261248
    assert (meta["layers"], meta["memory_bytes"], meta["dtype"]) == ({"full": 32}, 24 << 30, "bfloat16")


def test_a_folder_is_planned_as_its_model_fills_its_cache(command: Command, tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    cache = qkv.QKVCache(model.config, "int8")
    with torch.no_grad():
        model(torch.zeros(1, 200, dtype=torch.long), **as_argument(cache))
    arguments = ["--context", 200, "--formats", "int8", "--json", "-"]
    for name in ([tiny_folder], ["--model", tiny_folder]):
        results = json.loads(command("plan", *name, *arguments).out)
        assert results["rows"][0]["kv_bytes"] == cache.nbytes()
        assert results["rows"][0]["max_context"] is None
        assert results["meta"]["parameters"] == sum(x.numel() for x in model.parameters())


def test_the_embedded_model_needs_no_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.plan.find_model", None)
    done = command("plan", "--formats", "none", "--dtype", "float32")
    assert "smollm2: 0.13 billion weights, 0.54 GB in float32" in done.out
    assert "46,080" in done.out  # 30 layers x 2 x 3 heads x 64 x 4 bytes


def test_quantized_weights_leave_more_room(command: Command) -> None:
    arguments = ["plan", "llama-2-7b", "--memory", "24GiB", "--formats", "none", "--json", "-"]
    rows = [json.loads(command(*arguments, *more).out)["rows"][0] for more in ([], ["--weights-dtype", "int4"])]
    assert rows[1]["max_context"] - rows[0]["max_context"] == pytest.approx(6738415616 * 1.5 / 524288, abs=256)
    assert rows[0]["kv_bytes"] == rows[1]["kv_bytes"]


def test_weights_that_do_not_fit_and_positions_that_there_are_not_are_noted(command: Command) -> None:
    done = command("plan", "llama-2-7b", "--memory", "8GB", "--context", "5000", "--formats", "int8")
    assert done.status == 0
    assert "note: the weights alone take 13.5 GB of 8GB: no cache fits; see --weights-dtype" in done.err
    assert "note: the model was made for 4,096 positions; 5,000 were asked for" in done.err


def test_several_contexts_and_batches_make_a_row_each(command: Command) -> None:
    done = command("plan", "--context", "512,1024", "--batch", "1,2", "--formats", "none,int8", "--json", "-")
    rows = json.loads(done.out)["rows"]
    assert [(row["context"], row["batch"], row["format"]) for row in rows[:3]] == [
        (512, 1, "none"),
        (512, 1, "int8"),
        (512, 2, "none"),
    ]
    assert [row["kv_bytes"] / rows[0]["kv_bytes"] for row in rows if row["format"] == "none"] == [1, 2, 2, 4]
    (heading,) = [line for line in done.err.splitlines() if "bits/value" in line]
    assert heading.split()[:3] == ["cache", "context", "batch"]


def test_the_command_plans_windows(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none,int8", "--max-tokens", 516, "--on-full", "window"]
    done = command("plan", "llama-3.1-8b", *arguments, "--json", "-")
    assert done.status == 0
    results = json.loads(done.out)
    for row in results["rows"]:
        plan = CachePlan(shape_of("llama-3.1-8b"), row["format"], on_full="window", max_tokens=516)
        assert row["kv_bytes"] == row["memory_bytes"] == plan.nbytes(4096)
        assert (row["window"], row["max_context"], row["bytes_per_token"], row["refused"]) == (516, None, 0, False)
    assert (results["meta"]["max_tokens"], results["meta"]["on_full"]) == (516, "window")
    (none,) = [line.split() for line in done.err.splitlines() if line.split()[:1] == ["none"]]
    assert none[-3:-1] == ["516", "any"]


def test_the_command_plans_files(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none", "--max-bytes", "200MB", "--on-full", "offload", "--json", "-"]
    done = command("plan", "llama-3.1-8b", *arguments)
    (row,) = json.loads(done.out)["rows"]
    assert row["kv_bytes"] == 4096 * 131072
    assert row["file_bytes"] >= row["kv_bytes"] - 200_000_000
    assert row["memory_bytes"] < row["reading_bytes"] <= 200_000_000
    # A layer takes 4,096 bytes a token, and has to have room beside what of the others does not move.
    assert 40_000 < row["max_context"] < 200_000_000 / 4096
    assert "in the file" in done.err


def test_a_window_without_room_is_one_row_that_is_refused_among_others(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "int8", "--max-bytes", "60MB", "--on-full", "window"]
    done = command("plan", "llama-3.1-8b", *arguments, "--batch", "1,64", "--json", "-")
    assert done.status == 0
    one, many = json.loads(done.out)["rows"]
    assert (one["refused"], many["refused"]) == (False, True)
    assert (many["window"], many["max_context"]) == (None, 0)
    assert one["window"] > 4
    assert "note: int8: its limits do not let 4,096 tokens x 64 come" in done.err


def test_what_the_limits_of_a_cache_refuse_is_noted(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none,int8", "--max-bytes", "400MB", "--json", "-"]
    done = command("plan", "llama-3.1-8b", *arguments)
    assert done.status == 0
    none, int8 = json.loads(done.out)["rows"]
    assert (none["refused"], int8["refused"]) == (True, False)
    assert none["max_context"] == 400_000_000 // 131072 // 256 * 256
    assert "note: none: its limits do not let 4,096 tokens x 1 come" in done.err


def test_the_list_names_every_shape(command: Command) -> None:
    done = command("plan", "--list")
    assert done.status == 0
    for name in SHAPES:
        assert name in done.out
    rows = json.loads(command("plan", "--list", "--json", "-").out)["rows"]
    assert [row["name"] for row in rows] == list(SHAPES)
    assert rows[1]["source"] == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such/model"], ["no-such/model", "llama-3.1-8b"]),
        (["./nowhere"], ["no model at './nowhere'", "llama-3.1-8b"]),
        (["--formats", "int9"], ["int9", "k5v4"]),
        (["--formats", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--formats", ","], ["--formats"]),
        (["--memory", "lots"], ["--memory", "'lots'", "24GiB"]),
        (["--bandwidth", "fast"], ["--bandwidth", "'fast'", "50GB/s"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--weights-dtype", "int9"], ["--weights-dtype", "int9", "int4"]),
        (["--context", "0"], ["--context"]),
        (["llama-2-7b", "--model", "qwen3-8b"], ["two models", "qwen3-8b"]),
        (["--batch", "1,x"], ["--batch", "'x'"]),
        (["--on-full", "window"], ["on_full='window'", "max_tokens or max_bytes"]),
        (["--on-full", "offload"], ["on_full='offload'", "max_bytes"]),
        (["--on-full", "offload", "--max-bytes", "1GiB", "--max-tokens", "9"], ["not max_tokens"]),
        (["--on-full", "drop", "--max-tokens", "9"], ["'drop'", "error, window, offload"]),
        (["--max-tokens", "4", "--on-full", "window"], ["max_tokens=4", "sink_tokens=4"]),
        (["--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["--max-tokens", "4096"], ["max_tokens=4096", "8192", "--on-full window"]),
        (["--max-bytes", "much"], ["--max-bytes", "'much'"]),
        (["--max-tokens", "99", "--on-full", "window", "--static"], ["on_full='window'", "max_cache_len"]),
        (["phi-3-mini", "--formats", "int8,bnb8", "--dtype", "float64"], ["float64"]),
    ],
)
def test_bad_input_costs_one_line(command: Command, arguments: list[str], words: list[str]) -> None:
    done = command("plan", *arguments)
    assert done.status == 2
    assert done.out == ""
    (line,) = [line for line in done.err.splitlines() if line.startswith("qkv: error: ")]
    for word in words:
        assert word in line


def test_a_damaged_configuration_costs_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    done = command("plan", tmp_path)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("qkv: error: cannot read the configuration of the folder")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00")
    done = command("plan", tmp_path / "broken.gguf")
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("qkv: error: cannot read the configuration of the file")


def test_importing_qkv_does_not_import_the_plan() -> None:
    code = "import sys, qkv, qkv.cli; print([m for m in sys.modules if m in ('qkv.plan', 'qkv.shapes')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
