"""What transformers promises of its caches, asked of ours: by hand on small numbers, and through generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from families import FAMILIES, VOCABULARY, WINDOW
from transformers import DynamicCache, EncoderDecoderCache, Gemma3TextConfig, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache

import qkv
from qkv.layers import QKVLayer, QKVSlidingLayer
from qkv.named_caches import as_argument

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

NAMES = ["Llama", "Mistral", "Gemma 3"]
# Encoded a token at a time, from the first one on.
INT8 = qkv.CacheConfig("int8", equalize=False)
FORMATS = ["none", INT8, "fp8_e4m3", qkv.CacheConfig("int4", value_format="nf4_rot", granularity="group")]
# Keys in groups of tokens, and keys that wait until there are 128 of them.
CHANNELS = qkv.CacheConfig("int4_rot", key_format="int4", key_granularity="channel", key_group_size=16)
WAITING = [CHANNELS, qkv.CacheConfig("int8"), qkv.CacheConfig.of("k5v4")]


def named(way: Any) -> str:
    return way if isinstance(way, str) else " ".join(map(str, way.to_dict().values()))


each_name = pytest.mark.parametrize("name", NAMES)
each_format = pytest.mark.parametrize("format", FORMATS, ids=named)
each_way = pytest.mark.parametrize("format", [*FORMATS, *WAITING], ids=named)


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For models this small."""
    torch.set_num_threads(1)


def layered(*layer_types: str, window: int = 4) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        num_hidden_layers=len(layer_types),
        layer_types=[f"{kind}_attention" for kind in layer_types],
        sliding_window=window,
    )


def numbers(*values: float) -> torch.Tensor:
    """Keys, or values, of one channel: a token for each number."""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def listed(x: torch.Tensor) -> list[float]:
    return x.flatten().tolist()


def kv(n: int, batch: int = 2, heads: int = 2, dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, n, dim, generator=generator)
    return keys, values


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """In double precision, where rounding decides nothing."""
    return {name: FAMILIES[name]().double() for name in NAMES}


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    chosen = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, **as_argument(cache), **chosen)


# ---- containers ----------------------------------------------------------------------------------------------------


def test_it_is_a_cache_and_a_dynamic_cache() -> None:
    cache = qkv.QKVCache(LlamaConfig(num_hidden_layers=2))
    assert isinstance(cache, Cache)
    assert isinstance(cache, DynamicCache)


def test_its_length_is_the_number_of_layers() -> None:
    assert len(qkv.QKVCache(layered("full", "sliding", "full"))) == 3
    cache = qkv.QKVCache(None)
    for layer in range(4):
        assert len(cache) == layer
        cache.update(*kv(3), layer)


def test_iterating_yields_keys_values_and_the_window_of_each_layer() -> None:
    config = layered("sliding", "full", "sliding")
    ours, theirs = qkv.QKVCache(config, "none"), DynamicCache(config=config)
    for cache in (ours, theirs):
        for layer in range(2):  # the last layer stays empty
            cache.update(*kv(7, seed=layer), layer)
    found, wanted = list(ours), list(theirs)
    assert [len(row) for row in found] == [3, 3, 3]
    for row, other in zip(found, wanted, strict=True):
        for x, y in zip(row, other, strict=True):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)
    assert found[2][:2] == (None, None)


def test_what_iterating_yields_makes_a_dynamic_cache_of_the_same_contents() -> None:
    """How caches are gathered from several processes, and the way back to a cache of transformers."""
    config = layered("sliding", "full")
    ours, theirs = qkv.QKVCache(config, "k5v4"), DynamicCache(config=config)
    for layer in range(2):
        ours.update(*kv(209, seed=layer), layer)
        theirs.update(*kv(209, seed=layer), layer)
    for gathered in (DynamicCache(list(ours)), DynamicCache(list(ours), config=config)):
        assert gathered.is_sliding == theirs.is_sliding == [True, False]
        for layer, (keys, values, _) in enumerate(ours):
            assert torch.equal(gathered.layers[layer].keys, keys)
            assert torch.equal(gathered.layers[layer].values, values)
            assert keys.shape == theirs.layers[layer].keys.shape


def test_its_description_names_each_layer_with_formats_and_tokens() -> None:
    cache = qkv.QKVCache(layered("full", "sliding"), "int4_rot", key_format="int8")
    cache.update(*kv(5), 0)
    assert repr(cache) == (
        "QKVCache(layers=[QKVLayer(key=int8, value=int4_rot, tokens=5), "
        "QKVSlidingLayer(key=int8, value=int4_rot, tokens=0)])"
    )


