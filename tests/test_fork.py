"""Forks: several caches that go on from one prefix, each by itself, and hold the prefix once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from setups import SETUPS
from stores import Pair, assert_same, bits, config_of, configs, kv, part, sizes
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

import qkv
from qkv.named_caches import as_argument
from qkv.storage import LayerStore

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

LLAMA = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, head_dim=32, attn_implementation="qkv")
MISTRAL = MistralConfig(num_hidden_layers=1, sliding_window=40, attn_implementation="qkv")


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


def store_of(cache: qkv.QKVCache) -> LayerStore:
    return cache.layers[0].store


def whole(store: LayerStore) -> list[Any]:
    """Every byte that a store holds, spare room included, and where its tokens are."""
    places = [(s.start, s.length, s.capacity) for s in store.segments()]
    return [store.length, store.first, places, *(bits(x).tolist() for x in store.tensors())]


def places(store: LayerStore) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in store.tensors()}


def assert_alike(a: LayerStore, b: LayerStore) -> None:
    """The same tokens, in segments that end at the same places."""
    assert (a.length, a.first, a.shape, a._open) == (b.length, b.first, b.shape, b._open)
    assert [(s.start, s.length, s.capacity) for s in a.segments()] == [
        (s.start, s.length, s.capacity) for s in b.segments()
    ]
    if a.length > a.first:
        assert_same(a, b)


@pytest.mark.parametrize("length", [100, 600])
@pytest.mark.parametrize("setup", SETUPS)
def test_forks_and_the_original_go_on_like_deep_copies(setup: str, length: int) -> None:
    shape = sizes(setup) or {"key_dim": 32, "value_dim": 32}
    original = qkv.QKVCache(LLAMA, config_of(setup, residual_length=8 if length == 100 else 0))
    original.update(*kv(length, growing=1.0, **shape), 0)
    apart = [copy.deepcopy(original) for _ in range(4)]
    together = [original, *original.fork(3)]
    stages: list[Callable[[qkv.QKVCache, Pair, int], Any]] = [
        lambda cache, more, i: cache.update(*part(more, 0, 30), 0),
        lambda cache, more, i: [cache.update(*part(more, t, t + 1), 0) for t in range(30, 50)],
        lambda cache, more, i: cache.crop(-(length // 2 + i)),  # back into what is shared
        lambda cache, more, i: cache.update(*part(more, 50, 80), 0),
        lambda cache, more, i: cache.reorder_cache(torch.tensor([1, 0])) if i == 2 else None,
        lambda cache, more, i: cache.update(*part(more, 0, 5), 0),
    ]
    for stage in stages:
        for i, (one, other) in enumerate(zip(together, apart, strict=True)):
            more = kv(80, growing=2.0, seed=10 + i, **shape)
            stage(one, more, i)
            stage(other, more, i)
        # All have gone on by now: what one has written must not show in another.
        for one, other in zip(together, apart, strict=True):
            assert_alike(store_of(one), store_of(other))


def test_the_prefix_is_held_once() -> None:
    """Case 17: what forks share counts once for all of them, and in full for each."""
    config = LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, head_dim=32, attn_implementation="qkv")
    cache = qkv.QKVCache(config, "int8", residual_length=4)
    pair = kv(4000, key_dim=32, value_dim=32)
    for layer in range(3):
        cache.update(*pair, layer)
    alone = cache.nbytes()
    assert qkv.nbytes([cache]) == alone == qkv.nbytes([cache, cache])
    forks = cache.fork(7)
    assert {fork.nbytes() for fork in forks} == {alone}
    each = (qkv.nbytes([cache, *forks]) - alone) / 7
    # The last segment, the residual window, and the vectors: of 4,000 tokens less than a tenth.
    assert 0 < each < 0.1 * alone
    apart = [copy.deepcopy(cache) for _ in range(2)]
    assert qkv.nbytes([cache, *apart]) == 3 * alone
    forks[0].reorder_cache(torch.tensor([1, 0]))
    assert qkv.nbytes([cache, forks[0]]) > 1.9 * alone
    del cache
    assert qkv.nbytes(forks[1:]) < 1.6 * alone


def test_what_is_full_is_shared_and_what_takes_tokens_is_not() -> None:
    cache = qkv.QKVCache(LLAMA, "int8", residual_length=4, sink_tokens=3)
    cache.update(*kv(900, key_dim=32, value_dim=32), 0)
    (fork,) = cache.fork()
    a, b = store_of(cache), store_of(fork)
    assert a.packed[-1].room
    for one, other in zip(a.packed[:-1], b.packed[:-1], strict=True):
        assert one.key.codes.data_ptr() == other.key.codes.data_ptr()
        assert one.key is not other.key
        assert one.shared
        assert other.shared
    for one, other in ((a.packed[-1], b.packed[-1]), (a.sink, b.sink), (a.residual, b.residual)):
        assert one is not None
        assert other is not None
        for x, y in zip(one.planes(), other.planes(), strict=True):
            assert not {t.data_ptr() for t in x.tensors()} & {t.data_ptr() for t in y.tensors()}


@pytest.mark.parametrize("static", [False, True])
def test_segments_that_left_a_window_are_not_used_again_while_forks_hold_them(static: bool) -> None:
    cache = qkv.QKVCache(MISTRAL, "int8", equalize=False, max_cache_len=2000 if static else None)
    pair = kv(900, key_dim=32, value_dim=32)
    cache.update(*part(pair, 0, 140), 0)
    (fork,) = cache.fork()
    before = whole(store_of(fork))
    for start in range(140, 900, 10):
        cache.update(*part(pair, start, start + 10), 0)
    assert whole(store_of(fork)) == before
    fresh = qkv.QKVCache(MISTRAL, "int8", equalize=False)
    fresh.update(*pair, 0)
    assert store_of(cache).length == store_of(fresh).length


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3-Next", "Falcon-H1", "LFM2"])
@pytest.mark.parametrize("static", [False, True])
def test_a_model_answers_on_forks_as_on_copies(name: str, static: bool) -> None:
    """The states of linear attention among them, which are written to in place."""
    model = FAMILIES[name]()
    qkv.enable(model)
    ids = torch.randint(3, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(5))
    cache = qkv.QKVCache(model.config, "int8", max_cache_len=100 if static else None)
    run(model, cache, ids[:, :30])
    twins, forks = [copy.deepcopy(cache) for _ in range(2)], cache.fork(2)
    for start in range(30, 60, 10):
        for i, (twin, fork) in enumerate(zip(twins, forks, strict=True)):
            piece = ids[:, start : start + 10].roll(i)
            assert torch.equal(run(model, twin, piece), run(model, fork, piece))
    assert cache.get_seq_length() == 30


@torch.no_grad()
def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **as_argument(cache), use_cache=True).logits


def test_answers_on_one_prefix_are_those_that_each_question_gets_alone(wide_model: PreTrainedModel) -> None:
    """Case 8 and 12, with forks."""
    qkv.enable(wide_model)
    prefix = torch.randint(0, 250, (1, 400), generator=torch.Generator().manual_seed(1))
    cache = qkv.QKVCache(wide_model.config, "int8")
    run(wide_model, cache, prefix)
    for seed, fork in enumerate(cache.fork(3)):
        question = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([prefix, question], dim=1)
        alone = qkv.QKVCache(wide_model.config, "int8")
        run(wide_model, alone, prefix)
        texts = [
            wide_model.generate(
                ids, attention_mask=torch.ones_like(ids), **as_argument(one), max_new_tokens=20, do_sample=False
            )
            for one in (fork, alone)
        ]
        assert torch.equal(*texts)
    assert cache.get_seq_length() == 400


def test_forking_copies_no_more_than_what_takes_tokens() -> None:
    """Case 14: not even for a moment."""
    cache = qkv.QKVCache(LLAMA, "none")
    cache.update(*kv(8000, key_dim=32, value_dim=32), 0)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forks = cache.fork(4)
    taken = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert taken <= 4 * 300 * 2 * 2 * 2 * 32 * 4
    assert qkv.nbytes([cache, *forks]) - cache.nbytes() <= taken


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2", None])
def test_a_bad_number_of_forks_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        qkv.QKVCache(LLAMA, "int8").fork(n)


def test_an_empty_cache_can_be_forked() -> None:
    cache = qkv.QKVCache(LLAMA, "int8")
    one, other = cache.fork(2)
    one.update(*kv(20, key_dim=32, value_dim=32), 0)
    assert (cache.get_seq_length(), one.get_seq_length(), other.get_seq_length()) == (0, 20, 0)


# ---- in any order ----------------------------------------------------------------------------------------------------

BIG = 300  # tokens: more than a segment


class Forks(RuleBasedStateMachine):
    """Caches that come from one another by forks, each beside a deep copy that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[qkv.QKVCache, qkv.QKVCache]] = []
        self.seed = 0

    @initialize(config=configs(quantized=False), sliding=st.booleans(), static=st.booleans(), n=st.integers(0, BIG))
    def begin(self, config: qkv.CacheConfig, sliding: bool, static: bool, n: int) -> None:
        model = MISTRAL if sliding else LLAMA
        cache, twin = (qkv.QKVCache(model, config, max_cache_len=4000 if static else None) for _ in range(2))
        for one in (cache, twin):
            one.activate_past_recording()
        self.pairs = [(cache, twin)]
        self.append(0, n)

    def pair(self, which: int) -> tuple[qkv.QKVCache, qkv.QKVCache]:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 9), n=st.one_of(st.just(1), st.integers(0, 90), st.just(BIG)))
    def append(self, which: int, n: int) -> None:
        cache, twin = self.pair(which)
        if n == 0 or cache.get_seq_length() + n > 4000:
            return
        self.seed += 1
        batch = store_of(cache).shape[0] if store_of(cache).shape is not None else 2
        pair = kv(n, batch, key_dim=32, value_dim=32, seed=self.seed, growing=1.5)
        for one in (cache, twin):
            one.update(*pair, 0)

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        if len(self.pairs) < 5:
            cache, _ = self.pair(which)
            before = whole(store_of(cache))
            twins = [copy.deepcopy(cache) for _ in range(2)]
            self.pairs += zip(cache.fork(2), twins, strict=True)
            assert whole(store_of(cache)) == before

    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        if len(self.pairs) > 1:
            self.pairs.pop(which % len(self.pairs))

    @rule(which=st.integers(0, 9), n=st.one_of(st.integers(0, 60), st.integers(0, 2 * BIG)))
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
            if store_of(one).shape is not None:
                one.reorder_cache(torch.tensor(rows))

    @rule(which=st.integers(0, 9))
    def reset(self, which: int) -> None:
        for one in self.pair(which):
            one.reset()

    @invariant()
    def all_are_as_if_they_were_alone(self) -> None:
        for cache, twin in self.pairs:
            assert_alike(store_of(cache), store_of(twin))

    @invariant()
    def nothing_that_is_shared_can_be_written_to(self) -> None:
        stores = [store_of(cache) for cache, _ in self.pairs]
        for store in stores:
            last = store.packed[-1:] if store._open else []
            writable = [s for s in (store.sink, store.residual, *last, *store._empty) if s is not None and s.room]
            held = {x.untyped_storage().data_ptr() for s in writable for p in s.planes() for x in p.tensors()} - {0}
            for other in stores:
                assert other is store or not held & places(other)


def test_forks_in_any_order_are_as_deep_copies_would_be() -> None:
    run_state_machine_as_test(Forks, settings=settings(max_examples=25, stateful_step_count=14, deadline=None))
