"""``on_full="offload"``: the older part of a cache in a file, with the bits and within the bytes of memory."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, make_tiny_model
from filling import BOUNDED, FORMATS, grown, logits, prompt, shaped, state
from transformers import (
    PreTrainedModel,
)

import qkv
from qkv.spill import segment_bytes


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


def test_the_benchmark_prints_and_writes_what_memory_was_taken(command: Command, tiny_folder: Path) -> None:
    words = ("bench", "offload", "--model", tiny_folder, "--format", "none", "--context", 1500, "--steps", 2)
    done = command(*words, "--max-bytes", "350KB", "--json", "-")
    assert done.status == 0
    memory, filed = json.loads(done.out)["rows"]
    assert (memory["offloaded_bytes"], filed["max_bytes"]) == (0, 350_000)
    assert memory["kv_bytes"] == filed["kv_bytes"] > 350_000
    assert filed["kv_bytes"] - filed["offloaded_bytes"] <= 350_000
    assert filed["same"]
    assert "same bits" in command(*words, "--max-bytes", "350KB").out
    refused = command(*words, "--max-bytes", "much")
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
