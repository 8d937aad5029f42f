"""Every family of models: QKVCache against DynamicCache, step by step, past windows and chunks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import family_table
import pytest
import torch
import transformers
from families import FAMILIES, PIECES, VOCABULARY, WINDOW, decoder_part, logits, make_cache
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import qkv
from qkv.named_caches import as_argument

# Their attention cannot be replaced, or works on latents that are not keys: they get decoded tensors, by design.
DECODED = {"Bloom", "MPT", "Falcon", "Falcon (ALiBi)", "DeepSeek-V3"}
if Version(transformers.__version__) < Version("5.24"):
    DECODED.add("GPT-J")

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

# Encoded from the first token on; keys that are equalized are so from the 128th on.
INT8 = {"format": "int8", "equalize": False}
# Keys in groups of tokens, rotated values.
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 16}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel, torch.Tensor]:
    model = FAMILIES[request.param]()
    return request.param, model, logits(model, make_cache(model, None))


def test_none_equals_dynamic_cache_bit_for_bit(family: tuple[str, PreTrainedModel, torch.Tensor]) -> None:
    _, model, expected = family
    qkv.disable(model)
    assert torch.equal(logits(model, make_cache(model, "none")), expected)


def test_none_with_the_fused_attention_is_within_2e_5(family: tuple[str, PreTrainedModel, torch.Tensor]) -> None:
    name, model, expected = family
    qkv.enable(model)
    cache = make_cache(model, "none")
    actual = logits(model, cache)
    assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    served = {row["backend"] for row in decoder_part(cache).stats()["layers"]} - {"untouched"}
    assert served == ({"decoded"} if name in DECODED else {"cpu"})


@pytest.mark.parametrize("fused", [True, False])
def test_int8_is_close(family: tuple[str, PreTrainedModel, torch.Tensor], fused: bool) -> None:
    name, model, expected = family
    (qkv.enable if fused else qkv.disable)(model)
    cache = make_cache(model, **INT8)
    actual = logits(model, cache)
    # A bound on what is plainly wrong: half a step is 0.4% of a vector's largest number, and two layers, the gates of
    # Qwen3-Next, or Gemma 4's scores (normalised, and not scaled down) let it grow. Gemma 4 lets float32's rounding
    # grow alike: by 40 times as much as Llama.
    bound = {"Qwen3-Next": 0.05, "Gemma 4": 0.3}.get(name, 0.025)
    assert float((actual - expected).abs().max()) <= bound * float(expected.abs().max())
    assert not torch.equal(actual, expected)
    assert cache.get_seq_length() == sum(PIECES)


# Their experts are not computed in double precision.
SINGLE = {"Mixtral", "Qwen2-MoE", "Qwen3-Next", "Jamba", "gpt-oss", "DeepSeek-V3"}


def test_keys_per_channel_and_rotated_values_are_seen_alike_fused_and_decoded(
    family: tuple[str, PreTrainedModel, torch.Tensor],
) -> None:
    """A token at a time: what was seen then waits exactly in an unfinished group, or is encoded."""
    name, _, _ = family
    model = FAMILIES[name]() if name in SINGLE else FAMILIES[name]().double()
    pieces = [8, *[1] * 32]  # an image comes in one piece
    exact, decoded = (logits(model, make_cache(model, **way), pieces) for way in ({"format": None}, CHANNELS))
    qkv.enable(model)
    cache = make_cache(model, **CHANNELS, backend="reference")
    fused = logits(model, cache, pieces)
    effect = float((decoded - exact).abs().max())
    assert effect > 1e-6 * float(exact.abs().max())
    # Some families compute positions or norms in float32 whatever the model's type; there codes may differ.
    assert float((fused - decoded).abs().max()) < (0.5 if name in SINGLE else 0.05) * effect
    if not model.config.is_encoder_decoder:  # what the encoder has written is encoded at once
        assert float((fused[:, :15] - exact[:, :15]).abs().max()) < 0.05 * effect
    served = {row["backend"] for row in decoder_part(cache).stats()["layers"]} - {"untouched"}
    assert served == ({"decoded"} if name in DECODED else {"reference"})


WINDOWED = ["Mistral", "Gemma 2", "Gemma 4", "Cohere 2", "Llama 4", "Falcon-H1", "Inkling"]
EVERYWHERE = [{**INT8, "sink_tokens": 3, "residual_length": 2}, {"format": "int8"}, {**CHANNELS, "sink_tokens": 3}]
IN_TWO = [INT8, {**INT8, "residual_length": 5}, {**INT8, "granularity": "head"}, {**CHANNELS, "residual_length": 2}]


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in WINDOWED for way in EVERYWHERE]
    + [(name, way) for name in ("Cohere 2", "Llama 4") for way in IN_TWO],
    ids=str,
)
def test_windows_store_and_show_the_same_in_one_pass_pieces_and_steps(name: str, way: dict[str, Any]) -> None:
    """Case 7, in double precision, where rounding decides nothing."""
    model = qkv.enable(FAMILIES[name]().double())
    way = {**way, "backend": "reference"}
    more = 60 if way["format"] == "int8" and "equalize" not in way else 0
    whole = logits(model, make_cache(model, **way), [100 + more])
    for pieces in ([1] * (100 + more), [40, 3, 50, 7 + more]):
        part = logits(model, make_cache(model, **way), pieces)
        # Some families compute positions or norms in float32 whatever the model's type.
        torch.testing.assert_close(part, whole, rtol=0, atol=2e-5)


def window_layers(cache: Any) -> list[Any]:
    return [layer for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True) if sliding]


# What waits for its group, and the room for it; and what 128 tokens take: codes, scales and offsets of keys and values.
WAITING = 2 * 2 * (16 + 64) * 2 * 16 * 4
HELD: list[tuple[dict[str, Any], int]] = [
    (INT8, 2 * 2 * 2 * 128 * (16 + 2)),
    ({"format": "int8"}, 2 * 2 * 2 * 128 * (16 + 2)),
    (CHANNELS, 2 * 2 * (128 * (8 + 8 + 2) + 128 // 16 * 16 * 2)),
]


@pytest.mark.parametrize(("way", "segment"), HELD, ids=str)
def test_a_window_holds_no_more_than_it_must(way: dict[str, Any], segment: int) -> None:
    model = qkv.enable(FAMILIES["Mistral"]())
    cache = make_cache(model, **way)
    logits(model, cache, [300, *[1] * 300])
    for layer in window_layers(cache):
        assert layer.store.length == 600
        # Of a group that is not finished nothing leaves.
        assert WINDOW - 1 <= layer.store.length - layer.store.first <= (31 if way == CHANNELS else WINDOW - 1)
        # Two segments at most, and 64 bytes behind each plane; vectors for equalizing, and a rotation.
        most = 2 * (segment + 2 * 64) + 2 * 2 * 16 * 4 + (WAITING if way == CHANNELS else 0)
        assert layer.store.nbytes() <= most
        assert layer.keys.shape == (2, 2, WINDOW - 1, 16)
    assert cache.stats()["tokens"] == 600


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
@pytest.mark.parametrize("way", [{"format": "none"}, INT8, {"format": "nf4_rot"}], ids=str)
def test_a_recorded_window_can_be_cropped_like_that_of_dynamic_cache(name: str, way: dict[str, Any]) -> None:
    """Case 6: what assisted decoding does."""
    model = qkv.enable(FAMILIES[name]())
    ids = torch.randint(3, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def run(cache: Any, record: bool) -> torch.Tensor:
        if record:
            cache.activate_past_recording()
        model(ids[:, :30], **as_argument(cache))
        if record:
            cache.crop(0)
            model(ids[:, 40:48], **as_argument(cache))
            cache.crop(-8)
            assert cache.get_seq_length() == 30
        return model(ids[:, 30:40], **as_argument(cache)).logits

    assert torch.equal(run(make_cache(model, **way), True), run(make_cache(model, **way), False))


def test_a_full_window_that_was_not_recorded_refuses_to_be_cropped() -> None:
    model = FAMILIES["Mistral"]()
    ours, theirs = make_cache(model, "int8"), make_cache(model, None)
    for cache in (ours, theirs):
        logits(model, cache, [30])
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-3)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "Falcon-H1", "T5"])
def test_batch_operations_equal_those_of_dynamic_cache(name: str) -> None:
    model = FAMILIES[name]()
    ours, theirs = make_cache(model, "none"), make_cache(model, None)
    for cache in (ours, theirs):
        logits(model, cache, [25, 1])
        if name != "Falcon-H1":  # transformers' hybrid layers repeat and select their attention part only
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([5, 0, 2, 1]))
        cache.reorder_cache(torch.tensor([1, 0, 1, 1][: 2 if name == "Falcon-H1" else 4]))
    for our_layer, their_layer in zip(decoder_part(ours).layers, decoder_part(theirs).layers, strict=True):
        assert torch.equal(our_layer.keys, their_layer.keys)
        assert torch.equal(our_layer.values, their_layer.values)


@pytest.mark.parametrize("way", [INT8, CHANNELS], ids=str)
@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "Llama 4", "BART"])
def test_a_deep_copy_in_the_middle_of_a_window_continues_the_same(name: str, way: dict[str, Any]) -> None:
    model = qkv.enable(FAMILIES[name]())
    cache = make_cache(model, **way)
    logits(model, cache, [50])
    twin = copy.deepcopy(cache)
    assert torch.equal(logits(model, cache, [17, 1]), logits(model, twin, [17, 1]))


@pytest.mark.parametrize("name", sorted(DECODED))
def test_a_family_that_cannot_be_fused_says_so(name: str) -> None:
    """Case 13."""
    model = FAMILIES[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qkv.enable(model)
        logits(model, make_cache(model, "int8"), [5, 1])
    assert any(issubclass(w.category, qkv.SlowPathWarning) for w in caught)


HEAD_SIZES = (64, 72, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_every_head_size_and_grouping_is_served_by_the_kernel(head_dim: int, kv_heads: int) -> None:
    """Case 9, and grouped heads."""
    for group in (1, 3, 7, 8):
        torch.manual_seed(group)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=4 * kv_heads * group,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
        model = LlamaForCausalLM._from_config(config).eval()
        pieces = [18, 1, 2, 1]
        exact = logits(model, make_cache(model, None), pieces)
        ways = ({"format": "none"}, INT8, {"format": "int4_rot", "granularity": "group", "equalize": False})
        decoded = [logits(model, make_cache(model, **way), pieces) for way in ways[1:]]
        qkv.enable(model)
        for way, target, bound in zip(ways, (exact, *decoded), (2e-5, 2e-4, 2e-4), strict=True):
            cache = make_cache(model, **way)
            actual = logits(model, cache, pieces)
            assert float((actual - target).abs().max()) <= bound * float(exact.abs().max())
            assert cache.stats()["layers"][0]["backend"] == "cpu"


def test_the_readme_has_the_table_that_the_command_prints() -> None:
    """All but its last column, which takes minutes: that one is made by the command alone."""
    root = Path(__file__).parent.parent
    if f"transformers=={transformers.__version__}\n" not in (root / "constraints.txt").read_text():
        pytest.skip("the table is that of the release in constraints.txt")
    readme = (root / "README.md").read_text()
    rows = readme.split(family_table.BEGIN)[1].split(family_table.END)[0].strip().splitlines()[2:]
    assert [row.rsplit(" | ", 1)[0] for row in rows] == [
        family_table.row(name, graphs=False).rsplit(" | ", 1)[0] for name in FAMILIES
    ]
    assert {row.rsplit(" | ", 1)[1] for row in rows} <= {"yes |", "no |"}
