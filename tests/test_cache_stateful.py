"""Whole caches under random sequences of operations: after each, what DynamicCache or the oracle holds, bit for bit.

The cache under test has several layers, with and without a sliding window, and goes through updates, crops, resets,
changes of the batch, copies and refused updates. Beside it goes a peer that is told the same: transformers' own cache
for the format ``none``, and the oracle, a layer at a time, for the others. Copies are taken on the way, and both stay
under comparison, so that a copy that shared anything with its original would be found.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stores import like
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, MistralConfig

import qkv

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

WINDOW = 6
HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
LONGEST = 190  # tokens; the oracle is slow

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


def gemma(*layer_types: str) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=len(layer_types),
        layer_types=[f"{kind}_attention" for kind in layer_types],
        sliding_window=WINDOW,
    )


CONFIGS: dict[str, Any] = {
    "Llama": LlamaConfig(num_hidden_layers=2),
    "Mistral": MistralConfig(num_hidden_layers=2, sliding_window=WINDOW),
    "Gemma 3": gemma("sliding", "full", "sliding"),
    "Gemma 3, full first": gemma("full", "sliding"),
}


# ---- tokens --------------------------------------------------------------------------------------------------------


def kv(
    n: int,
    batch: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
    growing: float = 0.0,
    lying: str = "packed",
) -> Pair:
    """Keys and values of ``n`` tokens; some are larger by up to ten to the power ``growing``.

    ``lying``: ``packed``; ``projected``, transposed as a model gives them; ``broken``, with gaps between channels.
    """
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for dim in (KEY_DIM, VALUE_DIM):
        x = torch.randn(batch, heads, n, dim, generator=generator)
        x = (x * 10.0 ** (torch.rand(batch, heads, n, 1, generator=generator) ** 8 * growing)).to(dtype)
        if lying == "projected":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif lying == "broken":
            x = x.repeat_interleave(2, dim=3)[..., ::2]
        pair.append(x)
    return pair[0], pair[1]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, in which a NaN equals itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(found: torch.Tensor | None, wanted: torch.Tensor | None, which_nan: bool) -> None:
    """The same shape, type and bits; a NaN may have other bits unless ``which_nan``."""
    if found is None or wanted is None:
        assert found is wanted
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not which_nan:
        found, wanted = (torch.where(x.isnan(), torch.nan, x) for x in (found, wanted))
    assert torch.equal(bits(found), bits(wanted))


# ---- peers ---------------------------------------------------------------------------------------------------------


class Peer(Protocol):
    """What goes beside a cache; the operations are those of the cache."""

    which_nan: bool

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Pair: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def reset(self) -> None: ...
    def activate_past_recording(self) -> None: ...
    def change_batch(self, name: str, argument: Any, rows: list[int]) -> None: ...
    def shown(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]: ...
    def answers(self) -> dict[str, Any] | None: ...


def answers(cache: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(cache, name) for name in ("is_croppable", "is_initialized", "is_sliding", "is_compileable")
    }
    found["len"], found["max"] = len(cache), cache.get_max_length()
    for layer in range(len(cache)):
        found[f"length {layer}"] = cache.get_seq_length(layer)
        found[f"max {layer}"] = cache.get_max_length(layer)
        found[f"recording {layer}"] = cache.is_recording_past(layer)
        found[f"mask {layer}"] = [cache.get_mask_sizes(n, layer) for n in (1, 3, WINDOW + 2)]
    return found


def in_window(x: torch.Tensor | None, sliding: bool) -> torch.Tensor | None:
    """What the next query sees of the keys or values of a layer; None where there is nothing."""
    if x is None or x.dim() < 4 or x.shape[2] == 0:
        return None
    return x[:, :, -(WINDOW - 1) :] if sliding else x


class Theirs:
    """DynamicCache."""

    which_nan = True

    def __init__(self, config: Any):
        self.cache = DynamicCache(config=config)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Pair:
        return self.cache.update(keys, values, layer)

    def crop(self, tokens_to_remove: int) -> None:
        self.cache.crop(tokens_to_remove)

    def reset(self) -> None:
        self.cache.reset()

    def activate_past_recording(self) -> None:
        self.cache.activate_past_recording()

    def change_batch(self, name: str, argument: Any, rows: list[int]) -> None:
        getattr(self.cache, name)(argument)

    def shown(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        found, sliding = self.cache.layers[layer], self.cache.is_sliding[layer]
        return in_window(found.keys, sliding), in_window(found.values, sliding)

    def answers(self) -> dict[str, Any] | None:
        return answers(self.cache)


class Oracles:
    """An oracle's store for each layer, in which no token ever leaves in front; a window is cut out of it."""

    which_nan = False

    def __init__(self, cache: qkv.QKVCache):
        self.sliding = cache.is_sliding
        self.configs = [cache.config.for_layer(layer) for layer in range(len(cache))]
        kinds = ("key_scale", "value_scale", "key_centre", "key_multiplier")
        self.given = [
            {kind: scale for kind in kinds if (scale := cache._scales.get(f"layers.{layer}.{kind}")) is not None}
            for layer in range(len(cache))
        ]
        self.recording = False
        self.reset()

    def reset(self) -> None:
        self.stores = [like(config, **given) for config, given in zip(self.configs, self.given, strict=True)]
        self.dtype = torch.float32

    def activate_past_recording(self) -> None:
        self.recording = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Pair:
        store, n = self.stores[layer], keys.shape[2]
        self.dtype = keys.dtype
        before, exact = len(store.tokens), [token.codes is None for token in store.tokens]
        for t in range(n):
            store.append(keys[:, :, t].double().numpy(), values[:, :, t].double().numpy())
        exact += [True] * n
        first = max(0, before - WINDOW + 1) if self.sliding[layer] else 0
        # With exact prefill, the tokens that are encoded in a pass of several are still seen exactly in it.
        late = self.configs[layer].prefill == "exact" and n > 1
        rows = [
            token.exact if late and exact[position] else token.now
            for position, token in enumerate(store.tokens)
            if position >= first
        ]
        return self._tensors(rows, keys, values)

    def _tensors(self, rows: list[tuple[np.ndarray, np.ndarray]], *like: torch.Tensor) -> Pair:
        if not rows:
            return like[0][:, :, :0], like[1][:, :, :0]
        keys, values = (
            torch.from_numpy(np.stack([row[side] for row in rows], axis=2)).to(self.dtype) for side in (0, 1)
        )
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        for store, sliding in zip(self.stores, self.sliding, strict=True):
            if sliding and len(store.tokens) >= WINDOW and not self.recording:
                raise RuntimeError("the window is full")
            store.crop(max(0, len(store.tokens) + tokens_to_remove))

    def change_batch(self, name: str, argument: Any, rows: list[int]) -> None:
        for store in self.stores:
            store.map_batch(rows)

    def shown(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens = self.stores[layer].tokens
        if not tokens:
            return None, None
        keys, values = self._tensors([token.now for token in tokens])
        return in_window(keys, self.sliding[layer]), in_window(values, self.sliding[layer])

    def answers(self) -> dict[str, Any] | None:
        return None


# ---- the machine ---------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A cache, its peer, and what is known of both."""

    cache: qkv.QKVCache
    peer: Peer
    batch: int = 2
    recording: bool = False
    lengths: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)  # the first token that is needed of each layer, and so held

    def copied(self, way: str) -> Case:
        cache = copy.deepcopy(self.cache) if way == "deepcopy" else pickle.loads(pickle.dumps(self.cache))
        peer = copy.deepcopy(self.peer)
        return Case(cache, peer, self.batch, self.recording, list(self.lengths), list(self.firsts))

    def croppable(self) -> int:
        """How many tokens every layer can take back."""
        allowed = []
        for length, first, sliding in zip(self.lengths, self.firsts, self.cache.is_sliding, strict=True):
            needed = first + WINDOW - 1 if sliding and first > 0 else 0
            allowed.append(length - needed)
        return min(allowed)

    def moved(self, layer: int, length: int, dropping: bool) -> None:
        self.lengths[layer] = length
        if length == 0:
            self.firsts[layer] = 0
        elif dropping and self.cache.is_sliding[layer]:
            self.firsts[layer] = max(self.firsts[layer], length - WINDOW + 1)


