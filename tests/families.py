"""Tiny random models of many families, offline: name -> a function that builds one.

Every model has two layers of each kind that its family mixes, small heads, and a window or chunk of 16 tokens where the
family has one, so that a prompt of a few dozen tokens goes past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import qkv
from qkv.named_caches import as_argument

VOCABULARY = 99
WINDOW = 16
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Older configurations name the sizes in their own way and refuse ours.
_OWN_NAMES = tuple(name for name in _SIZES if not name.endswith("_token_id") and name != "vocab_size")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def _family(config: str, model: str, without: tuple[str, ...] = (), **sizes: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        values = {name: value for name, value in _SIZES.items() if name not in without}
        made = getattr(transformers, config)(**{**values, **sizes})
        return getattr(transformers, model)._from_config(made).eval()

    return build


IMAGE_TOKEN = 98
IMAGE_TOKENS = 4
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 7,
}


def _llava() -> PreTrainedModel:
    torch.manual_seed(0)
    vision, text = transformers.CLIPVisionConfig(**_VISION), transformers.LlamaConfig(**_SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration._from_config(config).eval()


def _gemma3_with_images() -> PreTrainedModel:
    """Image tokens see each other in both directions."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        text_config=transformers.Gemma3TextConfig(**_SIZES, **_BOTH, head_dim=16, query_pre_attn_scalar=16),
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=97,
        eoi_token_index=96,
    )
    return transformers.Gemma3ForConditionalGeneration._from_config(config).eval()


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": _family("LlamaConfig", "LlamaForCausalLM"),
    "Mistral": _family("MistralConfig", "MistralForCausalLM", sliding_window=WINDOW),
    "Mixtral": _family("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, sliding_window=None),
    "Qwen2": _family("Qwen2Config", "Qwen2ForCausalLM"),
    "Qwen2-MoE": _family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=32, **_EXPERTS),
    "Qwen3": _family("Qwen3Config", "Qwen3ForCausalLM", head_dim=16),
    "Qwen3-Next": _family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        head_dim=16,
        num_hidden_layers=4,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        **_EXPERTS,
    ),
    "Falcon-H1": _family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
    ),
    "Bamba": _family(
        "BambaConfig",
        "BambaForCausalLM",
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
    ),
    "Inkling": _family(
        "InklingTextConfig",
        "InklingForCausalLM",
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=WINDOW,
        layer_types=["hybrid_sliding", "hybrid"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        mlp_layer_types=["dense", "dense"],
        d_rel=4,
        rel_extent=32,
    ),
    "LFM2": _family("Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
    "Jamba": _family(
        "JambaConfig",
        "JambaForCausalLM",
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "Gemma 2": _family("Gemma2Config", "Gemma2ForCausalLM", head_dim=16, query_pre_attn_scalar=16, **_BOTH),
    "Gemma 3": _family("Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=16, query_pre_attn_scalar=16, **_BOTH),
    "Gemma 3 with images": _gemma3_with_images,
    "Gemma 4": _family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        head_dim=16,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Phi-3": _family("Phi3Config", "Phi3ForCausalLM", hidden_size=384, num_key_value_heads=4),
    "Phi": _family("PhiConfig", "PhiForCausalLM"),
    "GPT-2": _family("GPT2Config", "GPT2LMHeadModel", _OWN_NAMES, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "GPT-NeoX": _family("GPTNeoXConfig", "GPTNeoXForCausalLM", ("num_key_value_heads",)),
    "GPT-J": _family(
        "GPTJConfig", "GPTJForCausalLM", _OWN_NAMES, n_embd=64, n_layer=2, n_head=4, n_positions=512, rotary_dim=8
    ),
    "OPT": _family(
        "OPTConfig",
        "OPTForCausalLM",
        ("intermediate_size", "num_key_value_heads"),
        ffn_dim=96,
        word_embed_proj_dim=64,
    ),
    "Bloom": _family(
        "BloomConfig",
        "BloomForCausalLM",
        tuple(name for name in _OWN_NAMES if name != "hidden_size"),
        n_layer=2,
        n_head=4,
    ),
    "MPT": _family("MptConfig", "MptForCausalLM", _OWN_NAMES, d_model=64, n_heads=4, n_layers=2, max_seq_len=512),
    "Falcon": _family(
        "FalconConfig",
        "FalconForCausalLM",
        ("num_key_value_heads", "intermediate_size"),
        multi_query=True,
        new_decoder_architecture=False,
    ),
    "Falcon (ALiBi)": _family(
        "FalconConfig",
        "FalconForCausalLM",
        ("num_key_value_heads", "intermediate_size"),
        alibi=True,
        multi_query=False,
        new_decoder_architecture=False,
    ),
    "StableLM": _family("StableLmConfig", "StableLmForCausalLM", partial_rotary_factor=0.25),
    "Cohere 2": _family("Cohere2Config", "Cohere2ForCausalLM", **_BOTH),
    "OLMo 2": _family("Olmo2Config", "Olmo2ForCausalLM"),
    "Granite": _family("GraniteConfig", "GraniteForCausalLM"),
    "StarCoder2": _family("Starcoder2Config", "Starcoder2ForCausalLM", sliding_window=WINDOW),
    "Llama 4": _family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        head_dim=16,
        num_local_experts=2,
        intermediate_size_mlp=96,
        attention_chunk_size=WINDOW,
        num_hidden_layers=4,
    ),
    "gpt-oss": _family(
        "GptOssConfig", "GptOssForCausalLM", head_dim=16, num_local_experts=2, num_experts_per_tok=1, **_BOTH
    ),
    "DeepSeek-V3": _family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "SmolLM3": _family("SmolLM3Config", "SmolLM3ForCausalLM"),
    "GLM-4": _family("Glm4Config", "Glm4ForCausalLM", head_dim=16),
    "Llava": _llava,
    "T5": _family(
        "T5Config",
        "T5ForConditionalGeneration",
        _OWN_NAMES,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "BART": _family(
        "BartConfig",
        "BartForConditionalGeneration",
        tuple(name for name in _OWN_NAMES if name != "max_position_embeddings"),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    ),
    "Whisper": _family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _OWN_NAMES,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=40,
        max_target_positions=200,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
}

# What a model is run on: pieces that go past the window, in one pass each.
PIECES = [20, 9, *[1] * 19]


def make_cache(model: PreTrainedModel, format: str | None, **options: Any) -> Any:
    def one() -> Any:
        if format is None:
            return DynamicCache(config=model.config)
        return qkv.QKVCache(model.config, format, **options)

    return EncoderDecoderCache(one(), one()) if model.config.is_encoder_decoder else one()


def decoder_part(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


@torch.no_grad()
def encoded(model: PreTrainedModel) -> dict[str, Any]:
    if not model.config.is_encoder_decoder:
        return {}
    torch.manual_seed(3)
    if model.config.model_type == "whisper":
        return {"encoder_outputs": model.get_encoder()(torch.randn(2, 8, 80, dtype=model.dtype))}
    return {"encoder_outputs": model.get_encoder()(torch.randint(3, VOCABULARY, (2, 12)))}


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, pieces: list[int] = PIECES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, sum(pieces)), generator=generator)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    extra = encoded(model)
    out = []
    for x in ids.split(pieces, dim=1):
        image = with_image(model, x, bool(out)) if "vision_config" in model.config.sub_configs else {}
        out.append(model(**{name: x, **extra, **image}, **as_argument(cache), use_cache=True).logits)
    return torch.cat(out, dim=1)


def with_image(model: PreTrainedModel, ids: torch.Tensor, later: bool) -> dict[str, torch.Tensor]:
    """Inputs with the tokens of an image in the first piece, and its pixels."""
    ids = torch.where(ids >= IMAGE_TOKEN - 2, 3, ids)
    if later:
        return {"input_ids": ids}
    ids[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 14, 14, generator=torch.Generator().manual_seed(4)).to(model.dtype)
    inputs = {"input_ids": ids, "pixel_values": pixels}
    return inputs | ({"token_type_ids": (ids == IMAGE_TOKEN).long()} if model.config.model_type == "gemma3" else {})
