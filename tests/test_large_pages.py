"""Memory of large pages: blocks never overlap, come back, and are counted."""

from __future__ import annotations

import gc
import itertools
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv import QKVCache, large_pages
from qkv.large_pages import LEAST, PAGE, Pool
from qkv_eval.bench.peak import TensorMemory

CPU = torch.device("cpu")
needs_large_pages = pytest.mark.skipif(
    not large_pages.pool.available(), reason="the system has no large pages for who asks"
)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def resident() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


@needs_large_pages
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PAGE // 2)), min_size=1, max_size=40))
def test_blocks_never_overlap_and_come_back(steps: list[tuple[bool, int]]) -> None:
    pool = Pool()
    held: list[tuple[torch.Tensor, int]] = []
    for drop, size in steps:
        if drop and held:
            del held[size % len(held)]
        else:
            block = pool.take(size)
            assert block.dtype == torch.uint8
            assert block.shape == (size,)
            assert block.data_ptr() % 64 == 0
            assert block.untyped_storage().nbytes() == size
            spans = sorted([span(block), *(span(other) for other, _ in held)])
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            mark = len(held) % 251
            held.append((block.fill_(mark), mark))
            del block
        assert 0 <= pool.used - sum(block.nbytes for block, _ in held) < 64 * (len(held) + 1)
        assert all(int(block[0]) == int(block[-1]) == mark for block, mark in held)
    held.clear()
    assert pool.used == 0


@needs_large_pages
def test_what_was_given_back_is_taken_again() -> None:
    pool = Pool()
    kept = pool.take(LEAST)
    for _ in range(200):
        block = pool.take(PAGE // 2)
        where = block.data_ptr()
        del block
    assert pool.take(PAGE // 2).data_ptr() == where
    assert pool.used == kept.nbytes


@needs_large_pages
def test_pages_that_hold_nothing_go_back_to_the_system_though_others_of_their_mapping_are_in_use() -> None:
    pool = Pool()
    blocks = [pool.take(PAGE // 4).fill_(1) for _ in range(60)]
    full = resident()
    kept = blocks[::20]
    blocks.clear()
    assert full - resident() >= 60 * PAGE // 4 - 3 * PAGE - PAGE
    assert all(bool((block == 1).all()) for block in kept)


@needs_large_pages
def test_parts_of_a_block_keep_it() -> None:
    pool = Pool()
    block = pool.take(3 * PAGE)
    part = block[-100:].view(4, 25).fill_(7)
    del block
    gc.collect()
    assert pool.used == 3 * PAGE
    assert bool((part == 7).all())
    copy = part.clone()
    del part
    assert pool.used == 0
    assert bool((copy == 7).all())


@needs_large_pages
def test_threads_may_take_at_once() -> None:
    pool = Pool()

    def work(mark: int) -> bool:
        right, kept = True, []
        for size in range(1000, 200_000, 7919):
            kept.append(pool.take(size + mark).fill_(mark))
            right = right and all(bool((x == mark).all()) for x in kept)
            if len(kept) > 5:
                del kept[0]
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 9)))
    pool.take(1)  # takes back what went while another thread held the lock
    assert pool.used <= 64


@needs_large_pages
@pytest.mark.parametrize("format", ["int8", "none", "k4v4"])
def test_a_cache_lies_in_large_pages_and_leaves_nothing_behind(format: str) -> None:
    gc.collect()
    before = large_pages.pool.used
    tokens = torch.randn(2, 8, 700, 64)
    cache = QKVCache(None, format)
    for layer in range(3):
        cache.update(tokens, tokens, layer)
    # Scales are too small to lie there, and so is what is not a full segment of the smallest formats.
    assert large_pages.pool.used - before > 0.8 * cache.nbytes()
    cache.crop(-400)
    assert large_pages.pool.used - before <= cache.nbytes()
    del cache
    gc.collect()
    assert large_pages.pool.used == before


@needs_large_pages
def test_the_peak_of_memory_counts_them_in_the_order_of_time() -> None:
    memory = TensorMemory()
    with memory.part("one"):
        block = large_pages.empty(5 * PAGE, CPU)
        other = torch.empty(3 * PAGE, dtype=torch.uint8)
        del other
        more = large_pages.empty(2 * PAGE, CPU)
    assert memory.peak == 8 * PAGE
    assert memory.held == 7 * PAGE
    del block
    with memory.part("two"):
        del more
        last = large_pages.empty(PAGE, CPU)
    assert memory.held == last.nbytes
    assert memory.peaks == {"one": 8 * PAGE, "two": 7 * PAGE}


def test_small_room_and_systems_without_are_served_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = Pool()
    monkeypatch.setattr(large_pages, "pool", pool)
    assert large_pages.empty(LEAST - 1, CPU).shape == (LEAST - 1,)
    monkeypatch.setenv("QKV_LARGE_PAGES", "off")
    assert not pool.available()
    assert large_pages.empty(PAGE, CPU).shape == (PAGE,)
    assert large_pages.empty(PAGE, torch.device("meta")).is_meta
    assert pool.used == 0
    monkeypatch.delenv("QKV_LARGE_PAGES")
    monkeypatch.setattr(large_pages, "Path", lambda _: tmp_path / "missing")
    assert not Pool().available()
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]\n", encoding="ascii")
    monkeypatch.setattr(large_pages, "Path", lambda _: never)
    assert not Pool().available()