Bad = Callable[[Pair], Pair]
ALWAYS_BAD: dict[str, Bad] = {
    "three dimensions": lambda pair: (pair[0][0], pair[1][0]),
    "whole numbers": lambda pair: (pair[0].int(), pair[1].int()),
    "fewer values than keys": lambda pair: (pair[0].repeat(1, 1, 2, 1), pair[1]),
    "two types": lambda pair: (pair[0].half(), pair[1].double()),
    "no heads": lambda pair: (pair[0][:, :0], pair[1][:, :0]),
}
BAD: dict[str, Bad] = {
    **ALWAYS_BAD,
    "one more row": lambda pair: tuple(torch.cat([x, x[:1]]) for x in pair),
    "one head too few": lambda pair: (pair[0][:, 1:], pair[1][:, 1:]),
    "wide keys": lambda pair: (pair[0].repeat(1, 1, 1, 2), pair[1]),
    "narrow values": lambda pair: (pair[0], pair[1][..., 1:]),
    "another type": lambda pair: (pair[0].half(), pair[1].half()),
}


# Shorter than the window; of the warm-up of scales per head nothing, or the last token to come; and beyond it. For keys
# that are equalized, which have a longer warm-up, some more.
PROMPTS = st.sampled_from([0, 4, 63, 70, 90, 110])
MORE = 64


