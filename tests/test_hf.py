"""Attention as transformers calls it: what the function that makes masks tells the one that attends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from transformers import DynamicCache, PreTrainedModel

import qkv
from qkv.named_caches import as_argument

# Both caches hold 12, 24 and 36 tokens at the end of a pass, of which one model gave others than the other.
PIECES = {"a": [6, 6, 6, 6, 6, 6], "b": [3, 9, 2, 10, 4, 8]}
SEEDS = {"a": 1, "b": 2}
MASKS = {"b": torch.ones(1, 36, dtype=torch.long)}


@torch.no_grad()
def in_pieces(name: str, model: PreTrainedModel, make: Callable[[Any], Any]) -> torch.Tensor:
    ids = torch.randint(0, 250, (1, 36), generator=torch.Generator().manual_seed(SEEDS[name]))
    cache, at, parts = make(model.config), 0, []
    for n in PIECES[name]:
        mask = MASKS[name][:, : at + n] if name in MASKS else None
        parts.append(model(ids[:, at : at + n], attention_mask=mask, **as_argument(cache)).logits)
        at += n
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    "make",
    [lambda config: DynamicCache(config=config), lambda config: qkv.QKVCache(config, "int8", equalize=False)],
    ids=["DynamicCache", "QKVCache"],
)
def test_two_models_in_two_threads_do_not_disturb_each_other(make: Callable[[Any], Any]) -> None:
    models = {name: qkv.enable(make_tiny_model(seed)) for name, seed in SEEDS.items()}
    alone = {name: in_pieces(name, model, make) for name, model in models.items()}
    # The masks of both passes are made before a layer of either attends.
    meeting = threading.Barrier(2, timeout=20)

    def meet(*_: Any) -> None:
        meeting.wait()

    for model in models.values():
        model.model.layers[0].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(in_pieces, name, model, make) for name, model in models.items()}
        together = {name: run.result() for name, run in running.items()}
    for name in models:
        assert torch.equal(together[name], alone[name]), name


def test_a_prompt_in_pieces_sees_what_the_whole_prompt_sees() -> None:
    """Without a mask, over ordinary tensors: torch's own attention would take the last queries for the first."""
    model = make_tiny_model(1)
    whole = in_pieces("a", model, lambda config: DynamicCache(config=config))
    got = in_pieces("a", qkv.enable(model), lambda config: DynamicCache(config=config))
    assert (got - whole).abs().max() < 1e-5 * whole.abs().max()