def test_layers_are_of_the_kind_that_the_configuration_says() -> None:
    cache = qkv.QKVCache(layered("full", "sliding", "full"))
    assert [type(layer) for layer in cache.layers] == [QKVLayer, QKVSlidingLayer, QKVLayer]
    assert cache.is_sliding == [False, True, False]
    assert [cache.get_max_length(layer) for layer in range(3)] == [-1, 4, -1]
    assert cache.get_max_length() == DynamicCache(config=layered("full", "sliding", "full")).get_max_length()


@pytest.mark.parametrize("heads", [8, 2, 1], ids=["as many as queries", "groups", "one"])
@each_way
def test_any_number_of_kv_heads_is_kept(heads: int, format: Any) -> None:
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=heads, hidden_size=64)
    cache = qkv.QKVCache(config, format)
    for n in (1, 200, 1):
        keys, values = cache.update(*kv(n, heads=heads), 0)
    assert keys.shape == values.shape == (2, heads, 202, 8)
    assert cache.layers[0].store.packed


@each_way
def test_early_initialization_takes_sizes_for_each_layer(format: Any) -> None:
    config = layered("full", "sliding")
    ours, theirs = qkv.QKVCache(config, format), DynamicCache(config=config)
    for cache in (ours, theirs):
        assert not cache.is_initialized
        cache.early_initialization(2, [3, 1], [4, 6], torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert [cache.get_seq_length(layer) for layer in range(2)] == [0, 0]
        cache.early_initialization(5, 1, 1, torch.float64, torch.device("cpu"))  # nothing: they are by now
        assert [cache.get_mask_sizes(3, layer) for layer in range(2)] == [(3, 0), (3, 0)]
        with pytest.raises(ValueError, match="2 layers"):
            cache.early_initialization(2, [3], [4], torch.float32, torch.device("cpu"))
    assert ours.batch_size == 2
    ours.update(*kv(3, heads=3, dim=4), 0)
    ours.update(*kv(3, heads=1, dim=6), 1)
    with pytest.raises(ValueError, match="kv_heads is 2"):
        ours.update(*kv(3, heads=2, dim=6), 1)


# ---- windows, on numbers -------------------------------------------------------------------------------------------


def steps_through(config: Any, *pieces: list[float]) -> tuple[list[list[float]], list[list[float]]]:
    """What every update of a piece returned, and what was kept behind it; keys and values being the same."""
    cache = qkv.QKVCache(config, "none")
    returned, kept = [], []
    for piece in pieces:
        keys, values = cache.update(numbers(*piece), -numbers(*piece), 0)
        assert torch.equal(keys, -values)
        returned.append(listed(keys))
        kept.append(listed(cache.layers[0].keys))
    return returned, kept


def test_a_full_layer_returns_and_keeps_everything() -> None:
    returned, kept = steps_through(layered("full"), [1, 2], [3], [4, 5, 6], [7])
    assert returned == kept == [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]


def test_a_window_that_is_not_full_is_like_a_full_layer() -> None:
    returned, kept = steps_through(layered("sliding"), [1, 2], [3])
    assert returned == kept == [[1, 2], [1, 2, 3]]


def test_a_window_keeps_what_the_next_token_sees_and_returns_what_this_one_saw() -> None:
    returned, kept = steps_through(layered("sliding"), [1, 2, 3], [4], [5], [6])
    assert returned == [[1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert kept == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_a_prompt_longer_than_the_window_is_returned_whole_and_its_end_is_kept() -> None:
    returned, kept = steps_through(layered("sliding"), [1, 2, 3, 4, 5, 6], [7])
    assert returned == [[1, 2, 3, 4, 5, 6], [4, 5, 6, 7]]
    assert kept == [[4, 5, 6], [5, 6, 7]]


def test_several_tokens_behind_a_full_window_see_it_and_themselves() -> None:
    returned, kept = steps_through(layered("sliding"), [1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12])
    assert returned == [[1, 2, 3, 4], [2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12]]
    assert kept == [[2, 3, 4], [5, 6, 7], [10, 11, 12]]


def test_masks_are_as_long_as_what_the_update_then_returns() -> None:
    config = layered("sliding", "full")
    ours, theirs = qkv.QKVCache(config, CHANNELS), DynamicCache(config=config)
    length = 0
    for n in (2, 1, 1, 5, 1, 9, 1, 30, 1):
        for layer in range(2):
            size = ours.get_mask_sizes(n, layer)
            assert size == theirs.get_mask_sizes(n, layer)
            assert sum(size) == length + n
            keys, values = ours.update(*kv(n), layer)
            theirs.update(*kv(n), layer)
            assert size[0] == keys.shape[2] == values.shape[2]
        length += n
        assert ours.get_seq_length(0) == ours.get_seq_length(1) == ours.get_query_offset(0) == length
    assert ours.get_mask_sizes(7, 5) == theirs.get_mask_sizes(7, 5) == (7, 0)  # a layer that is not there
    assert ours.get_seq_length(5) == 0


def test_recording_keeps_the_past_of_a_window_until_the_next_crop() -> None:
    cache = qkv.QKVCache(layered("sliding"), "none")
    cache.activate_past_recording()
    assert cache.is_recording_past(0)
    cache.update(numbers(1, 2, 3, 4, 5, 6), numbers(1, 2, 3, 4, 5, 6), 0)
    cache.crop(-2)
    assert listed(cache.layers[0].keys) == [2, 3, 4]
    keys, _ = cache.update(numbers(7), numbers(7), 0)
    assert listed(keys) == [2, 3, 4, 7]
    cache.crop(0)
    assert listed(cache.layers[0].keys) == [3, 4, 7]
    assert cache.get_seq_length() == 5


def test_a_positive_crop_is_refused() -> None:
    for cache in (qkv.QKVCache(layered("full"), INT8), DynamicCache(config=layered("full"))):
        cache.update(*kv(5), 0)
        with pytest.raises(ValueError, match="negative"):
            cache.crop(2)
        assert cache.get_seq_length() == 5


# ---- the batch -----------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("name", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([3, 3, 0, 1]), [3, 3, 0, 1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0]),
        ("batch_select_indices", torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=["reorder", "repeat", "select", "select by a mask"],
)
def test_a_change_of_the_batch_moves_the_rows_of_every_layer(
    format: Any, name: str, argument: Any, rows: list[int]
) -> None:
    cache = qkv.QKVCache(layered("full", "sliding"), format)
    for layer in range(2):
        cache.update(*kv(201, batch=4, seed=layer), layer)
    before = [(keys, values) for keys, values, _ in cache]
    getattr(cache, name)(argument)
    assert cache.batch_size == len(rows)
    for (keys, values, _), (old_keys, old_values) in zip(cache, before, strict=True):
        assert torch.equal(keys, old_keys[rows])
        assert torch.equal(values, old_values[rows])


@each_way
def test_a_change_of_the_batch_of_an_empty_cache_is_no_change(format: Any) -> None:
    cache = qkv.QKVCache(layered("full", "sliding"), format)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.get_seq_length() == 0
    cache.update(*kv(3, batch=5), 0)
    assert cache.layers[0].keys.shape[0] == 5


# ---- models and generation -----------------------------------------------------------------------------------------


@each_name
@pytest.mark.parametrize("fused", [False, True])
def test_a_model_returns_the_cache_that_it_was_given(
    name: str, fused: bool, models: dict[str, PreTrainedModel]
) -> None:
    model = models[name]
    (qkv.enable if fused else qkv.disable)(model)
    cache = qkv.QKVCache(model.config, CHANNELS)
    with torch.no_grad():
        for n in (25, 1):
            assert model(prompt(1, n), **as_argument(cache), use_cache=True).past_key_values is cache
    assert cache.get_seq_length() == 26
    result = generate(model, prompt(1, 7), qkv.QKVCache(model.config, CHANNELS), return_dict_in_generate=True)
    assert isinstance(result.past_key_values, qkv.QKVCache)
    qkv.disable(model)


@each_name
@pytest.mark.parametrize("sample", [False, True], ids=["beams", "sampled beams"])
def test_beam_search_gives_what_dynamic_cache_gives(
    name: str, sample: bool, models: dict[str, PreTrainedModel]
) -> None:
    """Past the windows; beams change places, or this would show nothing."""
    model, results = models[name], []
    for cache in (qkv.QKVCache(model.config, "none"), DynamicCache(config=model.config)):
        torch.manual_seed(3)
        result = generate(
            model,
            prompt(2, WINDOW + 5),
            cache,
            max_new_tokens=10,
            num_beams=4,
            num_return_sequences=2,
            do_sample=sample,
            return_dict_in_generate=True,
            output_scores=True,
        )
        results.append(result)
    ours, theirs = results
    assert any(len(set(row)) > 2 for row in ours.beam_indices.tolist())
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.sequences_scores, theirs.sequences_scores)


@each_name
def test_left_padding_gives_what_dynamic_cache_gives_and_no_padding_gives(
    name: str, models: dict[str, PreTrainedModel]
) -> None:
    model, ids = models[name], prompt(2, 9)
    padded = torch.nn.functional.pad(ids, (WINDOW + 4, 0), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (WINDOW + 4, 0))
    for format in FORMATS:
        plain = generate(model, ids, qkv.QKVCache(model.config, format))
        moved = generate(model, padded, qkv.QKVCache(model.config, format), attention_mask=mask)
        assert torch.equal(plain[:, 9:], moved[:, padded.shape[1] :])
        if format == "none":
            theirs = generate(model, padded, DynamicCache(config=model.config), attention_mask=mask)
            assert torch.equal(moved, theirs)


@each_name
@each_format
def test_generation_goes_on_with_the_same_cache(name: str, format: Any, models: dict[str, PreTrainedModel]) -> None:
    """Twice a few tokens are as many at once, and the cache then holds all but the last token."""
    model, ids = models[name], prompt(1, WINDOW - 3)
    cache = qkv.QKVCache(model.config, format)
    answer = ids
    for n in (2, 6, 1):
        answer = generate(model, answer, cache, max_new_tokens=n)
        assert cache.get_seq_length() == answer.shape[1] - 1
    assert torch.equal(answer, generate(model, ids, qkv.QKVCache(model.config, format), max_new_tokens=9))


@each_name
@each_format
def test_a_cache_is_used_again_after_reset(name: str, format: Any, models: dict[str, PreTrainedModel]) -> None:
    model = models[name]
    used = qkv.QKVCache(model.config, format)
    generate(model, prompt(3, 30, seed=5), used)
    used.reset()
    assert (used.get_seq_length(), used.nbytes(), used.is_initialized) == (0, 0, False)
    ids = prompt(2, 20)
    assert torch.equal(generate(model, ids, used), generate(model, ids, qkv.QKVCache(model.config, format)))


@each_name
@each_format
def test_copies_of_a_prefix_serve_several_prompts(name: str, format: Any, models: dict[str, PreTrainedModel]) -> None:
    model, prefix = models[name], prompt(1, WINDOW + 9)
    first = qkv.QKVCache(model.config, format)
    with torch.no_grad():
        model(prefix, **as_argument(first), use_cache=True)
    for seed in (2, 3):
        ids = torch.cat([prefix, prompt(1, 3 + seed, seed)], dim=1)
        cache = copy.deepcopy(first)
        assert torch.equal(generate(model, ids, cache), generate(model, ids, qkv.QKVCache(model.config, format)))
        assert cache.get_seq_length() > first.get_seq_length() == prefix.shape[1]


@each_name
def test_generation_up_to_a_total_length_stops_there(name: str, models: dict[str, PreTrainedModel]) -> None:
    model, ids = models[name], prompt(2, 10)
    options = {"max_new_tokens": None, "max_length": 19}
    ours = generate(model, ids, qkv.QKVCache(model.config, "none"), **options)
    assert ours.shape == (2, 19)
    assert torch.equal(ours, generate(model, ids, DynamicCache(config=model.config), **options))


def test_what_generation_makes_of_dynamic_cache_is_continued_by_ours() -> None:
    """A cache in the middle of a text, handed over through what iterating yields."""
    model = make_tiny_model().double()
    ids = prompt(1, 20)
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], **as_argument(theirs), use_cache=True)
    ours = qkv.QKVCache(model.config, "none")
    for layer, (keys, values, _) in enumerate(theirs):
        ours.update(keys, values, layer)
    assert torch.equal(generate(model, ids, ours), generate(model, ids, theirs))


