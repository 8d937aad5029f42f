"""The embedded SmolLM2-135M: what it writes, and how far its predictions move."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import qkv

PROMPT = "Explain to a child, in a friendly voice, why the sky is blue."


def write(model: PreTrainedModel, tokenizer: Any, cache: Any, tokens: int) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(text, return_tensors="pt")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_greedy_text_of_200_tokens_is_the_same_with_none_and_nearly_with_int8(smollm2: Any) -> None:
    model, tokenizer = smollm2
    expected = write(model, tokenizer, DynamicCache(config=model.config), 200)
    assert write(model, tokenizer, qkv.QKVCache(model.config, "none"), 200) == expected
    qkv.enable(model)
    none = qkv.QKVCache(model.config, "none")
    assert write(model, tokenizer, none, 200) == expected
    int8 = qkv.QKVCache(model.config, "int8")
    written = write(model, tokenizer, int8, 200)
    assert {row["backend"] for row in int8.stats()["layers"]} == {"cpu"}
    same = next((i for i, (a, b) in enumerate(zip(written, expected, strict=True)) if a != b), 200)
    assert same >= 50, f"the first different token is number {same}: {tokenizer.decode(written)}"


def test_int8_and_fp8_move_the_predictions_as_little_as_measured(smollm2: Any) -> None:
    """Bounds are twice what was measured on WikiText-2; python's own prose is scored here."""
    model, tokenizer = smollm2
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[20_000:26_000], return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        base = model(ids, past_key_values=DynamicCache(config=model.config)).logits[0].log_softmax(-1)
        qkv.enable(model)
        figures = {}
        for name in ("none", "int8", "fp8_e4m3"):
            cache = qkv.QKVCache(model.config, name)
            other = model(ids, past_key_values=cache).logits[0].log_softmax(-1)
            divergence = float((base.exp() * (base - other)).sum(-1).mean())
            same_top = float((base.argmax(-1) == other.argmax(-1)).float().mean())
            figures[name] = (divergence, same_top)
            assert cache.stats()["bits_per_value"] <= (32 if name == "none" else 8.32)
    assert figures["none"][0] < 1e-9
    assert 1e-6 < figures["int8"][0] < 0.0012
    assert figures["int8"][1] > 0.97
    assert figures["int8"][0] < figures["fp8_e4m3"][0] < 0.01
    assert figures["fp8_e4m3"][1] > 0.92
