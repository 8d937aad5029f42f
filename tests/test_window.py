"""``on_full="window"``: the first tokens and the last ones stay, and positions go on as if none had left."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from filling import BOUNDED, FORMATS, SINKS, TOKENS, grown, logits, prompt, shaped, windowed
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
from qkv.sinks import Turning
from qkv.turning import turning_of


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
