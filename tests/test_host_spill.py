"""A cache on a device whose older part lies in the CPU's memory.

No test here needs such a device: the CPU is told to be one, copies from and to it are counted, and what is copied there
lies in memory of its own, which says when it goes.
"""

from __future__ import annotations

import copy
import gc
import mmap
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_fork_full
import torch
from conftest import make_tiny_model
from filling import logits
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import qkv
from qkv import host_spill
from qkv.host_spill import HostSpill
from qkv.limits import Limits
from qkv.planes import Segment
from qkv.room import segment_bytes
from qkv.spill import Spill
from qkv.storage import LayerStore
from qkv.view import KVView

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

SETUPS: list[dict[str, Any]] = [
    {"format": "none"},
    {"format": "int8"},
    {"format": "int8", "granularity": "head"},
    {"format": "int8", "equalize": False, "residual_length": 5, "sink_tokens": 3},
    {"format": "int4", "key_granularity": "channel", "key_group_size": 32},
    {"format": "k5v4", "prefill": "exact"},
]
each_setup = pytest.mark.parametrize("options", SETUPS, ids=lambda o: " ".join(map(str, o.values())))


class Device:
    """The other device.

    Attributes:
        to_host: bytes that were copied from it, in all.
        brought: bytes of copies that are there now.
        copied: bytes that were copied there, in all.
        most: bytes that the caches watched had there at most, beside what segments that moved had before.
    """

    def __init__(self) -> None:
        self.to_host = self.brought = self.copied = self.most = 0
        self._watched: list[weakref.ref[qkv.QKVCache]] = []

    def take(self, data: torch.Tensor) -> torch.Tensor:
        """What host_spill.to_host does."""
        self.to_host += len(data)
        return data.clone()

    def give(self, data: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What host_spill.to_device does."""
        assert device.type == "cpu"
        if len(data) == 0:
            return data.clone()
        memory = mmap.mmap(-1, len(data))
        weakref.finalize(memory, self._gone, len(data))
        self.brought, self.copied = self.brought + len(data), self.copied + len(data)
        self.most = max(self.most, self.holds())
        return torch.frombuffer(memory, dtype=torch.uint8).copy_(data)

    def _gone(self, count: int) -> None:
        self.brought -= count

    def watch(self, cache: qkv.QKVCache) -> qkv.QKVCache:
        self._watched.append(weakref.ref(cache))
        return cache

    def holds(self) -> int:
        """Bytes on the device, of the caches watched."""
        caches = [cache for cache in (ref() for ref in self._watched) if cache is not None]
        return self.brought + sum(cache.nbytes() - cache.offloaded_bytes() for cache in caches)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The CPU as another device."""
    made = Device()
    monkeypatch.setattr(host_spill, "serves", lambda _: True)
    monkeypatch.setattr(host_spill, "to_host", made.take)
    monkeypatch.setattr(host_spill, "to_device", made.give)
    check = KVView.check

    def checked(view: KVView) -> None:
        check(view)
        runs = view._runs if view._runs is not None else view.store.runs(view.first)
        assert not any(run.segment.at_home for run in runs), "a kernel would read what is on another device"

    monkeypatch.setattr(KVView, "check", checked)
    return made


@pytest.fixture
def unchecked(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The same, and caches take any tokens: what cannot move is on the device, within the bytes given or not."""
    monkeypatch.setattr(Limits, "_check_bytes", lambda *_: None)
    return device


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def limited(config: Any, max_bytes: int, **options: Any) -> qkv.QKVCache:
    return qkv.QKVCache(config, on_full="offload", max_bytes=max_bytes, **{"format": "int8", **options})


def segments_at_home(cache: qkv.QKVCache) -> list[Segment]:
    return [s for layer in cache.layers for s in layer.store.packed if s.home is not None]


def pair(
    model: PreTrainedModel, ids: torch.Tensor, share: float = 0.8, **options: Any
) -> tuple[qkv.QKVCache, qkv.QKVCache]:
    """A cache without a limit, and one that has a share of what that takes; both have had the tokens."""
    plain = qkv.QKVCache(model.config, **{"format": "int8", **options})
    logits(model, plain, ids, [300, 200])
    cache = limited(model.config, int(share * plain.nbytes()), **options)
    logits(model, cache, ids, [300, 200])
    assert cache.offloaded_bytes() > 0
    return plain, cache


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@each_setup
def test_the_same_bits_come_of_prompts_pieces_and_steps(
    wide_model: PreTrainedModel, device: Device, options: dict[str, Any], fused: bool
) -> None:
    if fused:
        qkv.enable(wide_model)
    ids, sizes = prompt(1300), [300, 260, 270, 190, 230, 7, 1]
    plain = qkv.QKVCache(wide_model.config, **options)
    wanted = logits(wide_model, plain, ids, sizes)
    limit = int(0.85 * plain.nbytes())
    cache = device.watch(limited(wide_model.config, limit, **options))
    assert torch.equal(logits(wide_model, cache, ids, sizes), wanted)
    assert isinstance(cache._limits.spill, HostSpill)
    assert cache.nbytes() == plain.nbytes()
    assert cache.offloaded_bytes() > 0.2 * plain.nbytes()
    # Each segment was copied from the device once, and came back for each read.
    assert device.to_host == cache.offloaded_bytes()
    assert device.copied > 10 * device.brought > 0
    # Decoded for a model's own attention, a layer is read before room is made for its few new tokens.
    spare = 0 if fused else max(map(segment_bytes, cache.layers[0].store.packed))
    assert device.most <= limit + spare
    assert cache.stats() == plain.stats()


def test_of_each_layer_in_turn_all_is_there(device: Device) -> None:
    """With next to no bytes, what does not fit is of one layer."""
    model = qkv.enable(make_tiny_model(num_hidden_layers=6))
    plain = qkv.QKVCache(model.config, "none")
    ids, sizes = prompt(1000), [250, 250, 250, 200, 1]
    wanted = logits(model, plain, ids, sizes)
    limit = int(0.45 * plain.nbytes())
    cache = device.watch(limited(model.config, limit, format="none"))
    assert torch.equal(logits(model, cache, ids, sizes), wanted)
    layer = cache.layers[0].nbytes()
    assert device.most <= limit
    assert device.brought <= layer
    assert cache.offloaded_bytes() + limit >= cache.nbytes() - layer


def test_what_moves_back_is_nothing_but_the_layer_that_is_read(wide_model: PreTrainedModel, unchecked: Device) -> None:
    qkv.enable(wide_model)
    _, cache = pair(wide_model, prompt(900))
    moved, copied = unchecked.to_host, unchecked.copied
    logits(wide_model, cache, prompt(5), [1])
    assert unchecked.to_host == moved
    assert unchecked.copied - copied == 5 * cache.offloaded_bytes()


def test_beams_give_the_same_text(wide_model: PreTrainedModel, device: Device) -> None:
    qkv.enable(wide_model)
    ids = prompt(620, batch=2)
    texts = []
    plain = qkv.QKVCache(wide_model.config, "int8")
    for cache in (plain, None):
        cache = cache or limited(wide_model.config, int(0.85 * plain.nbytes()))
        texts.append(
            wide_model.generate(
                ids, past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        )
        if cache is not plain:
            assert 0 < cache.offloaded_bytes() < cache.nbytes()
    assert torch.equal(*texts)


def test_a_window_reads_what_has_left_it_behind_its_update(unchecked: Device) -> None:
    """A pass sees tokens that its own update lets go; they may lie elsewhere."""
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=300, sliding_window=400, max_position_embeddings=4096,
    )  # fmt: skip
    model = qkv.enable(MistralForCausalLM(config).eval())
    plain, cache = qkv.QKVCache(config, "int8"), limited(config, 1)
    for seed, sizes in enumerate(([350], [130], [1], [130, 1], [500], [9, 1])):
        ids = prompt(max(sizes) + len(sizes) - 1, seed=seed)
        assert torch.equal(*(logits(model, one, ids, sizes) for one in (plain, cache)))
    assert 0 < cache.offloaded_bytes() < unchecked.to_host


@each_setup
def test_views_bring_what_they_show(unchecked: Device, wide_model: PreTrainedModel, options: dict[str, Any]) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900), **options)
    for index in (0, 1, 0):
        for a, b in zip(plain.view(index).decode(), cache.view(index).decode(), strict=True):
            assert torch.equal(a, b)
        here, there = (
            [s for s in cache.layers[i].store.packed if s.home is not None and not s.at_home]
            for i in (index, 1 - index)
        )
        assert len(here) == len([s for s in cache.layers[index].store.packed if s.home is not None])
        assert not there
    assert torch.equal(cache.layers[1].keys.dequantize(), plain.layers[1].keys.dequantize())


def test_what_kernels_keep_of_addresses_goes_when_tensors_do(wide_model: PreTrainedModel, unchecked: Device) -> None:
    qkv.enable(wide_model)
    _, cache = pair(wide_model, prompt(900))
    store = cache.layers[0].store
    view = cache.view(0)
    view.runs()
    store.kernel_regions = object()
    view.runs()
    assert store.kernel_regions is not None  # nothing has moved
    segment = next(s for s in store.packed if s.home is not None)
    here = segment.key.native()
    cache.view(1).runs()
    assert segment.at_home
    assert segment.key.native().codes == segment.home[0].data_ptr()
    view.runs()
    assert store.kernel_regions is None
    assert segment.key.native() is not here
    assert segment.key.native().codes == segment.key.codes.data_ptr() != segment.home[0].data_ptr()


# ---- what changes ----------------------------------------------------------------------------------------------------


@each_setup
@pytest.mark.parametrize("length", [1, 255, 256, 257, 300, 512, 700, 899])
def test_crop_goes_back_into_what_lies_elsewhere(
    wide_model: PreTrainedModel, unchecked: Device, options: dict[str, Any], length: int
) -> None:
    qkv.enable(wide_model)
    both = pair(wide_model, prompt(900), **options)
    for one in both:
        one.crop(length - 900)
    assert all(s.room == 0 or not s.home for s in (layer.store.packed[-1] for layer in both[1].layers
                                                   if layer.store.packed and layer.store._open))  # fmt: skip
    for seed, sizes in ((2, [7, 1]), (3, [300, 1])):
        ids = prompt(20 if seed == 2 else 320, seed=seed)
        assert torch.equal(*(logits(wide_model, one, ids, sizes) for one in both))


ARRANGEMENTS: list[Callable[[qkv.QKVCache], None]] = [
    lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    lambda cache: cache.batch_repeat_interleave(2),
    lambda cache: cache.batch_select_indices(torch.tensor([1])),
    lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
]


@each_setup
@pytest.mark.parametrize("which", range(len(ARRANGEMENTS)))
def test_a_batch_is_rearranged_where_it_lies(
    wide_model: PreTrainedModel, unchecked: Device, options: dict[str, Any], which: int
) -> None:
    qkv.enable(wide_model)
    both = pair(wide_model, prompt(900, batch=2), **options)
    copied, held, before = unchecked.copied, unchecked.to_host, len(segments_at_home(both[1]))
    for one in both:
        ARRANGEMENTS[which](one)
    assert (unchecked.copied, unchecked.to_host) == (copied, held)
    assert len(segments_at_home(both[1])) == before
    assert unchecked.brought == 0
    rows = both[0].layers[0].store.shape[0]
    assert torch.equal(*(logits(wide_model, one, prompt(40, batch=rows, seed=4), [7, 1]) for one in both))
    assert both[0].nbytes() == both[1].nbytes()


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_go_on_by_themselves_with_what_lies_elsewhere(
    wide_model: PreTrainedModel, unchecked: Device, copied: Callable[[qkv.QKVCache], qkv.QKVCache], reading: bool
) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900))
    if not reading:
        cache._limits.spill.rest()
    twin, other = copied(cache), copy.deepcopy(plain)
    assert twin._limits.spill is not cache._limits.spill
    assert all(layer.store.elsewhere is twin._limits.spill for layer in twin.layers)
    assert all(s.at_home for s in segments_at_home(twin))
    assert twin.offloaded_bytes() == cache.offloaded_bytes()
    addresses = [{x.data_ptr() for s in segments_at_home(one) for x in s.tensors()} for one in (twin, cache)]
    assert not addresses[0] & addresses[1]
    moved = unchecked.to_host
    for one, same, seed in ((twin, other, 2), (cache, plain, 3)):
        wanted = logits(wide_model, same, prompt(9, seed=seed), [3, 1])
        assert torch.equal(logits(wide_model, one, prompt(9, seed=seed), [3, 1]), wanted)
    assert unchecked.to_host == moved


def test_forks_hold_together_what_lies_elsewhere(wide_model: PreTrainedModel, unchecked: Device) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900))
    moved = unchecked.to_host
    forks = cache.fork(3)
    held = [{x.data_ptr() for s in segments_at_home(one) for x in s.tensors()} for one in (cache, *forks)]
    assert all(one == held[0] for one in held)
    assert {fork.offloaded_bytes() for fork in forks} == {cache.offloaded_bytes()}
    assert qkv.nbytes([cache, *forks]) == test_fork_full.together([cache, *forks])
    for seed, fork in enumerate(forks):
        twin = copy.deepcopy(plain)
        wanted = logits(wide_model, twin, prompt(30, seed=seed), [7, 1])
        assert torch.equal(logits(wide_model, fork, prompt(30, seed=seed), [7, 1]), wanted)
        assert qkv.nbytes([cache, *forks]) == test_fork_full.together([cache, *forks])
    assert unchecked.to_host == moved
    forks[0].reorder_cache(torch.tensor([0]))
    forks[1].crop(-500)
    forks[2].reset()
    assert torch.equal(*(logits(wide_model, one, prompt(30, seed=7), [7, 1]) for one in (cache, plain)))


def test_forks_in_any_order_are_as_caches_on_the_device(unchecked: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forks(test_fork_full.Forks):
        folder = Path()

    monkeypatch.setattr(test_fork_full, "offload", lambda _, max_bytes: {"on_full": "offload", "max_bytes": max_bytes})
    run_state_machine_as_test(Forks, settings=settings(max_examples=60, stateful_step_count=14, deadline=None))


@each_setup
def test_a_cache_that_lies_elsewhere_is_saved_and_loaded(
    wide_model: PreTrainedModel, unchecked: Device, tmp_path: Path, options: dict[str, Any]
) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900), **options)
    for name, one in (("plain", plain), ("cache", cache)):
        one.save(tmp_path / name)
    limits = cache.config
    loaded = [
        qkv.QKVCache.load(tmp_path / "plain", wide_model.config, limits),
        qkv.QKVCache.load(tmp_path / "cache", wide_model.config),
        qkv.QKVCache.load(tmp_path / "cache", wide_model.config, replace(limits, on_full=None, max_bytes=None)),
    ]
    here = [one.nbytes() - one.offloaded_bytes() for one in loaded]
    assert max(here[:2]) <= cache.config.max_bytes
    assert all(isinstance(one._limits.spill, HostSpill) and one.offloaded_bytes() > 0 for one in loaded[:2])
    assert loaded[2].offloaded_bytes() == 0
    wanted = logits(wide_model, plain, prompt(30, seed=5), [7, 1])
    for one in (cache, *loaded):
        assert torch.equal(logits(wide_model, one, prompt(30, seed=5), [7, 1]), wanted)


def test_nothing_is_left_of_a_cache_that_is_gone(wide_model: PreTrainedModel, unchecked: Device) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900))
    logits(wide_model, plain, prompt(1), [1])
    logits(wide_model, cache, prompt(1), [1])
    homes = [weakref.ref(s.home[0]) for s in segments_at_home(cache)]
    spill = weakref.ref(cache._limits.spill)
    assert unchecked.brought > 0
    gc.collect()
    gc.disable()  # memory of a device must not wait for cycles to be found
    try:
        fork = cache.fork()[0]
        del cache
        assert unchecked.brought == 0
        assert spill() is None
        assert all(home() is not None for home in homes)
        assert torch.equal(*(logits(wide_model, one, prompt(3, seed=2), [1]) for one in (plain, fork)))
        fork.reset()
        assert unchecked.brought == 0
        assert not any(home() is not None for home in homes)
    finally:
        gc.enable()


def test_reset_begins_anew(wide_model: PreTrainedModel, unchecked: Device) -> None:
    qkv.enable(wide_model)
    plain, cache = pair(wide_model, prompt(900))
    cache.reset()
    assert cache.offloaded_bytes() == cache.nbytes() == unchecked.brought == 0
    plain.reset()
    assert torch.equal(*(logits(wide_model, one, prompt(900, seed=3), [300, 1]) for one in (plain, cache)))


# ---- which is chosen -------------------------------------------------------------------------------------------------


def limits(folder: str | None = None, **changes: Any) -> Limits:
    return Limits(qkv.CacheConfig("int8", on_full="offload", max_bytes=1000, offload_folder=folder, **changes))


def test_the_device_of_the_tokens_decides_where_segments_go() -> None:
    made = limits()
    assert isinstance(made.spill, Spill)
    for kind in ("cuda", "mps", "xpu", "cuda:1"):
        made._choose([], torch.device(kind))
        assert isinstance(made.spill, HostSpill)
        kept = made.spill
        made._choose([], torch.device(kind))
        assert made.spill is kept
        made._choose([], torch.device("cpu"))
        assert isinstance(made.spill, Spill)


def test_the_tokens_of_an_update_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = limited(None, 1 << 20)
    asked = []
    monkeypatch.setattr(host_spill, "serves", lambda device: bool(asked.append(device)))
    x = torch.randn(1, 1, 3, 32)
    cache.update(x, x, 0)
    assert asked[0] == x.device
    assert isinstance(cache._limits.spill, Spill)


def test_a_folder_is_of_no_use_beside_a_device(device: Device, tmp_path: Path) -> None:
    cache = limited(None, 1 << 20, offload_folder=tmp_path)
    x = torch.randn(1, 1, 3, 32)
    with pytest.raises(ValueError, match=r"offload_folder=.* leave offload_folder out"):
        cache.update(x, x, 0)
    assert cache.get_seq_length() == 0


def test_layers_of_both_kinds_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = limited(None, 1 << 20)
    x = torch.randn(1, 1, 3, 32)
    cache.update(x, x, 0)
    layer = cache.layers[0]
    with monkeypatch.context() as patched:
        patched.setattr(layer.store, "device", torch.device("cuda"))
        cache._limits._choose(cache.layers, torch.device("cuda"))  # a cache that was loaded there
        with pytest.raises(ValueError, match="all layers are on the CPU, or none is: tokens came on cuda and on cpu"):
            cache.update(x, x, 1)
    assert layer.store.shape is None
    cache.update(x, x, 0)  # after that, anywhere
    assert isinstance(cache._limits.spill, Spill)


def test_too_few_bytes_are_told_with_where_segments_would_go(wide_model: PreTrainedModel, device: Device) -> None:
    qkv.enable(wide_model)
    with pytest.raises(ValueError, match="cannot move to the CPU's memory"):
        logits(wide_model, limited(wide_model.config, 20_000), prompt(900), [50])


# ---- copies as they are made -----------------------------------------------------------------------------------------


def everything(x: torch.Tensor) -> torch.Tensor:
    """The bytes behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes(),), (1,))


