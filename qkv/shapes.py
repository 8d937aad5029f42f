"""Shapes of well-known models by name, so that a cache can be planned without a download.

Each is what the ``config.json`` of the model on the hub says, as far as it decides how large weights and cache are; no
weights and no tokenizer belong to it. ``checked`` names public code in which the values were found again. A test holds
the number of parameters that comes of it against the model card, and those that transformers' configuration classes
have as defaults against these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Shape:
    """A well-known model's configuration.

    Attributes:
        source: its name on the hub, whose ``config.json`` the values are from.
        about: what is particular about its cache.
        billions: parameters as its model card states them.
        model_type: transformers' name for the kind of model.
        values: arguments of the configuration class.
        checked: where the values were found again: files of public repositories (``owner/name: path``), or a
            configuration class of transformers whose defaults they are; and what was not found there.
    """

    source: str
    about: str
    billions: float
    model_type: str
    values: Mapping[str, Any]
    checked: str

    def config(self) -> PreTrainedConfig:
        """transformers' configuration of it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, dtype="bfloat16", **self.values)


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> Any:
    return MappingProxyType(
        {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary,
            **more,
        }
    )


def _by_turns(layers: int, every: int) -> list[str]:
    """Sliding windows, and full attention in every ``every``-th layer."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


_LITGPT = "Lightning-AI/litgpt: litgpt/config.py"
_LLAMA_MODELS = "meta-llama/llama-models: models/sku_list.py (in its history)"
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "smollm2-135m": Shape(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "3 of 9 heads keep keys and values",
            0.135,
            "llama",
            _sizes(576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, **_TIED),
            checked=_LITGPT,
        ),
        "llama-2-7b": Shape(
            "meta-llama/Llama-2-7b-hf",
            "full: every head keeps keys and values",
            6.74,
            "llama",
            _sizes(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096, **_UNTIED),
            checked=_LITGPT + "; LlamaConfig but for max_position_embeddings",
        ),
        "llama-3.1-8b": Shape(
            "meta-llama/Llama-3.1-8B",
            "grouped: 8 of 32 heads",
            8.03,
            "llama",
            _sizes(4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072, **_UNTIED),
            checked=_LITGPT + "; " + _LLAMA_MODELS,
        ),
        "llama-3.1-70b": Shape(
            "meta-llama/Llama-3.1-70B",
            "grouped: 8 of 64 heads",
            70.6,
            "llama",
            _sizes(8192, 28672, 80, 64, 8, 128256, max_position_embeddings=131072, **_UNTIED),
            checked=_LITGPT + "; " + _LLAMA_MODELS,
        ),
        "llama-3.1-405b": Shape(
            "meta-llama/Llama-3.1-405B",
            "grouped: 8 of 128 heads",
            406,
            "llama",
            _sizes(16384, 53248, 126, 128, 8, 128256, max_position_embeddings=131072, **_UNTIED),
            checked=_LITGPT + "; " + _LLAMA_MODELS,
        ),
        "mistral-7b-v0.1": Shape(
            "mistralai/Mistral-7B-v0.1",
            "a window of 4,096 in every layer",
            7.24,
            "mistral",
            _sizes(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768, sliding_window=4096, **_UNTIED),
            checked=_LITGPT + "; MistralConfig; max_position_embeddings (32768) in neither of them",
        ),
        "mixtral-8x7b": Shape(
            "mistralai/Mixtral-8x7B-v0.1",
            "grouped; experts do not change the cache",
            46.7,
            "mixtral",
            _sizes(
                4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768, num_local_experts=8, sliding_window=None
            ),
            checked=_LITGPT + "; MixtralConfig but for max_position_embeddings",
        ),
        "phi-3-mini": Shape(
            "microsoft/Phi-3-mini-4k-instruct",
            "full heads of 96 channels, a window of 2,047",
            3.82,
            "phi3",
            _sizes(
                3072, 8192, 32, 32, 32, 32064, max_position_embeddings=4096, sliding_window=2047, pad_token_id=32000
            ),
            checked=_LITGPT + " (its window, 2048, counts the query); Phi3Config but for sliding_window",
        ),
        "qwen2.5-7b": Shape(
            "Qwen/Qwen2.5-7B",
            "grouped: 4 of 28 heads",
            7.61,
            "qwen2",
            _sizes(3584, 18944, 28, 28, 4, 152064, max_position_embeddings=131072, use_sliding_window=False, **_UNTIED),
            checked=_LITGPT,
        ),
        "qwen3-8b": Shape(
            "Qwen/Qwen3-8B",
            "grouped: 8 of 32 heads",
            8.19,
            "qwen3",
            _sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128, max_position_embeddings=40960, **_UNTIED),
            checked=_LITGPT,
        ),
        "gemma-2-9b": Shape(
            "google/gemma-2-9b",
            "a window of 4,096 in every other layer, heads of 256",
            9.24,
            "gemma2",
            _sizes(
                3584,
                14336,
                42,
                16,
                8,
                256000,
                head_dim=256,
                max_position_embeddings=8192,
                sliding_window=4096,
                layer_types=_by_turns(42, 2),
                **_TIED,
            ),
            checked=_LITGPT + "; google-deepmind/gemma: gemma/gm/nn/_gemma.py (Gemma2_9B)",
        ),
        "gemma-3-27b": Shape(
            "google/gemma-3-27b-pt",
            "a window of 1,024 in five of six layers (its text part)",
            27.0,
            "gemma3_text",
            _sizes(
                5376,
                21504,
                62,
                32,
                16,
                262208,
                head_dim=128,
                max_position_embeddings=131072,
                sliding_window=1024,
                layer_types=_by_turns(62, 6),
                **_TIED,
            ),
            checked=_LITGPT
            + "; google-deepmind/gemma: gemma/gm/nn/_gemma.py (Gemma3_27B); Gemma3TextConfig (vocab_size, padded)",
        ),
        "gpt-oss-20b": Shape(
            "openai/gpt-oss-20b",
            "a window of 128 in every other layer",
            20.9,
            "gpt_oss",
            _sizes(
                2880,
                2880,
                24,
                64,
                8,
                201088,
                head_dim=64,
                max_position_embeddings=131072,
                sliding_window=128,
                num_local_experts=32,
                num_experts_per_tok=4,
                layer_types=_by_turns(24, 2),
                **_UNTIED,
            ),
            checked="AI-Hypercomputer/maxtext: src/maxtext/configs/models/gpt-oss-20b.yml",
        ),
        "gpt-oss-120b": Shape(
            "openai/gpt-oss-120b",
            "a window of 128 in every other layer",
            117,
            "gpt_oss",
            _sizes(
                2880,
                2880,
                36,
                64,
                8,
                201088,
                head_dim=64,
                max_position_embeddings=131072,
                sliding_window=128,
                num_local_experts=128,
                num_experts_per_tok=4,
                layer_types=_by_turns(36, 2),
                **_UNTIED,
            ),
            checked="openai/gpt-oss: gpt_oss/torch/model.py (ModelConfig); GptOssConfig",
        ),
        "deepseek-v3": Shape(
            "deepseek-ai/DeepSeek-V3",
            "latent attention: 512 and 64 numbers a token",
            671,
            "deepseek_v3",
            _sizes(
                7168,
                18432,
                61,
                128,
                128,
                129280,
                max_position_embeddings=163840,
                moe_intermediate_size=2048,
                n_routed_experts=256,
                n_shared_experts=1,
                num_experts_per_tok=8,
                first_k_dense_replace=3,
                n_group=8,
                topk_group=4,
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                **_UNTIED,
            ),
            checked="deepseek-ai/DeepSeek-V3: inference/configs/config_671B.json; "
            "AI-Hypercomputer/maxtext: src/maxtext/configs/models/deepseek3-671b.yml (max_position_embeddings)",
        ),
        "qwen3-next-80b": Shape(
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "linear attention in three of four layers",
            80,
            "qwen3_next",
            _sizes(
                2048,
                5120,
                48,
                16,
                2,
                151936,
                head_dim=256,
                max_position_embeddings=262144,
                linear_num_key_heads=16,
                linear_num_value_heads=32,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_conv_kernel_dim=4,
                num_experts=512,
                num_experts_per_tok=10,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
                **_UNTIED,
            ),
            checked="AI-Hypercomputer/maxtext: src/maxtext/configs/models/qwen3-next-80b-a3b.yml; "
            "xorbitsai/inference: doc/source/models/builtin/llm/qwen3-next-instruct.rst (max_position_embeddings); "
            "intermediate_size, of which no layer makes use, in neither of them",
        ),
        "jamba-v0.1": Shape(
            "ai21labs/Jamba-v0.1",
            "Mamba in seven of eight layers",
            52,
            "jamba",
            _sizes(
                4096,
                14336,
                32,
                32,
                8,
                65536,
                max_position_embeddings=262144,
                attn_layer_period=8,
                attn_layer_offset=4,
                expert_layer_period=2,
                expert_layer_offset=1,
                num_experts=16,
                num_experts_per_tok=2,
                mamba_d_state=16,
                mamba_d_conv=4,
                mamba_expand=2,
                mamba_dt_rank=256,
                **_UNTIED,
            ),
            checked="JambaConfig",
        ),
        "bamba-9b": Shape(
            "ibm-ai-platform/Bamba-9B-v1",
            "Mamba-2 in all but three of 32 layers",
            9.78,
            "bamba",
            _sizes(
                4096,
                14336,
                32,
                32,
                8,
                128256,
                max_position_embeddings=262144,
                attn_layer_indices=[9, 18, 27],
                mamba_n_heads=128,
                mamba_d_head=64,
                mamba_n_groups=1,
                mamba_d_state=128,
                mamba_d_conv=4,
                mamba_expand=2,
                **_UNTIED,
            ),
            checked="huggingface/transformers: src/transformers/models/bamba/convert_mamba_ssm_checkpoint.py "
            "(mamba_d_state); BambaConfig (max_position_embeddings; the model card speaks of 4,096 tokens); the layers "
            "with attention and vocab_size in copies of its training code (mamba_9.8b) without a name",
        ),
    }
)
