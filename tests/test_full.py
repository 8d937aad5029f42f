"""What happens when a cache is full: an error before anything is written, a window that goes on, or a file."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from torch.nn.functional import silu
from transformers import (
    BloomConfig,
    CpmAntConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MptConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import qkv
from qkv.attention import attention, tiled
from qkv.sinks import Turning
from qkv.spill import segment_bytes
from qkv.storage import LayerStore
from qkv.turning import turning_of
from qkv.view import KVView

SINKS, TOKENS = 4, 40
FORMATS: list[dict[str, Any]] = [
    {"format": "none"},
    {"format": "int8"},
    {"format": "int8", "equalize": False},
    {"format": "int8", "equalize": False, "residual_length": 5},
    {"format": "int4", "key_granularity": "channel", "key_group_size": 32},
]


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Feed tokens in pieces of these sizes, the last size again and again."""
    parts, at, turn = [], 0, iter(sizes)
    size = sizes[-1]
    while at < ids.shape[1]:
        size = next(turn, size)
        parts.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
    return torch.cat(parts, dim=1)


def windowed(model: PreTrainedModel, max_tokens: int = TOKENS, **options: Any) -> qkv.QKVCache:
    options.setdefault("format", "none")
    return qkv.QKVCache(model.config, max_tokens=max_tokens, on_full="window", **options)