@each_setup
def test_copies_hold_what_lies_behind_the_end_too(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    cache, rows = qkv.QKVCache(**options), [torch.randn(2, 3, 600, 32, dtype=torch.bfloat16) for _ in range(2)]
    cache.update(rows[0], rows[1], 0)
    store, spill = cache.layers[0].store, HostSpill()
    wanted = KVView(store).decode()
    stores = [(0, store)]
    spill.make_room(stores, 0, 0)
    moved = spill.moved(0, store)
    assert moved
    assert spill.moved_bytes(stores) == sum(x.untyped_storage().nbytes() for s in moved for x in s.home)
    assert all(torch.equal(a, b) for a, b in zip(wanted, KVView(store).decode(), strict=True))
    for segment in moved:
        for here, home in zip((x for p in segment.planes() for x in p.tensors()), segment.home, strict=True):
            assert here is not home
            assert (here.dtype, here.shape, here.stride()) == (home.dtype, home.shape, home.stride())
            assert here.untyped_storage().nbytes() == home.untyped_storage().nbytes()
            assert torch.equal(everything(here), everything(home))
            assert not here.is_inference()


def test_a_step_in_inference_mode_leaves_tensors_for_any_mode(wide_model: PreTrainedModel, device: Device) -> None:
    qkv.enable(wide_model)
    both = qkv.QKVCache(wide_model.config, "int8"), limited(wide_model.config, 190_000)
    with torch.inference_mode():
        for one in both:
            logits(wide_model, one, prompt(2000), [500])
    assert both[1].offloaded_bytes() > 0
    for one in both:
        one.crop(-1700)
    assert torch.equal(*(logits(wide_model, one, prompt(40, seed=3), [9, 1]) for one in both))


def test_a_store_by_itself_is_copied_with_what_it_holds_elsewhere() -> None:
    store, spill = LayerStore(qkv.CacheConfig("int8", equalize=False)), HostSpill()
    torch.manual_seed(0)
    store.append(torch.randn(1, 1, 600, 32), torch.randn(1, 1, 600, 32))
    spill.make_room([(0, store)], 0, 0)
    wanted = KVView(store).decode()
    fresh = copy.deepcopy(store)
    spill.rest()
    assert all(torch.equal(a, b) for a, b in zip(wanted, KVView(fresh).decode(), strict=True))
    assert all(s.at_home for s in store.packed if s.home is not None)
