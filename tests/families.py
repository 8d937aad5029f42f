"""Tiny random models of many families, offline: name -> a function that builds one.

Every model has two layers of each kind that its family mixes, small heads, and a window or chunk of 16 tokens where the
family has one, so that a prompt of a few dozen tokens goes past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

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
