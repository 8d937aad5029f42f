"""The whole contract of transformers' caches: every public name is looked at, and answers what DynamicCache answers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from families import FAMILIES
from test_cache_stateful import Oracles
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

import qkv
from qkv.layers import QKVLayer, QKVSlidingLayer
from qkv.named_caches import as_argument

# Names that we inherit, and why what is inherited is right on packed state.
INHERITED: dict[str, str] = {
    "activate_past_recording": "asks each layer that has it",
    "batch_repeat_interleave": "asks each layer",
    "batch_select_indices": "asks each layer",
    "batch_size": "asks each layer that has it",
    "early_initialization": "calls lazy_initialization of each layer",
    "get_conv_state": "of linear layers, which are transformers' own",
    "get_mask_sizes": "asks the layer",
    "get_max_length": "asks the layers",
    "get_query_offset": "is get_seq_length",
    "get_recurrent_state": "of linear layers",
    "get_seq_length": "asks the layer",
    "has_previous_state": "of linear layers",
    "is_compileable": "asks each layer",
    "is_croppable": "asks each layer",
    "is_dummy": "by the class of each layer, which stays for layers that keep nothing",
    "is_initialized": "asks each layer",
    "is_linear": "by the class of each layer, from which ours of that kind derives",
    "is_recording_past": "asks the layer",
    "is_sliding": "asks each layer",
    "offload": "asks the layer",
    "prefetch": "asks the layer that comes next",
    "reorder_cache": "asks each layer",
    "reset": "asks each layer",
    "supports_early_init": "true: lazy_initialization takes shapes and stores nothing",
    "update_conv_state": "of linear layers",
    "update_indexer": "of layers with an indexer, which are transformers' own",
    "update_recurrent_state": "of linear layers",
}


def public_names(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")} - set(dir(object))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (qkv.QKVCache, Cache),
        (qkv.QKVCache, DynamicCache),
        (QKVLayer, CacheLayerMixin),
        (QKVLayer, DynamicLayer),
        (QKVSlidingLayer, DynamicSlidingWindowLayer),
    ],
)
def test_every_public_name_of_a_base_class_is_ours_or_was_looked_at(ours: type, theirs: type) -> None:
    """A new release of transformers with a new method fails here, and somebody looks at it."""
    own = {name for kind in ours.__mro__ if kind.__module__.startswith("qkv.") for name in vars(kind)}
    assert public_names(theirs) - own - set(INHERITED) == set()


def answers(cache: Any) -> dict[str, Any]:
    names = ("is_compileable", "is_croppable", "is_dummy", "is_initialized", "is_linear", "is_sliding")
    # Not every release of transformers has all of them.
    found: dict[str, Any] = {name: getattr(cache, name) for name in names if hasattr(DynamicCache, name)}
    found["len"] = len(cache)
    found["max"] = cache.get_max_length()
    for layer, linear in enumerate(cache.is_linear):
        found[f"recording {layer}"] = cache.is_recording_past(layer)
        if not linear:
            found[f"length {layer}"] = cache.get_seq_length(layer)
            found[f"offset {layer}"] = cache.get_query_offset(layer)
            found[f"mask {layer}"] = [cache.get_mask_sizes(n, layer) for n in (1, 3, 20)]
            found[f"max {layer}"] = cache.get_max_length(layer)
    return found


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "Llama 4", "LFM2", "Falcon-H1", "Inkling"])
@pytest.mark.parametrize("record", [False, True])
def test_it_answers_what_dynamic_cache_answers(name: str, record: bool) -> None:
    model = FAMILIES[name]()
    ours, theirs = qkv.QKVCache(model.config, "none"), DynamicCache(config=model.config)
    assert answers(ours) == answers(theirs)
    if record:
        for cache in (ours, theirs):
            cache.activate_past_recording()
    for n in (5, 1, 12, 1, 30, 1, 1):
        ids = torch.randint(3, 90, (2, n))
        with torch.no_grad():
            for cache in (ours, theirs):
                model(ids, **as_argument(cache))
        assert answers(ours) == answers(theirs)
        if record and ours.is_croppable:
            for cache in (ours, theirs):
                cache.crop(-1)
            assert answers(ours) == answers(theirs)
    for cache in (ours, theirs):
        cache.reset()
    assert answers(ours) == answers(theirs)


def test_early_initialization_takes_shapes_and_stores_nothing(tiny_model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8")
    cache.early_initialization(2, 1, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="batch is 1"):
        cache.update(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), 0)
    cache.update(torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 16), 0)


MODES: dict[str, dict[str, Any]] = {
    "prompt look-up": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": None},
    "chunked prefill": {"prefill_chunk_size": 16},
    "a dictionary": {"return_dict_in_generate": True},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "a penalty": {"repetition_penalty": 1.3},
}


INT8 = {"format": "int8", "equalize": False}
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 32}
WAYS: dict[str, dict[str, Any]] = {
    "none": {"format": "none"},
    "int8": INT8,
    "int8, equalized": {"format": "int8"},
    "int4 in groups": {"format": "int4", "granularity": "group"},
    "keys per channel": CHANNELS,
    "k5v4": {"format": "k5v4"},
}
# Where tokens are taken back, what was encoded together with them keeps a trace of them.
TRACES = ("keys per channel", "k5v4")
TAKES_BACK = ("prompt look-up", "assisted")


def options_of(mode: str, model: PreTrainedModel, wrong: float = 0.01) -> dict[str, Any]:
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **MODES[mode]}
    if mode == "assisted":
        options["assistant_model"] = copy.deepcopy(model)
        with torch.no_grad():  # an assistant that is often wrong, so that tokens are taken back
            for weight in options["assistant_model"].parameters():
                weight += wrong * torch.randn_like(weight)
    return options


def repetitive(length: int) -> torch.Tensor:
    """A prompt in which look-up finds something."""
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(4))
    return ids.repeat(1, length // 12)


@pytest.mark.parametrize(
    ("name", "mode", "way"),
    [
        (name, mode, way)
        for name in ("tiny Llama", "Mistral", "Gemma 3")
        for mode in MODES
        for way in (WAYS if name == "tiny Llama" else ("none", "int8", "keys per channel"))
        if mode not in TAKES_BACK or way not in TRACES
    ],
    ids=str,
)
def test_a_mode_of_generation_gives_what_plain_steps_over_the_same_format_give(name: str, mode: str, way: str) -> None:
    """In double precision. Modes that change the way and not the result are held against plain greedy steps."""
    model = (make_tiny_model() if name == "tiny Llama" else FAMILIES[name]()).double()
    # Keys that are equalized are so from the 128th token on.
    ids = repetitive(48 if way in ("none", "int8", "int4 in groups") else 144)
    options = options_of(mode, model)
    changes_the_result = mode in ("several answers", "a penalty")
    plain = options if changes_the_result else {k: v for k, v in options.items() if k not in MODES[mode]}
    if way != "none":
        plain = {**plain, "prefill_chunk_size": 1}  # with decoded tensors a pass sees what is stored behind it

    def run(cache: Any, chosen: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(7)
        out = model.generate(ids, **as_argument(cache), **chosen)
        return out if isinstance(out, torch.Tensor) else out.sequences

    make = functools.partial(qkv.QKVCache, model.config, **WAYS[way])
    expected = run(DynamicCache(config=model.config) if way == "none" else make(), plain)
    qkv.enable(model)
    actual = run(make(backend="reference"), options)
    assert torch.equal(actual, expected)


class Told(Oracles):
    """A cache, and beside it the oracle's stores, which are told the same."""

    def __init__(self, cache: qkv.QKVCache):
        super().__init__(cache)
        self.cache, self.taken_back = cache, 0
        self._update, self._crop = cache.update, cache.crop
        cache.update, cache.crop = self.told, self.told_to_crop

    def told(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        super().update(keys, values, layer)
        return self._update(keys, values, layer, *args, **kwargs)

    def told_to_crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.taken_back -= tokens_to_remove
        self._crop(tokens_to_remove)


@pytest.mark.parametrize("mode", TAKES_BACK)
@pytest.mark.parametrize("way", ["int8, equalized", *TRACES])
@pytest.mark.parametrize("length", [48, 120, 168])
def test_tokens_taken_back_leave_what_the_oracle_holds_and_attention_reads_it(mode: str, way: str, length: int) -> None:
    """Case 6: also in the middle of a group of tokens that share their scales."""
    model = qkv.enable(make_tiny_model().double())
    texts = []
    for backend in ("reference", "auto"):
        cache = qkv.QKVCache(model.config, **WAYS[way], backend=backend)
        told = Told(cache)
        torch.manual_seed(7)
        options = {**options_of(mode, model, wrong=0.1), "max_new_tokens": 40}
        texts.append(model.generate(repetitive(length), **as_argument(cache), **options))
        assert told.taken_back > 3
        assert cache.get_seq_length() == texts[-1].shape[1] - 1
        for layer in range(len(cache)):
            for found, wanted in zip(cache.view(layer).decode(), told.shown(layer), strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert torch.equal(*texts)
