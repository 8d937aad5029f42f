"""By which angles a model's positions turn its keys: asked of the model's own code, for caches that forget."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from qkv.rotary import rotary_of
from qkv.sinks import Turning

# Frequencies that depend on how long the text is: keys of different steps were turned differently.
_CHANGING = ("dynamic", "longrope")
# Models whose code turns keys only in layers with a sliding window, where the model has such.
_TURNED_WHERE_SLIDING = {
    "afmoe", "cohere2", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1",
}  # fmt: skip
# Models whose keys are turned in a way that the configuration does not tell.
_OWN_WAYS = {"cohere2_moe", "deepseek_v2", "llama4", "llama4_text", "mistral_large4", "zamba2"}
# What their code calls the function that turns tells nothing about pairs, but they are halves.
_HALVES = {"gpt_oss"}
# What configurations of models call the number of their biases for distances.
_BIASES = ("relative_attention_num_buckets", "position_bias_num_buckets", "rel_extent")


def turning_of(config: Any, layer: int) -> Turning | None:
    """How positions turn the keys of a layer; None where they do not.

    Args:
        config: the model's configuration (of its text part).
        layer: the layer's index.

    Raises:
        ValueError: positions enter in another way, or in one that is not known or changes with the length of the text.
    """
    kind, held = config.model_type, vars(config)
    if kind in _OWN_WAYS:
        raise _refusal(f"how {kind} turns its keys by their positions is not known to it")
    _check_biases(config)
    if _leaves_out(config, layer):
        return None
    rotary = rotary_of(config, layer)
    if rotary is None:
        _check_learned(config)
        return None
    parameters = held.get("rope_parameters") or {}
    layer_type = held["layer_types"][layer] if held.get("layer_types") else None
    parameters = parameters.get(layer_type) or parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type in _CHANGING:
        raise _refusal(f"the model's positions are of type {rope_type!r}, whose frequencies change with the length")
    if "mrope_section" in parameters:
        raise _refusal("the model's positions are of several dimensions (mrope)")
    module = _modeling(config)
    if rotary.interleaved or hasattr(module, "rotate_half") or kind in _HALVES:
        frequencies = _frequencies(config, module, layer_type)
    else:
        raise _refusal(f"which channels of its keys {kind} turns together is not known")
    start, count = rotary.start, len(frequencies)
    if rotary.interleaved:
        end = start + 2 * count
        return Turning(slice(start, end, 2), slice(start + 1, end, 2), frequencies)
    return Turning(slice(start, start + count), slice(start + count, start + 2 * count), frequencies)


def positions_of(config: Any) -> int | None:
    """Positions that a model with a table of them has; None for a model without one."""
    if rotary_of(config, 0) is not None:
        return None
    return getattr(config, "max_position_embeddings", None)


def _leaves_out(config: Any, layer: int) -> bool:
    """Whether the keys of a layer are not turned in a model that turns those of others."""
    held = vars(config)
    used = held.get("no_rope_layers")  # 1: turned
    if used:
        return not used[layer]
    kinds = held.get("layer_types")
    if config.model_type not in _TURNED_WHERE_SLIDING or not held.get("sliding_window"):
        return False
    return not kinds or kinds[layer] != "sliding_attention"


def _check_biases(config: Any) -> None:
    """Raises ValueError where the model tells attention by biases how far tokens are apart, as if none had left."""
    held = vars(config)
    told = held.get("alibi") or config.model_type in ("bloom", "mpt") or any(name in held for name in _BIASES)
    if told:
        raise _refusal(
            f"the attention of {config.model_type} adds biases for the distances between all tokens of the text (ALiBi "
            "or relative positions)"
        )


def _check_learned(config: Any) -> None:
    """Raises ValueError unless positions come from a table that is added to the input."""
    if getattr(config, "max_position_embeddings", None) is None:
        raise _refusal(f"how {config.model_type} has positions is not known")


def _modeling(config: Any) -> Any:
    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        raise _refusal(f"the code of {config.model_type} was not found") from None


def _frequencies(config: Any, module: Any, layer_type: str | None) -> torch.Tensor:
    """Radians per position, float64 ``[pairs]``, from the model's own rotary embedding."""
    found: list[torch.Tensor] = []
    for name, kind in vars(module).items():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or not isinstance(kind, type):
            continue
        try:
            made = kind(config=config)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # of another part of the model
        buffer = getattr(made, f"{layer_type}_inv_freq", getattr(made, "inv_freq", None))
        if isinstance(buffer, torch.Tensor):
            found.append(buffer.double())
    if found and all(torch.equal(x, found[0]) for x in found):
        return found[0]
    turned = vars(config).get("rotary_dim")
    if not found and turned:  # GPT-J and CodeGen have a table of sines
        return 10000.0 ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    raise _refusal(f"the frequencies of {config.model_type} were not found")


def _refusal(reason: str) -> ValueError:
    return ValueError(f"on_full='window' does not serve this model: {reason}; use on_full='error' or 'offload'")