class Machine(RuleBasedStateMachine):
    """Operations of a user, of generation and of beam search, in any order.

    Args:
        make: a new cache and its peer.
        growing: how much larger some tokens are, as a power of ten.
        more: tokens that come on top of a prompt, unless it is a short one.
    """

    def __init__(self, make: Callable[[], tuple[qkv.QKVCache, Peer]], growing: float = 0.0, more: int = 0):
        super().__init__()
        self.make, self.growing, self.more = make, growing, more
        self.cases: list[Case] = []
        self.seed = 0

    @property
    def now(self) -> Case:
        return self.cases[0]

    def tokens(self, n: int, lying: str = "packed") -> Pair:
        self.seed += 1
        return kv(n, self.now.batch, self.seed, self.dtype, growing=self.growing, lying=lying)

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        record=st.booleans(),
        prompt=PROMPTS,
    )
    def begin(self, dtype: torch.dtype, record: bool, prompt: int) -> None:
        self.dtype = dtype
        cache, peer = self.make()
        layers = len(cache)
        self.cases = [Case(cache, peer, lengths=[0] * layers, firsts=[0] * layers)]
        if record:
            self.record()
        self.update(prompt + (self.more if prompt > WINDOW else 0), "projected", None)

    @precondition(lambda self: not self.now.recording)
    @rule()
    def record(self) -> None:
        self.now.recording = True
        self.now.cache.activate_past_recording()
        self.now.peer.activate_past_recording()

    @precondition(lambda self: max(self.now.lengths) < LONGEST)
    @rule(
        n=st.sampled_from([0, 1, 1, 1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 17, 33, 66]),
        lying=st.sampled_from(["projected", "packed", "broken"]),
        odd=st.none() | st.tuples(st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.integers(0, 2**20)),
    )
    def update(self, n: int, lying: str, odd: tuple[float, int] | None) -> None:
        now = self.now
        for layer in range(len(now.cache)):
            keys, values = self.tokens(n, lying)
            if odd is not None and n:
                x = (keys, values)[odd[1] % 2]
                row, head, token = odd[1] // 2 % x.shape[0], odd[1] // 8 % HEADS, odd[1] // 16 % n
                x[row, head, token, odd[1] % VALUE_DIM] = odd[0]
            wanted = now.peer.update(keys.clone(), values.clone(), layer)
            found = now.cache.update(keys, values, layer)
            for ours, theirs in zip(found, wanted, strict=True):
                assert_same(ours, theirs, now.peer.which_nan)
            keys.fill_(7.0)  # they are the caller's
            now.moved(layer, now.lengths[layer] + n, dropping=not now.recording)

    @rule(steps=st.integers(2, 9))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            if max(self.now.lengths) < LONGEST:
                self.update(1, "projected", None)

    @precondition(lambda self: min(self.now.lengths) > 0)
    @rule(back=st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 20, 70, 1000]), keep=st.none() | st.none() | st.integers(1, 4))
    def crop(self, back: int, keep: int | None) -> None:
        now = self.now
        if keep is not None:
            back = max(0, min(now.lengths) - keep)
        full = [sliding and length >= WINDOW for sliding, length in zip(now.cache.is_sliding, now.lengths, strict=True)]
        if any(full) and not now.recording:
            back = min(back, min(now.lengths) - 1)
            # Of DynamicCache a copy: it has cropped the layers in front of the window when it refuses.
            for cache in (now.cache, copy.deepcopy(now.peer)):
                with pytest.raises(RuntimeError):
                    cache.crop(-back)
            return
        if any(full):
            if back < min(now.lengths) and self.reaches_back_too_far(back):
                # DynamicCache goes on with fewer tokens than it announces.
                with pytest.raises(RuntimeError, match="went with the last crop"):
                    now.cache.crop(-back)
            back = min(back, now.croppable())
        for cache in (now.cache, now.peer):
            cache.crop(-back)
        for layer, length in enumerate(now.lengths):
            now.moved(layer, max(0, length - back), dropping=True)

    def reaches_back_too_far(self, back: int) -> bool:
        """Whether after the crop a window would see tokens that are gone; while scales warm up, none are."""
        now = self.now
        return any(
            sliding and max(0, length - back - WINDOW + 1) < layer.store.first
            for layer, length, sliding in zip(now.cache.layers, now.lengths, now.cache.is_sliding, strict=True)
        )

    @rule(batch=st.integers(1, 3), prompt=PROMPTS)
    def reset(self, batch: int, prompt: int) -> None:
        now = self.now
        now.cache.reset()
        now.peer.reset()
        now.batch = batch
        now.lengths, now.firsts = [0] * len(now.lengths), [0] * len(now.firsts)
        assert now.cache.nbytes() == 0
        self.holds_what_its_peer_holds()
        self.update(prompt + (self.more if prompt > WINDOW else 0), "projected", None)

    def change_batch(self, name: str, argument: Any, rows: list[int]) -> None:
        now = self.now
        getattr(now.cache, name)(argument)
        now.peer.change_batch(name, argument, rows)
        now.batch = len(rows)
        assert now.cache.batch_size == len(rows)

    @precondition(lambda self: min(self.now.lengths) > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        """As beam search does: some rows go, others are there twice."""
        row = st.integers(0, self.now.batch - 1)
        rows = data.draw(st.lists(row, min_size=self.now.batch, max_size=self.now.batch))
        self.change_batch("reorder_cache", torch.tensor(rows), rows)

    @precondition(lambda self: min(self.now.lengths) > 0 and self.now.batch <= 2)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        rows = [row for row in range(self.now.batch) for _ in range(repeats)]
        self.change_batch("batch_repeat_interleave", repeats, rows)

    @precondition(lambda self: min(self.now.lengths) > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.now.batch - 1), min_size=1, max_size=3))
        self.change_batch("batch_select_indices", torch.tensor(rows), rows)

    @rule(way=st.sampled_from(["deepcopy", "pickle"]), with_the_copy=st.booleans())
    def copy(self, way: str, with_the_copy: bool) -> None:
        """Goes on with the copy or with the original; the other one is kept and looked at."""
        both = [self.now.copied(way), self.now]
        self.cases = both if with_the_copy else both[::-1]

    @precondition(lambda self: len(self.cases) > 1)
    @rule()
    def go_on_with_the_other(self) -> None:
        self.cases.reverse()

    @rule(data=st.data(), n=st.sampled_from([1, 1, 3]))
    def update_that_does_not_fit(self, data: st.DataObject, n: int) -> None:
        cache = self.now.cache
        layer = data.draw(st.integers(0, len(cache) - 1))
        kinds = BAD if self.now.lengths[layer] else ALWAYS_BAD
        keys, values = kinds[data.draw(st.sampled_from(sorted(kinds)))](self.tokens(n))
        before = cache.stats(), answers(cache)
        with pytest.raises(ValueError, match=r"must|but the cache holds"):
            cache.update(keys, values, layer)
        assert (cache.stats(), answers(cache)) == before

    @invariant()
    def holds_what_its_peer_holds(self) -> None:
        for case in self.cases:
            cache = case.cache
            for layer, (length, (keys, values, window)) in enumerate(zip(case.lengths, cache, strict=True)):
                sliding = cache.is_sliding[layer]
                for found, wanted in zip((keys, values), case.peer.shown(layer), strict=True):
                    assert_same(in_window(found, sliding), wanted, case.peer.which_nan)
                first = max(0, length - WINDOW + 1) if sliding else 0
                assert cache.get_seq_length(layer) == length
                assert cache.get_mask_sizes(4, layer) == (length - first + 4, first)
                assert (window is not None) == sliding
            theirs = case.peer.answers()
            assert theirs is None or answers(cache) == theirs
            stats = cache.stats()
            assert stats["tokens"] == max(case.lengths)
            assert stats["bytes"] == cache.nbytes() == sum(row["bytes"] for row in stats["layers"])


