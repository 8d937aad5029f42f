"""What is worked on together to be faster gives what it gives one by one: heads in the kernel, pieces of a prompt.

The kernel takes as many heads at a time as fit in a part of the second-level cache, and each thread a part of the
blocks of all of them. Of a prompt, pieces that see tokens exactly in the same places share one call.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from instruction_sets import each_instruction_set, needs_kernels, using

from qkv.attention import attention, dense, tiled
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def filled(config: CacheConfig, shape: tuple[int, int, int, int], steps: list[int]) -> LayerStore:
    """A store of random tokens that came in passes of so many."""
    store = LayerStore(config)
    keys, values = torch.randn(shape), torch.randn(shape)
    at = 0
    for n in steps:
        store.append(keys[:, :, at : at + n], values[:, :, at : at + n])
        at += n
    return store


def on_threads(
    threads: int, isa: str, query: torch.Tensor, view: KVView, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """What the kernel gives with so many threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with using(isa):
            return attention(query, view, mask=mask, backend="cpu")
    finally:
        torch.set_num_threads(before)


SETUPS = {
    "int8": {},
    "k5v4": {},
    "int4": {"residual_length": 40},
    "none": {},
    "int8 sinks": {"sink_tokens": 3},
}


@needs_kernels
@each_instruction_set
@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.parametrize("setup", SETUPS)
def test_many_heads_are_shared_among_threads_wherever_they_are_cut(isa: str, setup: str, threads: int) -> None:
    """33 heads of 5 kB of results and queries each are two sets; 7 threads cut each of them somewhere."""
    config = replace(CacheConfig.of(setup.split()[0]), **SETUPS[setup])
    store = filled(config, (11, 3, 700, 64), [300, 390, *[1] * 10])
    view = KVView(store, None)
    query = torch.randn(11, 12, 1, 64)
    mask = torch.rand(11, 1, 1, 700) < 0.8
    for allowed in (None, mask):
        alone, shared = (on_threads(n, isa, query, view, allowed) for n in (1, threads))
        exact = attention(query, view, mask=allowed, backend="reference")
        assert (alone - exact).square().mean().sqrt() < 1e-3 * exact.square().mean().sqrt()
        # Each thread rounds its weights to 16 bits of the largest that it has seen.
        assert (shared - alone).abs().max() < 1e-4 * alone.abs().max()


@needs_kernels
@each_instruction_set
def test_a_row_alone_gives_what_it_gives_among_others(isa: str) -> None:
    config = CacheConfig("int8", equalize=False)  # a batch shares its vectors
    keys, values, query = torch.randn(24, 4, 520, 128), torch.randn(24, 4, 520, 128), torch.randn(24, 16, 2, 128)
    together = LayerStore(config)
    together.append(keys, values)
    everything = on_threads(1, isa, query, KVView(together, None))
    for row in (slice(0, 1), slice(7, 8), slice(23, 24)):
        alone = LayerStore(config)
        alone.append(keys[row], values[row])
        assert torch.equal(on_threads(1, isa, query[row], KVView(alone, None)), everything[row])


LATE = {
    "k5v4": {},
    "int4": {},
    "int8 window": {"residual_length": 256},
    "int8 channel": {"granularity": "channel", "group_size": 128},
    "k4v4 all": {"residual_length": 100, "sink_tokens": 5},
}


@pytest.mark.parametrize("passes", [[1500], [640, 512, 348]])
@pytest.mark.parametrize("setup", LATE)
def test_pieces_that_are_alike_give_together_what_they_give_alone(
    setup: str, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE", 256)
    taken = []
    original = tiled._take_alike
    monkeypatch.setattr(tiled, "_take_alike", lambda *a: (taken.append(a[5]), original(*a)))
    config = replace(CacheConfig.of(setup.split()[0]), **LATE[setup])
    store = LayerStore(config)
    keys, values = torch.randn(2, 2, 1500, 64), torch.randn(2, 2, 1500, 64)
    at = 0
    for n in passes:
        view = KVView(store, store.append(keys[:, :, at : at + n], values[:, :, at : at + n]))
        at += n
        if view.late is None or n < 300:
            continue
        query = torch.randn(2, 6, n, 64)
        for softcap, sinks in ((None, None), (20.0, torch.randn(6))):
            short = dense.attend_view(query, view, None, 0.125, True, softcap, sinks)
            together = tiled.attend_late(query, view, None, 0.125, softcap, sinks)
            assert together is not None
            assert (together - short).abs().max() < 2e-5 * short.abs().max()
    assert taken, "no pieces were done together"
