"""Long sessions: twenty thousand steps with beams, crops and resets, after which nothing has piled up or drifted."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

import qkv

STEPS = 20_000
LONGEST = 700  # tokens of a session; then comes a reset
PROMPT = 120
WINDOW = 48
BEAMS, HEADS, DIM = 3, 2, 8
LAYERS = ("sliding_attention", "full_attention", "full_attention", "full_attention")
SINKS, RESIDUAL = 4, 32
# The last layer waits for 128 tokens, and then for groups of 64; what is taken back leaves a trace in it.
WAY: dict[str, Any] = {
    "format": "int8",
    "equalize": False,
    "sink_tokens": SINKS,
    "residual_length": RESIDUAL,
    "layers": {
        2: {"format": "fp8_e4m3", "granularity": "head"},
        3: {"format": "int4_rot", "key_format": "int5_rot", "equalize": True, "residual_length": 0},
    },
}
WITHOUT_TRACES = 3
POOL = 4001  # tokens to draw from, a prime number

STATM = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of memory that the process holds, without what it has freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(type(x) is torch.Tensor for x in gc.get_objects())


class Session:
    """A cache, and what it was told: the tokens that survived, exact."""

    def __init__(self) -> None:
        # As after qkv.enable(model): no step decodes what is stored.
        self.config = Gemma3TextConfig(
            num_hidden_layers=len(LAYERS),
            layer_types=list(LAYERS),
            sliding_window=WINDOW,
            attn_implementation="qkv",
        )
        self.cache = qkv.QKVCache(self.config, **WAY)
        generator = torch.Generator().manual_seed(1)
        self.pool = torch.randn(len(LAYERS), 2, BEAMS, HEADS, POOL + PROMPT, DIM, generator=generator)
        self.survivors = torch.empty(len(LAYERS), 2, BEAMS, HEADS, LONGEST + PROMPT, DIM)
        self.length = self.since_crop = self.drawn = 0
        self.done: list[tuple[Any, ...]] = []  # since the last reset

    def append(self, n: int) -> None:
        at = self.drawn % POOL
        self.drawn += n
        self.done.append((self.cache_append, at, n))
        tokens = self.pool[..., at : at + n, :]
        self.survivors[..., self.length : self.length + n, :] = tokens
        self.cache_append(self.cache, at, n)
        self.length += n
        self.since_crop += n

    def cache_append(self, cache: qkv.QKVCache, at: int, n: int) -> None:
        for layer, (keys, values) in enumerate(self.pool[..., at : at + n, :].unbind()):
            cache.update(keys, values, layer)

    def crop(self, n: int) -> None:
        self.done.append((qkv.QKVCache.crop, -n))
        self.cache.crop(-n)
        self.length -= n
        self.since_crop = 0

    def reorder(self, rows: list[int]) -> None:
        self.done.append((qkv.QKVCache.reorder_cache, torch.tensor(rows)))
        self.cache.reorder_cache(torch.tensor(rows))
        kept = self.survivors[..., : self.length, :]
        kept.copy_(kept[:, :, rows].clone())

    def reset(self) -> None:
        self.cache.reset()
        self.length = self.since_crop = 0
        self.done = []

    def done_again(self) -> qkv.QKVCache:
        """A new cache that goes through what was done since the last reset."""
        cache = qkv.QKVCache(self.config, **WAY)
        cache.activate_past_recording()
        for function, *arguments in self.done:
            function(cache, *arguments)
        return cache

    def most_bytes(self) -> int:
        """What may be allocated: what is stored, and spare room for up to 256 tokens or an eighth of them."""
        exact = 2 * BEAMS * HEADS * DIM * 4
        packed = 2 * BEAMS * HEADS * (DIM + 2)
        total = 0
        for layer, kind in enumerate(LAYERS):
            few = SINKS + RESIDUAL + 64  # sinks, window and warm-up
            if layer >= WITHOUT_TRACES:
                few += 64 + 128
            stored = self.length
            if kind == "sliding_attention":
                stored = min(stored, WINDOW + self.since_crop)
            spare = max(256, stored // 8)
            segments = 4 + (stored + spare) // 128
            # Behind each plane lie 64 bytes; a segment may have a float32 scale for each head.
            total += few * exact + stored * packed + spare * exact + segments * 2 * (64 + BEAMS * HEADS * 4)
        return total


@pytest.mark.skipif(not STATM.exists(), reason="only Linux says there what a process holds")
def test_after_twenty_thousand_steps_nothing_has_piled_up_and_the_contents_are_those_of_a_fresh_cache(
    keep_threads: None,
) -> None:
    """The first half is beam search; in the second, windows record their past, and tokens are taken back as well."""
    torch.set_num_threads(1)  # for tensors this small
    chance = random.Random(3)
    session = Session()
    session.append(PROMPT)
    memory: list[int] = []
    tensors: list[int] = []  # alive after a reset
    crops = cropped = reorders = 0
    for step in range(STEPS):
        if step == STEPS // 2:
            session.cache.activate_past_recording()
            session.since_crop = 0
        session.append(1)
        what = chance.random()
        if step > STEPS // 2 and what < 0.1:
            # As assisted decoding does it: some of the last tokens go, or none, and the window forgets what it can.
            n = chance.randint(0, min(session.since_crop, 12))
            session.crop(n)
            crops, cropped = crops + 1, cropped + n
        elif what > 0.97:
            session.reorder([chance.randrange(BEAMS) for _ in range(BEAMS)])
            reorders += 1
        if session.length >= LONGEST:
            session.reset()
            assert session.cache.nbytes() == 0
            if not tensors or step > STEPS * 9 // 10:
                tensors.append(live_tensors())
            session.append(PROMPT)
        assert [session.cache.get_seq_length(layer) for layer in range(len(LAYERS))] == [session.length] * len(LAYERS)
        if step < STEPS // 2:
            session.since_crop = 0  # an unrecorded window forgets at every step
        if step % 50 == 0:
            assert session.cache.nbytes() <= session.most_bytes()
            memory.append(resident())
    assert crops > 800
    assert cropped > 2000
    assert reorders > 500
    quarter = len(memory) // 4
    # A leak of one small Python object in each step would be a megabyte by then.
    assert max(memory[-quarter:]) - max(memory[:quarter]) < 2**20
    assert len(tensors) >= 2
    assert len(set(tensors)) == 1

    # What had left the residual window stays encoded after a crop: go on until none of it is in the window again.
    for _ in range(RESIDUAL + 12):
        session.append(1)
    fresh, again = qkv.QKVCache(session.config, **WAY), session.done_again()
    for layer, (keys, values) in enumerate(session.survivors[..., : session.length, :].unbind()):
        fresh.update(keys, values, layer)
    for layer in range(len(LAYERS)):
        for other in (fresh, again) if layer < WITHOUT_TRACES else (again,):
            for found, wanted in zip(session.cache.view(layer).decode(), other.view(layer).decode(), strict=True):
                assert torch.equal(found, wanted)
    keys, exact = session.cache.view(1).decode()[0], session.survivors[1, 0, ..., : session.length, :]
    same = (keys == exact).all(dim=-1).all(dim=0).all(dim=0)
    assert same[:SINKS].all()
    assert same[-RESIDUAL:].all()
    assert not same[SINKS:-RESIDUAL].any()


ROUNDS = 50


@pytest.mark.skipif(not STATM.exists(), reason="only Linux says there what a process holds")
def test_after_fifty_rounds_of_fork_extend_crop_save_and_load_memory_is_where_it_began(
    keep_threads: None, tmp_path: Path
) -> None:
    """Each round goes on with what came out of the file; nothing of the forks and mapped files of before is left."""
    torch.set_num_threads(1)
    chance = random.Random(4)
    config = Gemma3TextConfig(
        num_hidden_layers=len(LAYERS), layer_types=list(LAYERS), sliding_window=WINDOW, attn_implementation="qkv"
    )
    cache = qkv.QKVCache(config, **WAY)
    cache.activate_past_recording()
    pool = torch.randn(len(LAYERS), 2, BEAMS, HEADS, POOL, DIM, generator=torch.Generator().manual_seed(1))

    def extend(one: qkv.QKVCache, n: int) -> None:
        at = chance.randrange(POOL - n)
        for layer, (keys, values) in enumerate(pool[..., at : at + n, :].unbind()):
            one.update(keys, values, layer)

    extend(cache, LONGEST)
    path = tmp_path / "round.kv"
    memory: list[int] = []
    tensors: list[int] = []
    mapped: list[int] = []
    held: list[int] = []
    for step in range(ROUNDS):
        forks = cache.fork(3)
        together = qkv.nbytes([cache, *forks])
        assert together < 4 * cache.nbytes()
        for fork in forks:
            extend(fork, chance.randint(1, 300))
            extend(fork, 1)
        extend(cache, 40)
        for one in (cache, *forks):
            one.crop(LONGEST - one.get_seq_length())
        chosen = chance.choice(forks)
        chosen.save(path)
        del forks, fork, one
        cache = qkv.QKVCache.load(path, config)
        views = [chosen.view(layer).decode() for layer in range(len(LAYERS))]
        for layer, pair in enumerate(views):
            for found, wanted in zip(cache.view(layer).decode(), pair, strict=True):
                assert torch.equal(found, wanted)
        del chosen, views, pair, found, wanted
        memory.append(resident())
        if step % 10 == 9:
            tensors.append(live_tensors())
        mapped.append(Path("/proc/self/maps").read_text().count(path.name))
        held.append(cache.nbytes())
        assert cache.get_seq_length() == LONGEST
    assert set(mapped) == {1}  # only the last file is mapped
    # Segments may end at other places, by a few; and windows hold what they have recorded.
    assert tensors[-1] <= tensors[0] + 40
    assert max(held[-10:]) <= 1.2 * held[0]
    assert max(memory[-10:]) - max(memory[5:15]) < 2**20
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
