"""A prompt that is read in pieces takes its finished cache and a bound that does not grow with the prompt.

All tensors count, as :class:`qkv_eval.bench.peak.TensorMemory` follows them. Tiles are small here, so that prompts can
be short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

import qkv
from qkv.attention import tiled
from qkv_eval.bench.peak import TensorMemory

SHORT, LONG = 1024, 4096
PIECE = 256
PADDING = 37
# Of 3,072 tokens more, one layer decoded takes 1.5 MB, and a mask for a piece 0.8 MB and more.
ALLOWED = 100_000

SETUPS: dict[str, dict[str, Any]] = {
    "none": {"format": "none"},
    "int8": {"format": "int8"},
    "int8 residual": {"format": "int8", "residual_length": 100, "sink_tokens": 4},
    "int8 head": {"format": "int8", "granularity": "head"},
    "int8 exact residual": {"format": "int8", "prefill": "exact", "residual_length": 100},
    "int4": {"format": "int4"},
    "int2_rot": {"format": "int2_rot", "backend": "cpu"},
    "k5v4": {"format": "k5v4"},
    "k5v4 residual": {"format": "k5v4", "residual_length": 100},
    "k5v4 exact": {"format": "k5v4", "prefill": "exact"},
    "k5v4 static": {"format": "k5v4", "max_cache_len": LONG},
    "mxfp4": {"format": "mxfp4"},
    "window": {"format": "k5v4", "on_full": "window", "max_tokens": 516},
    "offload": {"format": "k5v4", "on_full": "offload", "max_bytes": 600_000},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose one layer, decoded, is larger than its activations."""
    return qkv.enable(make_tiny_model(num_hidden_layers=1, head_dim=64, max_position_embeddings=2 * LONG))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE", PIECE)


def excess(
    model: PreTrainedModel, cache: Any, size: Callable[[], int], mask: torch.Tensor | None = None
) -> dict[int, int]:
    """The peak without the finished cache, ``size()`` bytes, of prompts of SHORT and of LONG tokens.

    Args:
        mask: int64 ``[batch, LONG]``, 0 for padding, or None.
    """
    batch = 1 if mask is None else mask.shape[0]
    ids = torch.randint(0, 256, (batch, LONG), generator=torch.Generator().manual_seed(0))
    memory, found = TensorMemory(), {}
    with torch.inference_mode():
        for start in range(0, LONG, PIECE):
            end = start + PIECE
            more = {} if mask is None else {"attention_mask": mask[:, :end]}
            with memory.part("prompt"):
                model(ids[:, start:end], past_key_values=cache, logits_to_keep=1, **more)
            if end in (SHORT, LONG):
                found[end] = memory.peak - size()
    return found


@pytest.mark.parametrize("name", SETUPS)
def test_the_peak_above_the_finished_cache_does_not_grow_with_the_prompt(
    name: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    options = dict(SETUPS[name])
    most = options.get("max_bytes", 1 << 40)  # what is beyond it lies in a file
    if "max_bytes" in options:
        options["offload_folder"] = str(tmp_path)
    cache = qkv.QKVCache(model.config, **options)
    above = excess(model, cache, lambda: min(cache.nbytes(), most))
    assert above[LONG] <= above[SHORT] + ALLOWED, above


def test_nor_does_it_in_bfloat16() -> None:
    model = qkv.enable(make_tiny_model(num_hidden_layers=1, head_dim=64, max_position_embeddings=2 * LONG))
    model.to(torch.bfloat16)
    cache = qkv.QKVCache(model.config, "k5v4", residual_length=100)
    above = excess(model, cache, cache.nbytes)
    assert above[LONG] <= above[SHORT] + ALLOWED, above


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("residual_length", [0, 100])
def test_nor_does_it_with_a_sliding_window(residual_length: int, padded: bool) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=300, sliding_window=700, max_position_embeddings=2 * LONG,
    )  # fmt: skip
    model = qkv.enable(MistralForCausalLM(config).eval())
    cache = qkv.QKVCache(config, "k5v4", residual_length=residual_length)
    above = excess(model, cache, cache.nbytes, left_padded() if padded else None)
    assert above[LONG] <= above[SHORT] + ALLOWED, above


@pytest.mark.parametrize(
    "options",
    [{"format": "int8"}, {"format": "int8", "residual_length": 100}, {"format": "k5v4"}],
    ids=str,
)
def test_with_padding_it_grows_by_the_mask_that_transformers_makes(
    options: dict[str, Any], model: PreTrainedModel
) -> None:
    mask = left_padded()
    cache = qkv.QKVCache(model.config, **options)
    above = excess(model, cache, cache.nbytes, mask)
    one_byte_each = mask.shape[0] * PIECE * (LONG - SHORT)
    assert above[LONG] <= above[SHORT] + one_byte_each + ALLOWED, above
    plain = DynamicCache(config=model.config)
    theirs = excess(model, plain, lambda: sum(x.nbytes for x in (plain.layers[0].keys, plain.layers[0].values)), mask)
    assert above[LONG] < theirs[LONG]


def left_padded() -> torch.Tensor:
    """int64 ``[2, LONG]``: one row with padding in front, one without."""
    mask = torch.ones(2, LONG, dtype=torch.int64)
    mask[1, :PADDING] = 0
    return mask
