"""Plans: sizes known from a configuration are those that caches have in the end, to the byte."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, logits, make_cache
from planning import (
    CHANNELS,
    DIM,
    EVERY,
    HEADS,
    ROWS,
    WAYS,
    bounded,
    filled,
    held,
    planned,
    small_config,
)
from transformers import (
    AutoConfig,
    PreTrainedModel,
)

import qkv
from qkv.cli.options import parse_bytes
from qkv.model_shape import Call, ModelShape, meta_model
from qkv.plan import CachePlan
from qkv.plan_rows import largest, plan_row
from qkv.shapes import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


@pytest.fixture(scope="module", params=["full", "sliding and full"])
def small(request: pytest.FixtureRequest) -> ModelShape:
    return ModelShape.of(small_config(request.param), "float32")


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