# ---- the window ------------------------------------------------------------------------------------------------------


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """RoPE in double precision: ``x [..., dim]`` at ``positions`` that broadcast against ``x``'s other dimensions."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


@torch.no_grad()
def reference(model: PreTrainedModel, ids: torch.Tensor, max_tokens: int, sinks: int) -> torch.Tensor:
    """A Llama in which each query sees the first tokens and its last ones, at the positions 0 to ``max_tokens - 1``.

    Everything is turned anew for each query, in double precision; nothing of qkv or of transformers' attention is used.
    """
    model = copy.deepcopy(model).double()
    config, x = model.config, model.model.embed_tokens(ids)[0]
    count, heads, kv_heads, dim = len(x), config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * layer.weight

    for layer in model.model.layers:
        h, attention = norm(layer.input_layernorm, x), layer.self_attn
        q = attention.q_proj(h).view(count, heads, dim)
        k = attention.k_proj(h).view(count, kv_heads, dim).repeat_interleave(heads // kv_heads, dim=1)
        v = attention.v_proj(h).view(count, kv_heads, dim).repeat_interleave(heads // kv_heads, dim=1)
        rows = []
        for i in range(count):
            seen = torch.arange(i + 1)
            if i + 1 > max_tokens:
                seen = torch.cat([seen[:sinks], seen[i + 1 - (max_tokens - sinks) :]])
            key = turned(k[seen], torch.arange(len(seen))[:, None])
            query = turned(q[i], torch.tensor([len(seen) - 1]))
            weights = torch.einsum("hd,nhd->hn", query, key).mul(dim**-0.5).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, v[seen]).flatten())
        x = x + attention.o_proj(torch.stack(rows))
        h = norm(layer.post_attention_layernorm, x)
        x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
    return model.lm_head(norm(model.model.norm, x))[None]


@pytest.mark.parametrize("sinks", [SINKS, 0, 1])
@pytest.mark.parametrize(("fused", "sizes"), [(True, [1]), (False, [1]), (True, [200]), (True, [30, 7, 1, 40, 3])])
def test_a_full_window_equals_turning_everything_anew(
    tiny_model: PreTrainedModel, fused: bool, sizes: list[int], sinks: int
) -> None:
    ids = prompt(200)
    wanted = reference(tiny_model, ids, TOKENS, sinks)
    if fused:
        qkv.enable(tiny_model)
    cache = windowed(tiny_model, sink_tokens=sinks)
    got = logits(tiny_model, cache, ids, sizes)
    assert (got.double() - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert cache.get_seq_length() == 200
    assert [row["tokens"] for row in cache.stats()["layers"]] == [TOKENS, TOKENS]


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_pieces_of_any_size_and_single_steps_agree(
    wide_model: PreTrainedModel, options: dict[str, Any], backend: str
) -> None:
    qkv.enable(wide_model)
    ids = prompt(260)
    caches = [windowed(wide_model, backend=backend, **options) for _ in range(4)]
    steps = logits(wide_model, caches[0], ids, [1])
    for cache, sizes in zip(caches[1:], ([260], [64], [50, 1, 1, 9, 130, 3]), strict=True):
        got = logits(wide_model, cache, ids, sizes)
        assert (got - steps).abs().max() < 2e-3 * steps.abs().max()
        for a, b in zip(cache.layers, caches[0].layers, strict=True):
            assert (a.store.length, a.sinks.length) == (b.store.length, b.sinks.length)


@pytest.mark.parametrize("fused", [True, False])
def test_until_it_is_full_a_window_equals_a_cache_without_a_limit(tiny_model: PreTrainedModel, fused: bool) -> None:
    if fused:
        qkv.enable(tiny_model)
    ids = prompt(TOKENS)
    options = {"format": "int8", "equalize": False}
    plain = qkv.QKVCache(tiny_model.config, sink_tokens=SINKS, **options)
    wanted = logits(tiny_model, plain, ids, [17, 1])
    assert torch.equal(logits(tiny_model, windowed(tiny_model, **options), ids, [17, 1]), wanted)


def test_a_pass_that_the_own_attention_of_a_model_serves_shares_the_window_of_its_first_token(
    tiny_model: PreTrainedModel,
) -> None:
    ids = prompt(100)
    cache = windowed(tiny_model)
    with pytest.warns(qkv.SlowPathWarning, match="without qkv.enable"):
        first = logits(tiny_model, cache, ids, [90, 10])[:, 90]
    qkv.enable(tiny_model)
    # The prompt was longer than the window, so all of it saw all of it, as it would without a limit.
    plain = logits(tiny_model, qkv.QKVCache(tiny_model.config, "none"), ids[:, :90], [90])
    qkv.disable(tiny_model)
    assert torch.equal(logits(tiny_model, windowed(tiny_model), ids[:, :90], [90]), plain)
    assert first.isfinite().all()
    assert cache.get_seq_length() == 100


def test_a_window_keeps_its_size_however_much_comes(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    cache = windowed(tiny_model, max_tokens=160, format="int8")
    logits(tiny_model, cache, prompt(400), [100])
    before = cache.nbytes()
    logits(tiny_model, cache, prompt(512, seed=2), [128])
    assert cache.nbytes() <= before + 2 * 128 * 2 * 1 * 2 * (16 + 8)
    assert cache.stats()["tokens"] == 912
    assert all(row["tokens"] == 160 for row in cache.stats()["layers"])


def test_max_bytes_sets_the_window(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    for limit in (40_000, 60_000):
        cache = qkv.QKVCache(tiny_model.config, "int8", equalize=False, on_full="window", max_bytes=limit)
        most = 0
        for start in range(0, 600, 2):
            logits(tiny_model, cache, prompt(600)[:, start : start + 2], [2])
            most = max(most, cache.nbytes())
        assert 0.5 * limit < most <= limit
        assert cache.get_seq_length() == 600
    with pytest.raises(ValueError, match="a window of one token takes"):
        logits(tiny_model, qkv.QKVCache(tiny_model.config, "none", on_full="window", max_bytes=100), prompt(3), [3])


CHANNELS: dict[str, Any] = {"format": "int4", "key_granularity": "channel", "value_granularity": "channel"}
# What decides how memory is taken, beside the formats.
BOUNDED: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in (*qkv.formats(), *qkv.presets())},
    **{f"groups of {n}": {**CHANNELS, "key_group_size": n, "value_group_size": 64} for n in (16, 32, 128)},
    "scales per head": {"format": "int8", "granularity": "head"},
    "scales per head and groups": {"format": "fp8_e4m3", "key_granularity": "channel", "value_granularity": "head"},
}


def shaped(layers: int, heads: int, dim: int, slides: bool = False) -> Any:
    """The configuration of a model whose attention takes packed tensors, so that nothing is decoded in ``update``."""
    sizes = {"hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "head_dim": dim, "vocab_size": 8}
    config: Any = LlamaConfig(**sizes)
    if slides:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
        config = Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=90, pad_token_id=0)
    config._attn_implementation = "qkv"
    return config


def grown(cache: qkv.QKVCache, shape: tuple[int, int, int], pieces: list[int], grows: float = 1.0) -> Iterator[bool]:
    """Gives a cache random tokens in pieces, ever larger ones; stops after each layer: whether it was the last one."""
    batch, heads, dim = shape
    generator, size = torch.Generator().manual_seed(0), 1.0
    for n in pieces:
        size *= grows
        x = size * torch.randn(batch, heads, n, dim, generator=generator)
        for layer in range(len(cache.layers)):
            cache.update(x, x, layer)
            yield layer == len(cache.layers) - 1


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize("options", BOUNDED.values(), ids=BOUNDED)
def test_a_window_never_takes_more_than_its_bytes(options: dict[str, Any], slides: bool) -> None:
    """The smallest limit that is accepted, and larger ones, hold after every layer's update, however tokens come."""
    ways: list[tuple[int, int, int, dict[str, Any], list[int]]] = [
        (2, 2, 32, {}, [700, *[1] * 150]),
        (1, 1, 64, {"residual_length": 70}, [*[1] * 150, 130, *[1] * 80]),
        (3, 1, 128, {"residual_length": 5, "sink_tokens": 9}, [127, 1, 64, 7, 200, *[1] * 70]),
    ]
    for batch, heads, dim, more, pieces in ways:
        config = shaped(2, heads, dim, slides)
        with pytest.raises(ValueError, match="a window of one token takes") as refused:
            list(
                grown(qkv.QKVCache(config, on_full="window", max_bytes=1, **options, **more), (batch, heads, dim), [1])
            )
        least = int(re.findall(r"takes (\d+) bytes", str(refused.value))[0])
        for limit in (least, int(1.3 * least)):
            cache = qkv.QKVCache(config, on_full="window", max_bytes=limit, **options, **more)
            held = [cache.nbytes() for _ in grown(cache, (batch, heads, dim), pieces)]
            assert max(held) <= limit, (limit, dim)


