"""Forks of caches with a limit: each goes on past it in its own way, and what lies in a file is shared."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from stores import bits, kv
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

import qkv
from qkv.limits import Limits
from qkv.named_caches import as_argument

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

TOKENS = 40
SHAPE = {"key_dim": 32, "value_dim": 32}
SIZES: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32, "attn_implementation": "qkv"}
LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **SIZES)
MISTRAL = MistralConfig(num_hidden_layers=2, sliding_window=300, **SIZES)


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True).logits


def held_by(cache: qkv.QKVCache) -> dict[int, int]:
    """Addresses of all memory that a cache holds, and how many bytes there are."""
    tensors = [x for layer in cache.layers for x in layer.store.tensors()]
    for layer in cache.layers:
        sinks = getattr(layer, "sinks", None)
        if sinks is not None and sinks.segment is not None:
            tensors += [x for plane in sinks.segment.planes() for x in plane.tensors()]
            tensors += [sinks._pairs] if sinks._pairs is not None else []
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def together(caches: list[qkv.QKVCache]) -> int:
    """What caches hold, each piece of memory once."""
    everything: dict[int, int] = {}
    for cache in caches:
        everything |= held_by(cache)
    return sum(everything.values())


Stage = Callable[[PreTrainedModel, qkv.QKVCache, int], Any]
# Each fork goes on in its own way: with other tokens, in other pieces, taking others back, rows in another order.
STAGES: list[Stage] = [
    lambda model, cache, i: run(model, cache, prompt(15 + 4 * i, 2, seed=i)),
    lambda model, cache, i: [run(model, cache, prompt(1, 2, seed=10 * i + t)) for t in range(6 + i)][-1],
    lambda model, cache, i: cache.reorder_cache(torch.tensor([1, 0])) if i == 1 else None,
    lambda model, cache, i: cache.reset() if i == 2 else None,
    lambda model, cache, i: run(model, cache, prompt(50, 2, seed=20 + i)),
    lambda model, cache, i: [run(model, cache, prompt(1, 2, seed=30 * i + t)) for t in range(4)][-1],
]


def assert_all_go_on_alike(
    model: PreTrainedModel, caches: list[qkv.QKVCache], copies: list[qkv.QKVCache], stages: list[Stage] = STAGES
) -> None:
    """All are asked in turn at each stage, so that what one has done is there when another goes on."""
    for stage in stages:
        for i, (one, other) in enumerate(zip(caches, copies, strict=True)):
            got, wanted = stage(model, one, i), stage(model, other, i)
            assert got is None or torch.equal(got, wanted)


# ---- a window --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 20, TOKENS, 300])
@pytest.mark.parametrize("residual_length", [0, 16])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "k5v4", "none", "int4"])
def test_forks_of_a_window_go_past_it_as_copies_do(
    format: str, residual_length: int, length: int, wide_model: PreTrainedModel
) -> None:
    qkv.enable(wide_model)
    limits: dict[str, Any] = {"max_tokens": TOKENS, "on_full": "window", "residual_length": residual_length}
    caches = [qkv.QKVCache(wide_model.config, format, **limits) for _ in range(4)]
    for cache, start in itertools.product(caches, range(0, length, 75)):
        run(wide_model, cache, prompt(length, 2)[:, start : start + 75])
    original, *copies = caches
    forks = original.fork(2)
    assert_all_go_on_alike(wide_model, [original, *forks], copies)
    assert [fork.get_seq_length() for fork in forks] == [other.get_seq_length() for other in copies[1:]]


def test_a_fork_of_a_window_shares_what_is_full_and_each_piece_counts_once(wide_model: PreTrainedModel) -> None:
    qkv.enable(wide_model)
    cache = qkv.QKVCache(wide_model.config, "int8", equalize=False, max_tokens=700, on_full="window")
    for start in range(0, 900, 300):
        run(wide_model, cache, prompt(900)[:, start : start + 300])
    alone = cache.nbytes()
    forks = cache.fork(3)
    assert {fork.nbytes() for fork in forks} == {alone} == {together([cache])}
    assert qkv.nbytes([cache, *forks]) == together([cache, *forks]) < 2 * alone
    run(wide_model, forks[0], prompt(500, seed=3))
    run(wide_model, cache, prompt(100, seed=4))
    assert qkv.nbytes([cache, *forks]) == together([cache, *forks])
    sinks = [layer.sinks for one in (cache, *forks) for layer in one.layers]
    addresses = [held.segment.key.codes.data_ptr() for held in sinks]
    assert len(set(addresses)) == len(addresses)


def test_forks_of_a_window_that_bytes_have_set_keep_its_size(wide_model: PreTrainedModel) -> None:
    qkv.enable(wide_model)
    caches = [
        qkv.QKVCache(wide_model.config, "int8", equalize=False, on_full="window", max_bytes=150_000) for _ in range(3)
    ]
    for cache in caches:
        run(wide_model, cache, prompt(60, 2))
    original, *copies = caches
    (fork,) = original.fork()
    assert_all_go_on_alike(wide_model, [original, fork], copies)
    assert fork.layers[0]._window == copies[0].layers[0]._window is not None


# ---- a file ----------------------------------------------------------------------------------------------------------


def open_files(folder: Path) -> int:
    """Files below a folder that this process has open or mapped, those without a name among them."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(folder) in os.readlink(entry)
        except OSError:  # the one that lists this folder
            continue
    return found + Path("/proc/self/maps").read_text().count(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For files of caches; when all caches are gone, so are they."""
    yield tmp_path
    gc.collect()
    if Path("/proc/self/fd").exists():
        assert open_files(tmp_path) == 0
    assert not list(tmp_path.iterdir())


def offload(folder: Path, max_bytes: int) -> dict[str, Any]:
    return {"on_full": "offload", "max_bytes": max_bytes, "offload_folder": folder}


LONG: list[Stage] = [
    *STAGES,
    lambda model, cache, i: cache.crop(-(cache.get_seq_length() // 2 + i)),  # into what lies in the file
    lambda model, cache, i: run(model, cache, prompt(40, 2, seed=40 + i)),
    lambda model, cache, i: run(model, cache, prompt(420, 2, seed=50 + i)),  # past what fits into memory once more
    lambda model, cache, i: run(model, cache, prompt(1, 2, seed=60 + i)),
]


@pytest.mark.parametrize("format", ["int8", "none", "k5v4", "fp8_e4m3"])
def test_forks_of_a_cache_in_a_file_go_on_as_copies_that_never_saw_one(
    format: str, wide_model: PreTrainedModel, folder: Path
) -> None:
    qkv.enable(wide_model)
    copies = [qkv.QKVCache(wide_model.config, format) for _ in range(4)]
    for copied, start in itertools.product(copies, range(0, 900, 300)):
        run(wide_model, copied, prompt(900, 2)[:, start : start + 300])
    cache = qkv.QKVCache(wide_model.config, format, **offload(folder, int(0.9 * copies[0].nbytes())))
    for start in range(0, 900, 300):
        run(wide_model, cache, prompt(900, 2)[:, start : start + 300])
    assert cache.offloaded_bytes() > 0.1 * cache.nbytes()
    forks = cache.fork(3)
    assert {fork.offloaded_bytes() for fork in forks} == {cache.offloaded_bytes()}
    assert_all_go_on_alike(wide_model, [cache, *forks], copies, LONG)


def test_forks_share_the_file_and_write_to_their_own(wide_model: PreTrainedModel, folder: Path) -> None:
    qkv.enable(wide_model)
    cache = qkv.QKVCache(wide_model.config, "int8", **offload(folder, 205_000))
    for start in (0, 1000):
        run(wide_model, cache, prompt(2000)[:, start : start + 1000])
    end, filed = cache._limits.spill._end, cache.offloaded_bytes()
    assert filed > 0.1 * cache.nbytes()
    forks = cache.fork(5)
    assert qkv.nbytes([cache, *forks]) == together([cache, *forks]) < 2.5 * cache.nbytes()
    for seed, fork in enumerate(forks):
        run(wide_model, fork, prompt(30, seed=seed))
        assert fork.offloaded_bytes() == filed
        assert fork._limits.spill._end == 0  # of what is shared nothing is written again
    run(wide_model, forks[0], prompt(400, seed=9))
    assert filed < forks[0].offloaded_bytes() <= filed + forks[0]._limits.spill._end
    assert cache._limits.spill._end == end
    # The others know nothing of what one of them has moved since.
    assert cache.offloaded_bytes() == filed


def test_what_is_shared_stays_as_long_as_a_fork_does(wide_model: PreTrainedModel, folder: Path) -> None:
    qkv.enable(wide_model)
    plain = qkv.QKVCache(wide_model.config, "int8")
    run(wide_model, plain, prompt(1000))
    cache = qkv.QKVCache(wide_model.config, "int8", **offload(folder, int(0.9 * plain.nbytes())))
    run(wide_model, cache, prompt(1000))
    one, other = cache.fork(2)
    free = cache._limits.spill._free
    assert not free
    cache.reset()
    del cache
    gc.collect()
    assert not free  # nobody writes over what the forks read
    twins = [copy.deepcopy(plain) for _ in range(2)]
    for fork, twin, seed in ((one, twins[0], 1), (other, twins[1], 2)):
        assert torch.equal(run(wide_model, fork, prompt(30, seed=seed)), run(wide_model, twin, prompt(30, seed=seed)))
    del one, fork
    gc.collect()
    assert not free
    assert torch.equal(*(run(wide_model, c, prompt(3, seed=5)) for c in (other, twins[1])))
    del other
    gc.collect()
    assert len(free) > 1


def test_forks_of_a_loaded_cache_share_the_file_that_it_came_from(wide_model: PreTrainedModel, tmp_path: Path) -> None:
    qkv.enable(wide_model)
    cache = qkv.QKVCache(wide_model.config, "int8")
    run(wide_model, cache, prompt(1000, 2))
    cache.save(tmp_path / "a.kv")
    limits = {**offload(tmp_path, int(0.9 * cache.nbytes())), "offload_folder": str(tmp_path)}
    loaded = qkv.QKVCache.load(tmp_path / "a.kv", wide_model.config, qkv.CacheConfig("int8", **limits))
    forks = loaded.fork(3)
    assert {fork.offloaded_bytes() for fork in forks} == {loaded.offloaded_bytes()}
    assert loaded.offloaded_bytes() > 0.5 * cache.nbytes()
    content = (tmp_path / "a.kv").read_bytes()
    assert_all_go_on_alike(wide_model, [loaded, *forks], [copy.deepcopy(cache) for _ in range(4)], LONG)
    assert (tmp_path / "a.kv").read_bytes() == content


def test_what_is_counted_as_offloaded_is_what_is_still_there(wide_model: PreTrainedModel, folder: Path) -> None:
    qkv.enable(wide_model)
    cache = qkv.QKVCache(wide_model.config, "none", **offload(folder, 700_000))
    run(wide_model, cache, prompt(2000))
    counts = [cache.offloaded_bytes()]
    for length in (1200, 700, 300):
        cache.crop(length - cache.get_seq_length())
        counts.append(cache.offloaded_bytes())
        assert cache.offloaded_bytes() <= cache.nbytes()
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    cache.reset()
    assert cache.offloaded_bytes() == cache.nbytes() == 0
    run(wide_model, cache, prompt(2000))
    assert cache.offloaded_bytes() == counts[0]


# ---- in any order ----------------------------------------------------------------------------------------------------


class Forks(RuleBasedStateMachine):
    """Caches in files that come from one another by forks, each beside one in memory that shares nothing."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[qkv.QKVCache, qkv.QKVCache]] = []
        self.seed = 0

    @initialize(
        options=st.sampled_from([{"format": "none"}, {"format": "int8"}, {"format": "int4", "residual_length": 9}]),
        sliding=st.booleans(),
        n=st.integers(300, 900),
    )
    def begin(self, options: dict[str, Any], sliding: bool, n: int) -> None:
        config = MISTRAL if sliding else LLAMA
        twin = qkv.QKVCache(config, **options)
        self.pairs = [(twin, twin)]
        self.append(0, n)
        size = twin.nbytes()
        cache, twin = qkv.QKVCache(config, **options, **offload(self.folder, size)), qkv.QKVCache(config, **options)
        self.pairs, self.seed = [(cache, twin)], 0
        self.append(0, n)
        cache._limits.max_bytes = 0  # every full segment goes to the file
        self.append(0, 300)
        assert cache.offloaded_bytes() > 0

    def pair(self, which: int) -> tuple[qkv.QKVCache, qkv.QKVCache]:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 9), n=st.one_of(st.just(1), st.integers(1, 90), st.just(300)))
    def append(self, which: int, n: int) -> None:
        self.seed += 1
        pair = kv(n, 2, **SHAPE, seed=self.seed)
        for one in dict.fromkeys(self.pair(which)):
            for layer in (0, 1):
                one.update(*pair, layer)

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        if len(self.pairs) < 5:
            cache, twin = self.pair(which)
            self.pairs += [(fork, copy.deepcopy(twin)) for fork in cache.fork(2)]

    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        if len(self.pairs) > 1:
            self.pairs.pop(which % len(self.pairs))

    @rule(which=st.integers(0, 9), n=st.integers(1, 600))
    def crop(self, which: int, n: int) -> None:
        failed = []
        for one in self.pair(which):
            try:
                one.crop(-n)
            except RuntimeError as error:  # the window would reach back to what is gone
                failed.append(str(error))
        assert len(failed) in (0, 2)

    @rule(which=st.integers(0, 9), rows=st.lists(st.integers(0, 1), min_size=2, max_size=2))
    def reorder(self, which: int, rows: list[int]) -> None:
        for one in self.pair(which):
            if one.layers[0].store.shape is not None:
                one.reorder_cache(torch.tensor(rows))

    @rule(which=st.integers(0, 9))
    def reset(self, which: int) -> None:
        for one in self.pair(which):
            one.reset()

    @invariant()
    def all_are_as_if_they_were_alone(self) -> None:
        for cache, twin in self.pairs:
            assert cache.get_seq_length() == twin.get_seq_length()
            for layer in (0, 1):
                if twin.layers[layer].store.shape is None:
                    continue
                both = [one.view(layer).decode() for one in (cache, twin)]
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*both, strict=True))

    @invariant()
    def what_they_hold_counts_once(self) -> None:
        caches = [cache for cache, _ in self.pairs]
        assert qkv.nbytes(caches) == together(caches)


def test_forks_in_files_in_any_order_are_as_caches_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Forks.folder = folder
    monkeypatch.setattr(Limits, "_check_bytes", lambda *_: None)  # with no bytes in memory a layer could not be read
    run_state_machine_as_test(Forks, settings=settings(max_examples=60, stateful_step_count=14, deadline=None))