def run(machine: Callable[[], Machine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_any_sequence_of_operations_gives_what_dynamic_cache_gives(name: str) -> None:
    config = CONFIGS[name]
    run(lambda: Machine(lambda: (qkv.QKVCache(config, "none"), Theirs(config))), 30, 20)


# What is stored, how, and in which layers: everything that has a path of its own.
INT8 = {"format": "int8", "equalize": False}
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 16}
WAYS: dict[str, dict[str, Any]] = {
    "int8": INT8,
    "fp8_e4m3 per head": {"format": "fp8_e4m3", "granularity": "head"},
    "int8, sinks and a residual window": {**INT8, "sink_tokens": 2, "residual_length": 4},
    "a residual window longer than the sliding one": {"format": "fp8_e4m3", "residual_length": 9, "sink_tokens": 1},
    "int8 per head, sinks and a residual window": {
        **INT8,
        "granularity": "head",
        "sink_tokens": 3,
        "residual_length": 5,
    },
    "exact keys, int8 values": {"format": "int8", "key_format": "none", "residual_length": 2},
    "another format for the values, per head": {
        **INT8,
        "value_format": "fp8_e4m3",
        "granularity": "head",
        "prefill": "exact",
    },
    "exact prefill": {**INT8, "prefill": "exact", "residual_length": 3},
    "layers that differ": {
        **INT8,
        "layers": {1: {"format": "fp8_e4m3", "granularity": "head"}, 0: {"sink_tokens": 4}},
    },
    "given scales": {
        "format": "int8",
        "granularity": "head",
        "scales": {
            f"layers.{layer}.{kind}_scale": torch.tensor([0.01, 0.03]) for layer in (0, 1) for kind in ("key", "value")
        },
    },
    "int8, equalized": {"format": "int8"},
    "int8 per head, equalized, sinks and a residual window": {
        "format": "int8",
        "granularity": "head",
        "equalize": True,
        "sink_tokens": 3,
        "residual_length": 5,
    },
    "given vectors for equalizing": {
        "format": "int8",
        "scales": {
            f"layers.{layer}.{kind}": torch.tensor([[0.1, 3.0, 0.7, 1.0], [2.0, 0.2, 40.0, 1.5]])
            for layer in (0, 1)
            for kind in ("key_centre", "key_multiplier")
        },
    },
    "groups of channels": {"format": "int3", "granularity": "group", "sink_tokens": 1},
    "a code book, rotated": {"format": "nf4_rot", "residual_length": 3, "equalize": False},
    "keys per channel": CHANNELS,
    "both per channel, in groups of two sizes, sinks and a residual window": {
        "format": "int2",
        "granularity": "channel",
        "key_group_size": 32,
        "value_group_size": 16,
        "sink_tokens": 3,
        "residual_length": 5,
    },
    "keys per channel, exact prefill": {**CHANNELS, "prefill": "exact", "sink_tokens": 1},
    "keys per channel, equalized": {**CHANNELS, "key_format": "int5_rot", "equalize": True, "sink_tokens": 4},
    "values per channel beside a scale per head": {
        **INT8,
        "key_granularity": "head",
        "value_format": "int6",
        "value_granularity": "channel",
        "value_group_size": 16,
    },
    "layers of which one is per channel": {**INT8, "layers": {1: CHANNELS, 0: {"residual_length": 3}}},
}


@pytest.mark.parametrize("way", WAYS)
def test_any_sequence_of_operations_gives_what_the_oracle_gives(way: str) -> None:
    config = gemma("sliding", "full")

    def make() -> tuple[qkv.QKVCache, Peer]:
        cache = qkv.QKVCache(config, **WAYS[way])
        return cache, Oracles(cache)

    run(lambda: Machine(make, growing=2.0, more=MORE if "equalized" in way else 0), 8, 20)


# ---- what random sequences hardly meet -----------------------------------------------------------------------------


def test_a_crop_gives_the_scale_back_that_a_forgotten_token_had_made_grow() -> None:
    """Also where the window then holds nothing but tokens that are not finite, which have no scale of their own."""
    config = gemma("sliding")
    prefix, cropped, later = kv(64 + WINDOW, seed=1), kv(1, seed=2), kv(1, seed=3)
    prefix[0][:, :, 64] *= 50  # where the scales of the keys grow, beyond those of the warm-up
    prefix[0][:, :, 65:] = torch.nan
    cache, never = (qkv.QKVCache(config, "int8", granularity="head", equalize=False) for _ in range(2))
    for one in (cache, never):
        one.activate_past_recording()
        one.update(*prefix, 0)
        one.crop(0)  # the large token goes
    cache.update(*cropped, 0)
    cache.crop(-1)
    for one in (cache, never):
        one.update(*later, 0)
    assert_same(cache.layers[0].keys, never.layers[0].keys, which_nan=True)


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize(
    "options", [{**INT8, "granularity": "head"}, {"format": "int8"}, {**CHANNELS, "equalize": True}], ids=str
)
def test_a_crop_into_the_sinks_starts_the_warm_up_anew(keep: int, options: dict[str, Any]) -> None:
    """Scales per head, and the vectors for equalizing, are then those of the tokens that come; these wait exactly."""
    config = LlamaConfig(num_hidden_layers=2)
    options = {**options, "sink_tokens": 3}
    cache, fresh = (qkv.QKVCache(config, **options) for _ in range(2))
    for layer in range(2):
        old, new = kv(150, seed=layer), kv(150, seed=5 + layer)
        cache.update(*(100 * x for x in old), layer)
        cache.layers[layer].crop(keep - 150)
        for start, end in ((0, 30), (30, 150)):
            cache.update(*(x[:, :, start:end] for x in new), layer)
            if end == 30:
                assert torch.equal(cache.layers[layer].keys[:, :, keep:], new[0][:, :, :30])
        fresh.update(*(torch.cat([100 * x[:, :, :keep], y], dim=2) for x, y in zip(old, new, strict=True)), layer)
    for (*ours, _), (*theirs, _) in zip(cache, fresh, strict=True):
        for found, wanted in zip(ours, theirs, strict=True):
            assert_same(found, wanted, which_nan=True)


def test_an_empty_cache_can_be_cropped() -> None:
    for name, config in CONFIGS.items():
        cache = qkv.QKVCache(config, "int8")
        for back in (0, 3):
            cache.crop(-back)
            assert answers(cache) == answers(qkv.QKVCache(config, "int8")), name