def test_scales_that_grow_shorten_a_window_rather_than_exceed_its_bytes() -> None:
    shape, limit = (1, 2, 32), 300_000
    cache = qkv.QKVCache(shaped(2, 2, 32), "int8", granularity="head", on_full="window", max_bytes=limit)
    windows = set()
    for last in grown(cache, shape, [1500, *[1] * 150], grows=1.3):
        assert cache.nbytes() <= limit or not last
        windows.add(cache.layers[1].window)
    assert cache.layers[0].window == cache.layers[1].window == min(windows) < max(windows)


def test_a_batch_that_becomes_larger_shortens_a_window_and_a_reset_finds_it_anew() -> None:
    limit = 500_000
    cache = qkv.QKVCache(shaped(2, 2, 32), "int8", on_full="window", max_bytes=limit)
    list(grown(cache, (1, 2, 32), [900]))
    window = cache.layers[0].window
    cache.batch_select_indices(torch.tensor([0, 0]))
    list(grown(cache, (2, 2, 32), [1, 1]))
    assert cache.nbytes() <= limit
    assert cache.layers[0].window < window
    cache.reset()
    assert all(cache.nbytes() <= limit for _ in grown(cache, (1, 2, 32), [900, *[1] * 100]))
    assert cache.layers[0].window == window


@pytest.mark.parametrize("format", ["int8", "k5v4", "none"])
def test_a_batch_for_which_there_is_no_room_is_refused_before_anything_is_written(format: str) -> None:
    cache = qkv.QKVCache(shaped(2, 2, 32), format, on_full="window", max_bytes=300_000)
    list(grown(cache, (1, 2, 32), [600]))
    with pytest.raises(ValueError, match="a window of one token takes") as alone:
        list(grown(qkv.QKVCache(shaped(2, 2, 32), format, on_full="window", max_bytes=300_000), (40, 2, 32), [1]))
    cache.batch_repeat_interleave(40)
    before = [layer.store.length for layer in cache.layers]
    with pytest.raises(ValueError, match="the batch is 40 sequences by now") as refused:
        list(grown(cache, (40, 2, 32), [1]))
    assert [layer.store.length for layer in cache.layers] == before
    takes = [int(re.findall(r"takes (\d+) bytes", str(error.value))[0]) for error in (alone, refused)]
    assert takes[0] == takes[1] > 300_000
    cache.batch_select_indices(torch.tensor([0]))
    assert all(cache.nbytes() <= 300_000 for _ in grown(cache, (1, 2, 32), [1] * 100))