# ---- encoders and decoders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_an_encoder_decoder_cache_of_two_of_ours_gives_what_two_of_theirs_give(name: str, beams: int) -> None:
    model = FAMILIES[name]().double()
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    ours = EncoderDecoderCache(qkv.QKVCache(model.config, "none"), qkv.QKVCache(model.config, "none"))
    theirs = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    answers = [generate(model, ids, cache, num_beams=beams) for cache in (ours, theirs)]
    assert torch.equal(*answers)
    assert ours.is_updated == theirs.is_updated == {0: True, 1: True}
    assert len(ours) == len(theirs) == 2
    assert ours.get_seq_length() == theirs.get_seq_length() == answers[0].shape[1] - 1
    for row, other in zip(ours, theirs, strict=True):
        assert len(row) == len(other) == 6
        for x, y in zip(row, other, strict=True):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        cache.crop(-3)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for layer, other in zip(getattr(ours, part).layers, getattr(theirs, part).layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
    ours.reset()
    assert ours.is_updated == {0: False, 1: False}
    assert torch.equal(generate(model, ids, ours, num_beams=beams), answers[0])


def test_an_encoder_decoder_cache_knows_which_layers_the_encoder_has_filled() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    cross = qkv.QKVCache(config, "int8")
    cross.update(*kv(5), 1)
    assert EncoderDecoderCache(qkv.QKVCache(config), cross).is_updated == {0: False, 1: True}
