"""Whether one pass over several tokens sees what a cache stores: a check of the cache itself, not of its name.

Many quantized caches hand the tokens of the current pass to attention unquantized, and store codes for later. A text
that is scored in one pass through such a cache shows no drift at all, whatever the codes are. So before a cache is
scored in passes of many tokens it is tried out: random keys and values go into two fresh caches, in one pass, and as in
generation: a prompt, then token by token. Attention over what the caches hand out must come out the same, far within
what quantization itself does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import qkv
from qkv.named_caches import as_argument
from qkv_eval.peers import attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qkv.named_caches import NamedCache

# More than the 128 tokens that transformers' quantized caches keep exact before they quantize them.
TOKENS = 160
# In one pass at the start: some caches cannot pack a first update of one token.
PROMPT = 32
# Of the quantization error: a kernel's own rounding is a hundredth of it.
_SAME = 0.1


@dataclass(frozen=True)
class Verdict:
    """What the check found.

    Attributes:
        difference: largest difference between attention in one pass and token by token, as a part of the largest
            difference that quantization makes (token by token against exact attention).
        quantizes: whether the cache changes anything at all.
        faithful: one pass over several tokens sees what is stored, exactly as single steps do.
    """

    difference: float
    quantizes: bool
    faithful: bool


@torch.inference_mode()
def check_cache(model: PreTrainedModel, cache: NamedCache, seed: int = 0) -> Verdict:
    """Tries out whether one pass through a cache sees the stored values; leaves the model plain.

    Args:
        model: whose layers the cache is made for.
        cache: what to try out.
        seed: of the random keys and values.

    Raises:
        ValueError: the model caches no keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    differences, errors, magnitudes = [0.0], [0.0], [0.0]
    layers = _layers_to_try(model)
    attend_as_meant(model, cache)
    try:
        once, steps = cache.make(model.config), cache.make(model.config)
        for layer, (heads, key_dim, value_dim), tokens in layers:
            prompt = min(PROMPT, tokens // 2)
            query, key = (torch.randn(1, heads, tokens, key_dim, generator=generator) for _ in range(2))
            value = torch.randn(1, heads, tokens, value_dim, generator=generator)
            exact = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
            together = _attend(model, cache, query, *once.update(key, value, layer))
            singly = torch.cat(
                [
                    _attend(model, cache, query[:, :, at], *steps.update(key[:, :, at], value[:, :, at], layer))
                    for at in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, tokens)))
                ],
                dim=1,
            )
            differences.append(float((together - singly)[:, prompt:].abs().max()))
            errors.append(float((singly - exact)[:, prompt:].abs().max()))
            magnitudes.append(float(exact.abs().max()))
    finally:
        qkv.disable(model)
    difference, error, rounding = max(differences), max(errors), 1e-5 * max(magnitudes)
    return Verdict(
        difference=difference / error if error > rounding else 0.0,
        quantizes=error > rounding,
        faithful=difference <= _SAME * error + rounding,
    )


def _layers_to_try(model: PreTrainedModel) -> list[tuple[int, tuple[int, int, int], int]]:
    """The first and the last layer of each shape: index, ``(kv_heads, key_dim, value_dim)``, and tokens to try."""
    plain = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), **as_argument(plain), use_cache=True)
    shapes: dict[Any, list[int]] = {}
    for index, layer in enumerate(plain.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        tokens = min(TOKENS, getattr(layer, "sliding_window", None) or TOKENS)
        shapes.setdefault(((keys.shape[1], keys.shape[3], values.shape[3]), tokens), []).append(index)
    if not shapes:
        raise ValueError(f"{type(model).__name__} caches no keys and values")
    return [(at, *what) for what, found in shapes.items() for at in dict.fromkeys((found[0], found[-1]))]


def _attend(
    model: PreTrainedModel, cache: NamedCache, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention as the model does it over this cache, ``[1, tokens, heads, value_dim]``."""
    name = model.config.get_text_config(decoder=True)._attn_implementation if cache.is_ours else "sdpa"
    attention = ALL_ATTENTION_FUNCTIONS[name if name in ALL_ATTENTION_FUNCTIONS else "sdpa"]
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)
    out, _ = attention(module, query, keys, values, None, dropout=0.0, scaling=None)
    return out