def test_generate_goes_on_beyond_the_window(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    ids = prompt(30)
    wanted = reference(tiny_model, ids, TOKENS, SINKS)[:, -1:].argmax(-1)
    cache = windowed(tiny_model)
    with torch.inference_mode():
        out = tiny_model.generate(
            ids, past_key_values=cache, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert torch.equal(out[:, 30:31], wanted)
    check = reference(tiny_model, out[:, :-1], TOKENS, SINKS)[:, 29:]
    best = check.max(-1).values - check.gather(2, out[:, 30:, None])[..., 0]
    assert best.max() < 1e-3


def test_padding_among_the_first_tokens_is_refused_when_they_would_be_all_that_is_left(
    tiny_model: PreTrainedModel,
) -> None:
    qkv.enable(tiny_model)
    ids, mask = prompt(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad():
        cache, plain = windowed(tiny_model), qkv.QKVCache(tiny_model.config, "none", sink_tokens=SINKS)
        got = [tiny_model(ids, attention_mask=mask, past_key_values=c).logits[:, 6:] for c in (cache, plain)]
        assert torch.equal(*got)  # nothing has left: padding is what it always is
        with pytest.raises(ValueError, match="some are padding"):
            tiny_model(ids, attention_mask=torch.cat([mask, torch.ones_like(mask)], 1), past_key_values=cache)
    cache = windowed(tiny_model)
    got = logits(tiny_model, cache, prompt(90, batch=2), [30, 1])
    alone = logits(tiny_model, windowed(tiny_model), prompt(90, batch=2)[1:], [30, 1])
    assert (got[1:] - alone).abs().max() < 1e-3


def test_without_enable_a_full_batch_is_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"qkv\.enable"):
        logits(tiny_model, windowed(tiny_model), prompt(60, batch=2), [30, 1])


def test_a_full_window_can_be_copied_reordered_and_reset(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    ids, more = prompt(70, batch=2), prompt(12, batch=2, seed=3)
    cache = windowed(tiny_model, format="int8", equalize=False)
    logits(tiny_model, cache, ids, [70])
    twin, forks = copy.deepcopy(cache), cache.fork(1)
    wanted = logits(tiny_model, cache, more, [1])
    assert torch.equal(logits(tiny_model, twin, more, [1]), wanted)
    assert torch.equal(logits(tiny_model, forks[0], more, [1]), wanted)
    cache.reset()
    assert cache.get_seq_length() == 0
    logits(tiny_model, cache, ids, [70])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(logits(tiny_model, cache, more.flip(0), [1]), wanted.flip(0))


def test_crop_goes_back_as_far_as_tokens_are_there(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    ids = prompt(90)
    cache, recorded = windowed(tiny_model), windowed(tiny_model)
    wanted = logits(tiny_model, cache, ids, [90])
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-5)
    recorded.activate_past_recording()
    logits(tiny_model, recorded, ids[:, :60], [60])
    logits(tiny_model, recorded, prompt(10, seed=5), [10])
    recorded.crop(-10)
    got = logits(tiny_model, recorded, ids[:, 60:], [1])
    assert (got - wanted[:, 60:]).abs().max() < 1e-3
    short = windowed(tiny_model)
    logits(tiny_model, short, ids[:, :20], [20])
    short.crop(-17)  # into the first tokens
    got = logits(tiny_model, short, ids[:, 3:], [1])
    assert (got - wanted[:, 3:]).abs().max() < 1e-3


def test_angles_are_those_of_the_model() -> None:
    """A key turned to one position, and then on, is the key turned to the other: of every kind that is served."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 64, "vocab_size": 32, "max_position_embeddings": 256, "pad_token_id": 0}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}),
        ("llama", {"rope_parameters": yarn}),
        ("llama", {"rope_parameters": llama3}),
        ("llama", {"rope_parameters": linear}),
        ("glm", {"head_dim": 32}),
        ("cohere", {}),
        ("gpt_neox", {}),
        ("gptj", {"n_embd": 64, "n_head": 2, "rotary_dim": 16, "n_positions": 256}),
        ("qwen3", {"head_dim": 32}),
        ("smollm3", {"no_rope_layers": [0]}),
        ("smollm3", {"no_rope_layers": [1]}),
    ]
    for kind, more in kinds:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**sizes, **more})
        model = AutoModelForCausalLM.from_config(config).eval()
        turning = turning_of(config, 0)
        token, gone = torch.tensor([[7]]), 37
        with torch.no_grad():
            keys = [
                model(token, position_ids=torch.tensor([[at]]), use_cache=True).past_key_values.layers[0].keys
                for at in (5, 5 + gone)
            ]
        here, there = keys
        if turning is not None:
            moved = here.clone()
            turning.put(turning.pairs(here) * turning.phase(gone), moved)
            here = moved
        assert (here - there).abs().max() < 1e-4 * there.abs().max(), kind
        assert (turning is None) == (more.get("no_rope_layers") == [0])


def test_models_that_a_window_cannot_serve_are_refused() -> None:
    def refused(config: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            qkv.QKVCache(config, on_full="window", max_tokens=64)

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    for rope in ("dynamic", "longrope"):
        parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
        refused(LlamaConfig(**sizes, rope_parameters=parameters), rope)
    # Biases as wide as the text: of models that also have rotary positions as a choice, and of others.
    for config in (BloomConfig(), MptConfig(), FalconConfig(alibi=True), CpmAntConfig()):
        refused(config, f"attention of {config.model_type} adds biases for the distances")
    qkv.QKVCache(FalconConfig(alibi=False), on_full="window", max_tokens=64)
    with pytest.raises(ValueError, match="model's configuration"):
        qkv.QKVCache(on_full="window", max_tokens=64)
    with pytest.raises(ValueError, match="max_cache_len"):
        qkv.QKVCache(LlamaConfig(**sizes), on_full="window", max_tokens=64, max_cache_len=100)


def test_a_table_of_positions_ends_where_it_ends() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=300, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    cache = windowed(model, max_tokens=20)
    assert logits(model, cache, prompt(64), [1]).isfinite().all()
    with pytest.raises(ValueError, match="64 positions"):  # the model's own lookup fails before that
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    assert cache.get_seq_length() == 64


def test_layers_that_slide_by_themselves_go_on_to() -> None:
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=300, sliding_window=24, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    from transformers import Gemma3ForCausalLM

    model = Gemma3ForCausalLM(config).eval()
    steps = logits(model, windowed(model), prompt(100), [1])
    qkv.enable(model)
    for sizes in ([1], [100], [31]):
        got = logits(model, windowed(model), prompt(100), sizes)
        assert (got - steps).abs().max() < 1e-3 * steps.abs().max()


def test_turning_is_exact_however_often_it_is_done() -> None:
    turning = Turning(slice(8), slice(8, 16), torch.rand(8, dtype=torch.float64))
    x = torch.randn(1, 1, 4, 16)
    pairs = turning.pairs(x)
    back = x.clone()
    for by in range(200):
        turning.put(pairs * turning.phase(by), back)
    turning.put(pairs * turning.phase(0), back)
    assert torch.equal(back, x)


def test_perplexity_stays_flat_far_beyond_the_window(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    from conftest import PROSE

    from qkv_eval.window import WindowSettings, run

    settings = WindowSettings(PROSE, ("window", "no-sinks"), window=64, tokens=448, block=64, chunk=64)
    kept, gone = run(*smollm2, settings)["rows"]
    late = torch.tensor(kept["blocks"][2:]).log().mean().exp() / kept["blocks"][1]
    assert 0.5 < late < 1.5
    # Without the first tokens it goes wrong at once.
    assert torch.tensor(gone["blocks"][2:]).log().mean() > torch.tensor(kept["blocks"][2:]).log().mean() + 0.5


# ---- an error --------------------------------------------------------------------------------------------------------


def state(cache: qkv.QKVCache) -> list[tuple[Any, ...]]:
    return [(s.length, s.version, s.changes, s.nbytes(), s.shape) for s in (layer.store for layer in cache.layers)]


def test_too_many_tokens_are_refused_before_anything_is_written(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, max_tokens=50)
    logits(tiny_model, cache, prompt(48), [40, 1])
    before = state(cache)
    with pytest.raises(ValueError, match=r"holds 48 tokens \(\d+ bytes\), 3 more were given, and max_tokens=50"):
        logits(tiny_model, cache, prompt(3), [3])
    assert state(cache) == before
    logits(tiny_model, cache, prompt(2), [2])
    cache.crop(-10)
    logits(tiny_model, cache, prompt(10), [10])


@pytest.mark.parametrize(
    "options",
    [*FORMATS, {"format": "int8", "residual_length": 70, "sink_tokens": 3}, {"format": "int4_rot", "group_size": 16}],
    ids=str,
)
def test_bytes_are_predicted_to_the_byte(wide_model: PreTrainedModel, options: dict[str, Any]) -> None:
    """With a limit of just what a cache without one takes the tokens are accepted; with one byte less they are not."""
    qkv.enable(wide_model)
    ids = prompt(600)
    for sizes in ([100, 1], [300, 7, 1, 130], [600]):
        plain, caches = qkv.QKVCache(wide_model.config, **options), {}
        at, most = 0, 0
        turn = iter(sizes)
        size = sizes[-1]
        while at < 600:
            size = next(turn, size)
            grows = logits(wide_model, plain, ids[:, at : at + size], [size]) is not None and plain.nbytes() > most
            if grows:
                most = plain.nbytes()
                for less in (0, 1):
                    cache = (
                        copy.deepcopy(caches["last"])
                        if "last" in caches
                        else qkv.QKVCache(wide_model.config, max_bytes=1 << 30, **options)
                    )
                    cache._limits.max_bytes, cache._limits._passed = most - less, None
                    before = state(cache)
                    if less:
                        with pytest.raises(ValueError, match=f"it would take {most}, and max_bytes={most - 1}"):
                            logits(wide_model, cache, ids[:, at : at + size], [size])
                        assert state(cache) == before or at == 0
                    else:
                        logits(wide_model, cache, ids[:, at : at + size], [size])
                        assert cache.nbytes() == most
            caches["last"] = copy.deepcopy(plain)
            caches["last"]._limits = qkv.QKVCache(wide_model.config, max_bytes=1 << 30, **options)._limits
            at += size
            if at > 300 and size == 1:
                break


def test_a_cache_fills_up_to_its_bytes_and_no_further(tiny_model: PreTrainedModel) -> None:
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, "int8", max_bytes=60_000)
    with pytest.raises(ValueError, match="max_bytes=60000"):
        logits(tiny_model, cache, prompt(2000), [20])
    assert 40_000 < cache.nbytes() <= 60_000
    assert len({layer.store.length for layer in cache.layers}) == 1
    # Beams take more: counted anew.
    small = qkv.QKVCache(tiny_model.config, "int8", max_bytes=200_000)
    logits(tiny_model, small, prompt(300), [300])
    small.batch_repeat_interleave(4)
    with pytest.raises(ValueError, match="max_bytes=200000"):
        logits(tiny_model, small, prompt(2000, batch=4), [1])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_full": "error"}, "needs a limit"),
        ({"on_full": "window"}, "needs a limit"),
        ({"on_full": "offload"}, "max_bytes"),
        ({"on_full": "drop", "max_tokens": 5}, "error, window, offload"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_bytes": -1}, "at least 1"),
        ({"on_full": "window", "max_tokens": 4}, "leaves nothing"),
        ({"max_tokens": 4, "offload_folder": "x"}, "offload_folder"),
        ({"on_full": "offload", "max_bytes": 100, "max_tokens": 4}, "not max_tokens"),
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(
    tiny_model: PreTrainedModel, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        qkv.QKVCache(tiny_model.config, **options)


def test_limits_are_part_of_a_configuration(tmp_path: Path, tiny_model: PreTrainedModel) -> None:
    config = qkv.CacheConfig(format="int8", max_tokens=64, on_full="window", sink_tokens=2)
    config.to_yaml(tmp_path / "a.yaml")
    cache = qkv.QKVCache(tiny_model.config, tmp_path / "a.yaml")
    assert cache.config == config
    assert cache.layers[0].window == 62


# ---- a file ----------------------------------------------------------------------------------------------------------


def offloaded(model: PreTrainedModel, folder: Path, max_bytes: int, **options: Any) -> qkv.QKVCache:
    options.setdefault("format", "int8")
    return qkv.QKVCache(model.config, on_full="offload", max_bytes=max_bytes, offload_folder=folder, **options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_cache_in_a_file_gives_the_same_bits(
    wide_model: PreTrainedModel, tmp_path: Path, options: dict[str, Any], fused: bool
) -> None:
    if fused:
        qkv.enable(wide_model)
    ids = prompt(700)
    plain = qkv.QKVCache(wide_model.config, **options)
    wanted = logits(wide_model, plain, ids, [300, 200, 150, 1])
    cache = offloaded(wide_model, tmp_path, int(0.85 * plain.nbytes()), **options)
    assert torch.equal(logits(wide_model, cache, ids, [300, 200, 150, 1]), wanted)
    assert cache.nbytes() == plain.nbytes()
    assert cache.offloaded_bytes() > 0.2 * plain.nbytes()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_cache_in_a_file_can_be_cropped_reordered_copied_and_reset(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    qkv.enable(tiny_model)
    ids, more = prompt(700, batch=2), prompt(40, batch=2, seed=3)
    plain = qkv.QKVCache(tiny_model.config)
    logits(tiny_model, plain, ids, [700])
    cache = offloaded(tiny_model, tmp_path, int(0.85 * plain.nbytes()))
    pair = (plain, cache)
    plain.reset()

    def same() -> None:
        assert torch.equal(*(logits(tiny_model, c, more, [7, 1]) for c in pair))

    for c in pair:
        logits(tiny_model, c, ids, [700])
    assert cache.offloaded_bytes() > 0
    copies = [copy.deepcopy(c) for c in pair]
    forks = [c.fork(1)[0] for c in pair]
    same()
    for c in pair:
        c.crop(-600)  # into a segment that lies in the file
    same()
    for c in pair:
        logits(tiny_model, c, ids, [700])
        c.reorder_cache(torch.tensor([1, 0]))
    assert cache.offloaded_bytes() == 0
    same()
    assert cache.offloaded_bytes() > 0
    for others in (copies, forks):
        assert torch.equal(*(logits(tiny_model, c, more, [7, 1]) for c in others))
    for c in pair:
        c.reset()
        logits(tiny_model, c, ids, [700])
    same()


def test_places_in_the_file_are_used_again(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    qkv.enable(tiny_model)
    cache = offloaded(tiny_model, tmp_path, 60_000)
    ends = []
    for _ in range(4):
        logits(tiny_model, cache, prompt(900), [300])
        ends.append(cache._limits.spill._end)
        cache.reset()
    assert ends[-1] <= ends[1]


def test_resident_memory_stays_within_the_bytes_given(tmp_path: Path) -> None:
    from qkv_eval.bench.offload import OffloadSettings, run

    model = make_tiny_model(num_hidden_layers=8, num_key_value_heads=2, num_attention_heads=2, head_dim=128)
    limit, slack = 12 << 20, 4 << 20  # what the allocator keeps of freed activations goes up and down by this
    settings = OffloadSettings("none", 3584, limit, chunk=512, steps=6, folder=str(tmp_path))
    memory, filed = run(model, settings)["rows"]
    assert memory["kv_bytes"] > 4 * limit
    assert filed["same"]
    if filed["resident_bytes"] is not None:
        assert memory["resident_bytes"] > 4 * limit  # the measure sees a cache that is there
        assert filed["resident_bytes"] <= limit + slack


def in_memory(cache: qkv.QKVCache) -> int:
    """Bytes in memory while the layer is read of which most lies in the file."""
    assert cache._limits is not None
    assert cache._limits.spill is not None
    filed = []
    for index, layer in enumerate(cache.layers):
        mapped = {id(m.segment) for m in cache._limits.spill._mapped.get(index, ()) if m.live}
        filed.append(sum(segment_bytes(s) for s in layer.store.packed if id(s) in mapped))
    return cache.nbytes() - sum(filed) + max(filed)


@pytest.mark.parametrize("grows", [1.0, 1.02])
@pytest.mark.parametrize("options", BOUNDED.values(), ids=BOUNDED)
def test_memory_stays_within_the_limit_after_every_update_or_the_pass_is_refused(
    options: dict[str, Any], grows: float, tmp_path: Path
) -> None:
    """A prompt in one pass, pieces and steps, with the smallest limit that takes the prompt."""
    shape, config = (1, 2, 32), shaped(4, 2, 32)
    pieces = [1500, *[1] * 100, 200, *[1] * 30]
    more: dict[str, Any] = {"on_full": "offload", "offload_folder": tmp_path, **options}
    with pytest.raises(ValueError, match="cannot move to the file") as refused:
        list(grown(qkv.QKVCache(config, max_bytes=1000, **more), shape, pieces))
    least = int(re.findall(r"would take (\d+) in memory", str(refused.value))[0])
    for limit in (least, int(1.5 * least)):
        cache, over = qkv.QKVCache(config, max_bytes=limit, **more), 0
        try:
            for _ in grown(cache, shape, pieces, grows):
                over = max(over, in_memory(cache))
        except ValueError:
            assert limit == least
        assert over <= limit
        assert cache.offloaded_bytes() > 0
        assert len({layer.store.length for layer in cache.layers}) == 1


def test_a_folder_that_is_not_there_is_refused(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offload_folder"):
        offloaded(tiny_model, tmp_path / "none", 60_000)


def test_fewer_bytes_than_one_layer_takes_are_refused(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    qkv.enable(tiny_model)
    cache = offloaded(tiny_model, tmp_path, 45_000)
    with pytest.raises(
        ValueError, match=r"\d+ in memory.*max_bytes=45000; \d+ bytes cannot move .* and \d+ of one layer"
    ):
        logits(tiny_model, cache, prompt(1500), [50])
    lengths = {layer.store.length for layer in cache.layers}
    assert len(lengths) == 1
    assert min(lengths) > 300
    before = state(cache)
    with pytest.raises(ValueError, match="cannot move"):
        logits(tiny_model, cache, prompt(900), [900])
    assert state(cache) == before


# ---- prompts in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", [None, "window"])
def test_the_peak_of_a_prompt_in_pieces_is_the_cache_and_a_bound_of_its_own(
    on_full: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkv_eval.bench.peak import TensorMemory

    model = make_tiny_model(max_position_embeddings=8192)
    qkv.enable(model)
    monkeypatch.setattr(tiled, "TILE", 256)
    above = {}
    for length in (1024, 4096):
        ids, memory = prompt(length), TensorMemory()
        options: dict[str, Any] = {"on_full": "window", "max_tokens": 260} if on_full else {}
        cache = qkv.QKVCache(model.config, "int8", equalize=False, **options)
        with torch.inference_mode():
            for start in range(0, length, 128):
                with memory.part("prompt"):
                    model(ids[:, start : start + 128], past_key_values=cache, logits_to_keep=1)
        above[length] = memory.peak - cache.nbytes()
    assert above[4096] <= above[1024] + 100_000, above


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, causal: bool, softcap: float | None, masked: bool
) -> None:
    monkeypatch.setattr(tiled, "TILE", 64)
    store = LayerStore(qkv.CacheConfig("int8", equalize=False))
    store.append(torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16))
    view, query = KVView(store), torch.randn(2, 6, 50, 16)
    mask = torch.rand(2, 1, 50, 300) > 0.5 if masked else None
    if mask is not None:
        mask[0, 0, 3] = False  # a row that sees nothing
    for sinks in (None, torch.randn(6)):
        assert tiled.serves(query, view)
        wanted = attention(query, view, mask, None, causal, softcap, sinks, "reference")
        assert (attention(query, view, mask, None, causal, softcap, sinks) - wanted).abs().max() < 2e-6


def test_a_static_window_gives_the_memory_of_a_long_prompt_back() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=300, sliding_window=200, max_position_embeddings=8192,
    )  # fmt: skip
    model = qkv.enable(MistralForCausalLM(config).eval())
    growing, static = (qkv.QKVCache(config, "int8", equalize=False, max_cache_len=n) for n in (None, 6000))
    for cache in (growing, static):
        logits(model, cache, prompt(4000), [4000])
    assert static.nbytes() <= 2.5 * growing.nbytes()
    held = static.nbytes()
    for _ in range(300):
        logits(model, static, prompt(1), [1])
        assert static.nbytes() == held
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, static, prompt(500), [500])
    assert static.nbytes() <= held
