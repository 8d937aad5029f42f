"""The static layout, and torch.compile over it: no new memory, no new graph, and the results of the growing layout."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from families import FAMILIES, VOCABULARY
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

import qkv
from qkv.layers import QKVLayer
from qkv.named_caches import as_argument

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

INT8 = {"format": "int8", "equalize": False}
SETUPS: list[dict[str, Any]] = [
    {"format": "none"},
    INT8,
    {"format": "fp8_e4m3", "sink_tokens": 3, "residual_length": 5},
    {**INT8, "granularity": "head", "residual_length": 70, "sink_tokens": 2},
    {"format": "int8"},
    {
        "format": "int4_rot",
        "key_format": "int4",
        "key_granularity": "channel",
        "key_group_size": 32,
        "sink_tokens": 3,
        "residual_length": 5,
    },
    {"format": "k5v4"},
]
# Every set-up in a plain model and in one with windows; a few in others, and a few without the fused attention.
PAIRS = [(name, setup, True) for name in ("Llama", "Gemma 3") for setup in SETUPS]
PAIRS += [(name, SETUPS[i], True) for name in ("Mistral", "Llama 4", "LFM2") for i in (0, 4, 5)]
PAIRS += [(name, SETUPS[i], False) for name in ("Llama", "Gemma 3") for i in (0, 2, 4)]
PIECES = [20, 9, *[1] * 70, 3, 4, 40, *[1] * 9]  # past the 128 tokens after which keys are equalized
ROOM = 224


def ids(pieces: list[int], rows: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (rows, sum(pieces)), generator=generator).split(pieces, dim=1)


@torch.no_grad()
def logits(model: Any, cache: Any, pieces: list[int] = PIECES) -> torch.Tensor:
    return torch.cat([model(x, **as_argument(cache)).logits for x in ids(pieces)], dim=1)


def addresses(cache: qkv.QKVCache) -> list[int]:
    """Where the memory of the cache lies."""
    return [
        tensor.data_ptr()
        for layer in cache.layers
        if isinstance(layer, QKVLayer)
        for segment in (*layer.store.segments(), *layer.store._empty)
        for plane in segment.planes()
        for tensor in plane.tensors()
    ]


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "setup", "fused"), PAIRS, ids=str)
def test_it_gives_what_the_growing_layout_gives(name: str, setup: dict[str, Any], fused: bool) -> None:
    model = FAMILIES[name]().double()
    if fused:
        qkv.enable(model)
    setup = {**setup, "backend": "reference"}
    static = logits(model, qkv.QKVCache(model.config, max_cache_len=ROOM, **setup))
    growing = logits(model, qkv.QKVCache(model.config, **setup))
    # A mask as wide as the room changes how torch sums; some families compute positions in float32.
    torch.testing.assert_close(static, growing, rtol=0, atol=2e-5 if name == "Llama 4" else 1e-9)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Cohere 2"])
def test_none_equals_static_cache_bit_for_bit(name: str) -> None:
    model = FAMILIES[name]()
    if "Cohere" in name:  # sliding layers: theirs are as wide as the window
        model.config.layer_types = ["full_attention"] * 2
    ours, theirs = qkv.QKVCache(model.config, "none", max_cache_len=ROOM), StaticCache(model.config, ROOM)
    assert torch.equal(logits(model, ours), logits(model, theirs))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3"])
def test_memory_is_taken_once(name: str, setup: dict[str, Any]) -> None:
    model = qkv.enable(FAMILIES[name]())
    room = 700
    cache = qkv.QKVCache(model.config, max_cache_len=room, **setup)
    logits(model, cache, [300, *[1] * 30])
    held, size = sorted(addresses(cache)), cache.nbytes()
    for pieces in ([1] * 180, [7] * 20):
        logits(model, cache, pieces)
        assert sorted(addresses(cache)) == held
        assert cache.nbytes() == size
    assert cache.get_seq_length() == 300 + 30 + 180 + 140


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_tokens_beyond_the_room_are_refused_and_nothing_is_written(setup: dict[str, Any]) -> None:
    model = qkv.enable(make_tiny_model())
    cache = qkv.QKVCache(model.config, max_cache_len=100, **setup)
    logits(model, cache, [90])
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="holds 90 of at most 100 tokens: 11 more do not fit"):
        logits(model, cache, [11])
    assert cache.stats() == twin.stats()
    assert torch.equal(logits(model, cache, [4, *[1] * 6]), logits(model, twin, [4, *[1] * 6]))
    with pytest.raises(ValueError, match="max_cache_len"):
        logits(model, cache, [1])
    cache.crop(-1)
    logits(model, cache, [1])


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_crop_reset_reorder_and_copies_equal_those_of_the_growing_layout(name: str, setup: dict[str, Any]) -> None:
    model = qkv.enable(FAMILIES[name]().double())

    def run(max_cache_len: int | None) -> torch.Tensor:
        cache = qkv.QKVCache(model.config, max_cache_len=max_cache_len, backend="reference", **setup)
        logits(model, cache, [33])
        cache.reset()
        cache.activate_past_recording()
        out = [logits(model, cache, [138, 1, 1])]
        for removed, pieces in ((60, [1, 50]), (2, [3, 1]), (1, [1])):
            cache.crop(-removed)
            out.append(logits(model, cache, pieces))
        cache.reorder_cache(torch.tensor([1, 0]))
        out.append(logits(model, cache, [2, 1]))
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            out.append(logits(model, twin, [1, 2]))
        out.append(logits(model, cache, [1, 2]))
        assert torch.equal(out[-1], out[-2])
        assert torch.equal(out[-1], out[-3])
        return torch.cat(out, dim=1)

    torch.testing.assert_close(run(ROOM), run(None), rtol=0, atol=1e-9)


def test_it_answers_what_static_cache_answers() -> None:
    model = make_tiny_model()
    ours, theirs = qkv.QKVCache(model.config, "int8", max_cache_len=ROOM), StaticCache(model.config, ROOM)
    for pieces in ([5], [1], [20], [120]):
        for cache in (ours, theirs):
            assert cache.is_compileable
            assert cache.get_max_length() == ROOM
            assert [cache.get_mask_sizes(n, 0) for n in (1, 3)] == [(ROOM, 0)] * 2
            logits(model, cache, pieces)
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
    assert not qkv.QKVCache(model.config, "int8").is_compileable


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_a_max_cache_len_that_is_no_length_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_cache_len"):
        qkv.QKVCache(make_tiny_model().config, "int8", max_cache_len=value)
    with pytest.raises(ValueError, match="model's configuration"):
        qkv.QKVCache(None, "int8", max_cache_len=5)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def steps(call: Any, cache: Any, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([call(input_ids=x, **as_argument(cache)).logits for x in tokens], dim=1)


@pytest.mark.parametrize(("name", "setup", "fused"), PAIRS, ids=str)
def test_one_graph_serves_every_step_and_every_cache(name: str, setup: dict[str, Any], fused: bool) -> None:
    """The whole forward in one graph, compiled once; the same numbers as without a compiler."""
    model = FAMILIES[name]()
    if fused:
        qkv.enable(model)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    for _ in range(2):  # a second cache takes the same graph
        static, plain = (qkv.QKVCache(model.config, max_cache_len=ROOM, **setup) for _ in range(2))
        prompt = ids([110])
        tokens = ids([1] * 40)
        assert torch.equal(steps(model, static, prompt), steps(model, plain, prompt))
        actual, expected = steps(compiled, static, tokens), steps(model, plain, tokens)
        # Unfused, torch's attention may be another kernel in a graph, and make another code.
        torch.testing.assert_close(actual, expected, rtol=0, atol=0 if fused else 1e-3 * float(expected.abs().max()))
        assert static.get_seq_length() == 150
        served = {row["backend"] for row in static.stats()["layers"]} - {"untouched"}
        assert served == ({"cpu"} if fused else {"decoded"})
        assert static.stats() == plain.stats()
    assert counter.frame_count == 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_prompt_can_be_compiled_too(fused: bool) -> None:
    model = FAMILIES["Gemma 3"]()
    if fused:
        qkv.enable(model)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    caches = [qkv.QKVCache(model.config, **INT8, residual_length=4, max_cache_len=ROOM) for _ in range(2)]
    tokens = ids([40, 1, 1, 12, 1])
    actual, expected = steps(compiled, caches[0], tokens), steps(model, caches[1], tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_default_compiler_gives_the_same_logits() -> None:
    model = qkv.enable(make_tiny_model())
    compiled = torch.compile(model.forward, fullgraph=True)
    static, plain = (qkv.QKVCache(model.config, "k5v4", max_cache_len=ROOM) for _ in range(2))
    tokens = ids([150, *[1] * 12])
    actual, expected = steps(compiled, static, tokens[:3]), steps(model, plain, tokens[:3])
    held = sorted(addresses(static))
    with torch._dynamo.config.patch(error_on_recompile=True):
        actual = torch.cat([actual, steps(compiled, static, tokens[3:])], dim=1)
    expected = torch.cat([expected, steps(model, plain, tokens[3:])], dim=1)
    # The compiler sums in another order than torch, and makes another code now and then.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    assert sorted(addresses(static)) == held


def test_a_model_that_uses_the_keys_itself_gets_them_decoded_in_the_graph() -> None:
    """DeepSeek-V3 makes keys and values out of the latents that it has in the cache."""
    model = qkv.enable(FAMILIES["DeepSeek-V3"]())
    compiled = torch.compile(model.forward, backend="eager")
    caches = [qkv.QKVCache(model.config, **INT8, max_cache_len=ROOM) for _ in range(2)]
    tokens = ids([24, 1, 1, 1])
    actual, expected = steps(compiled, caches[0], tokens), steps(model, caches[1], tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_full_cache_is_an_error_in_a_graph_too() -> None:
    model = qkv.enable(make_tiny_model())
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = qkv.QKVCache(model.config, "int8", max_cache_len=26)
    steps(compiled, cache, ids([24, 1, 1]))
    with pytest.raises(ValueError, match="26 of at most 26"):
        steps(compiled, cache, ids([1]))


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_generate_compiles_and_gives_the_text_of_the_growing_layout(name: str) -> None:
    model = qkv.enable(FAMILIES[name]())
    prompt = ids([120])[0]
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    expected = model.generate(prompt, **as_argument(qkv.QKVCache(model.config, "int8")), **options)
    config = CompileConfig(backend="eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    cache = qkv.QKVCache(model.config, "int8", max_cache_len=ROOM)
    actual = model.generate(prompt, **as_argument(cache), compile_config=config, **options)
    assert torch.equal(actual, expected)


def test_a_growing_cache_works_under_a_compiler_that_breaks_the_graph() -> None:
    setup = {**INT8, "residual_length": 5}
    model = qkv.enable(make_tiny_model(num_hidden_layers=1))
    compiled = torch.compile(model.forward, backend="eager")
    tokens = ids([24, 1, 1])
    actual = steps(compiled, qkv.QKVCache(model.config, **setup), tokens)
    expected = steps(model, qkv.QKVCache(model.config, **setup), tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# ---- offloading ------------------------------------------------------------------------------------------------------


def test_offload_and_prefetch_change_nothing(tiny_model: PreTrainedModel) -> None:
    """On the CPU there is nowhere to go; transformers asks all the same."""
    caches = [qkv.QKVCache(tiny_model.config, **INT8, residual_length=3), DynamicCache(config=tiny_model.config)]
    for cache in caches:
        logits(tiny_model, cache, [9])
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        logits(tiny_model, cache, [1])
        assert cache.get_seq_length() == 10


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_memory_that_moves_holds_the_same_tokens(setup: dict[str, Any]) -> None:
    """What offloading does, with a copy in the place of the other device."""
    model = qkv.enable(make_tiny_model())
    moving, resting = (qkv.QKVCache(model.config, **setup) for _ in range(2))
    for pieces in ([90], [1], [60], [1, 1], [5], [1]):
        view = moving.view(0) if moving.get_seq_length() else None
        before = view.decode() if view is not None else ()
        for layer in moving.layers:
            layer.store._replace(torch.clone)
        if view is not None:
            assert all(torch.equal(a, b) for a, b in zip(before, view.decode(), strict=True))
        assert torch.equal(logits(model, moving, pieces), logits(model, resting, pieces))
    assert moving.stats() == resting.stats()


def test_a_view_with_its_runs_written_down_outlives_a_move() -> None:
    """The layer is taken away behind its update, before attention reads what the update gave."""
    model = qkv.enable(make_tiny_model())
    cache = qkv.QKVCache(model.config, "k5v4")
    for layer in cache.layers:
        layer.offloads = True
    logits(model, cache, [200])
    layer = cache.layers[0]
    shape = layer.store.shape
    assert shape is not None
    keys, _ = layer.update(torch.randn(2, shape[1], 1, shape[2]), torch.randn(2, shape[1], 1, shape[3]))
    held = {run.segment.key.codes.data_ptr() for run in keys.kv_view.runs()}
    layer.store._replace(torch.clone)
    assert {run.segment.key.codes.data_ptr() for run in keys.kv_view.runs()} == held


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to offload from")
def test_offloading_without_a_gpu_is_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no GPU"):
        qkv.QKVCache(tiny_model.config, "int8", offloading=True)
