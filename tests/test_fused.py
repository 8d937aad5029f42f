"""Switching the fused attention on and off, and what `update` hands out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import qkv
from qkv.formats.base import Format
from qkv.lazy import PackedTensor, view_of
from qkv.named_caches import as_argument
from qkv.storage import LayerStore
from qkv.view import KVView

registry: Any = sys.modules["qkv.formats"]  # `qkv.formats` is the function of that name


def packed(n: int = 20, dtype: torch.dtype = torch.float32) -> tuple[PackedTensor, PackedTensor]:
    torch.manual_seed(0)
    store = LayerStore(qkv.CacheConfig("int8", equalize=False))
    store.append(torch.randn(2, 3, n, 16, dtype=dtype), torch.randn(2, 3, n, 8, dtype=dtype))
    view = KVView(store)
    return PackedTensor(view, True), PackedTensor(view, False)


def test_enable_and_disable_change_nothing_but_the_choice_of_attention(tiny_model: PreTrainedModel) -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    ids = torch.randint(3, 250, (1, 12))
    with torch.no_grad():
        expected = tiny_model(ids).logits
        assert qkv.enable(tiny_model) is tiny_model
        qkv.enable(tiny_model)
        assert tiny_model.config._attn_implementation == "qkv"
        assert torch.equal(tiny_model(ids).logits, expected)
        assert torch.equal(tiny_model(ids, **as_argument(DynamicCache(config=tiny_model.config))).logits, expected)
        assert qkv.disable(tiny_model) is tiny_model
        assert tiny_model.config._attn_implementation == "sdpa"
        assert torch.equal(tiny_model(ids).logits, expected)
    after = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    assert {name: after[name] for name in before} == before


def test_disable_gives_back_the_attention_that_was_there(tiny_model: PreTrainedModel) -> None:
    model = copy.deepcopy(tiny_model)
    model.set_attn_implementation("eager")
    qkv.disable(model)
    assert model.config._attn_implementation == "eager"
    qkv.disable(qkv.enable(model))
    assert model.config._attn_implementation == "eager"


def test_enable_refuses_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="transformers model"):
        qkv.enable(torch.nn.Linear(2, 2))


def test_disable_refuses_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="transformers model"):
        qkv.disable(None)


@pytest.fixture
def toy_format() -> Iterator[str]:
    """A format of ours that the compiled kernel does not know."""

    class Toy(Format):
        name = "toy"
        bits = 8
        code_dtype = torch.int8
        largest = 63.0

        def round(self, scaled: torch.Tensor) -> torch.Tensor:
            return torch.round(scaled).to(torch.int8)

    qkv.register_format(Toy)
    yield "toy"
    del registry._table["toy"]


def test_a_new_format_works_at_once_and_says_that_it_is_slow(toy_format: str, tiny_model: PreTrainedModel) -> None:
    assert toy_format in qkv.formats()
    qkv.enable(tiny_model)
    cache = qkv.QKVCache(tiny_model.config, toy_format, residual_length=3)
    with torch.no_grad(), pytest.warns(qkv.SlowPathWarning, match="does not read toy"):
        tiny_model(torch.tensor([[5]]), **as_argument(cache))
    assert cache.stats()["layers"][0]["backend"] == "dense"
    insisting = qkv.QKVCache(tiny_model.config, toy_format, backend="cpu")
    with torch.no_grad(), pytest.raises(ValueError, match="does not read toy"):
        tiny_model(torch.tensor([[5]]), **as_argument(insisting))


@pytest.fixture
def four_bits() -> Iterator[str]:
    """A format of ours with codes of 4 bits, an offset and groups; the compiled kernel does not know it."""

    class Quarter(Format):
        name = "quarter"
        bits = 4
        code_dtype = torch.uint8
        largest = 15.0
        granularities = ("group", "channel", "token")
        offset = "bfloat16"

        def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            low, high = x.float().amin(dim=-1), x.float().amax(dim=-1)
            scale = self.scale_type.store(((high - low) / 15.0).clamp(1e-30, 1e30))
            return scale, low.to(torch.bfloat16)

        def encode(self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
            assert offset is not None
            return self.round((x.float() - offset.float().unsqueeze(-1)) / scale.float().unsqueeze(-1))

        def decode(
            self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offset: torch.Tensor | None = None
        ) -> torch.Tensor:
            assert offset is not None
            return (codes.float() * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)).to(dtype)

        def round(self, scaled: torch.Tensor) -> torch.Tensor:
            return scaled.round().clamp(0, 15).to(torch.uint8)

    qkv.register_format(Quarter)
    yield "quarter"
    del registry._table["quarter"]


@pytest.mark.parametrize("granularity", ["group", "channel", "token"])
@pytest.mark.parametrize("equalize", [False, True])
def test_a_new_format_of_few_bits_has_granularities_sinks_and_equalizing_at_once(
    granularity: str, equalize: bool, four_bits: str, tiny_model: PreTrainedModel
) -> None:
    ids = torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = tiny_model(ids).logits
        qkv.enable(tiny_model)
        cache = qkv.QKVCache(tiny_model.config, four_bits, granularity=granularity, equalize=equalize, sink_tokens=2)
        stored = tiny_model(ids, **as_argument(cache)).logits
        with pytest.warns(qkv.SlowPathWarning, match="does not read quarter"):
            tiny_model(ids[:, :1], **as_argument(cache))
    assert cache.stats()["layers"][0]["granularity"] == granularity
    assert 0 < float((stored - exact).square().mean()) < 0.05 * float(exact.var())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bits": 4},
            "stored in 8 bits, code_dtype a type of one byte, or in 2, 3, 4, 5, 6 bits, code_dtype torch.uint8",
        ),
        ({"bits": 7, "code_dtype": torch.uint8}, "they are 7 bits of torch.uint8"),
        ({"code_dtype": torch.int16}, "a type of one byte"),
        ({"bits": 4, "code_dtype": torch.uint8}, "codes of type torch.uint8 below 16"),
        ({"code_dtype": torch.float8_e4m3fn}, "stand for themselves"),
        ({"name": "int8"}, "registered already"),
        ({"name": "k5v4"}, "registered already"),
        ({"name": None}, "needs a `name`"),
    ],
    ids=str,
)
def test_a_format_that_is_not_what_it_says_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"name": "toy", "bits": 8, "code_dtype": torch.int8, "largest": 63.0, **changes}
    values["round"] = lambda self, scaled: torch.round(scaled).to(self.code_dtype)
    with pytest.raises(ValueError, match=message):
        qkv.register_format(type("Toy", (Format,), values))
    assert "toy" not in qkv.formats()


def test_a_cache_made_before_enable_uses_it(tiny_model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(tiny_model.config, "int8")
    qkv.enable(tiny_model)
    with torch.no_grad():
        tiny_model(torch.tensor([[5]]), **as_argument(cache))
    assert cache.stats()["layers"][0]["backend"] == "cpu"


def test_a_model_that_is_not_enabled_gets_ordinary_tensors(tiny_model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(tiny_model.config, "none")
    keys, values = cache.update(torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16), 0)
    assert type(keys) is type(values) is torch.Tensor


OPERATIONS: dict[str, Any] = {
    "transpose": lambda k, v: k.transpose(1, 2),
    "repeat for grouped heads": lambda k, v: k[:, :, None].expand(2, 3, 2, 20, 16).reshape(2, 6, 20, 16),
    "concatenate": lambda k, v: torch.cat([k, k], dim=2),
    "concatenate with an ordinary tensor": lambda k, v: torch.cat([torch.ones(2, 3, 1, 16), k], dim=-2),
    "stack in a nested list": lambda k, v: torch.stack([k, k]),
    "arithmetic": lambda k, v: (k * 2 + 1).sum(),
    "matmul": lambda k, v: torch.matmul(torch.ones(2, 3, 5, 16), k.mT),
    "softmax of scores times values": lambda k, v: (torch.ones(2, 3, 5, 16) @ k.mT).softmax(-1) @ v,
    "sdpa": lambda k, v: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(2, 3, 4, 16), k, k[..., :16], is_causal=False
    ),
    "einsum": lambda k, v: torch.einsum("bhtd,bhte->bhde", k, v),
    "in a keyword": lambda k, v: torch.add(input=torch.ones(1), other=k),
    "dtype": lambda k, v: k.to(torch.bfloat16),
    "clone": lambda k, v: k.clone(),
    "view": lambda k, v: k.view(6, 20, 16),
    "contiguous and view": lambda k, v: v.contiguous().view(6, 20, 8),
    "item": lambda k, v: torch.tensor(k[0, 0, 0, 0].item()),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_whatever_a_model_does_with_packed_tensors_is_right(name: str, inference: bool) -> None:
    keys, values = packed()
    plain = keys.decode(), values.decode()
    with torch.inference_mode(inference), pytest.warns(qkv.SlowPathWarning, match="decoded"):
        actual = OPERATIONS[name](keys, values)
    assert type(actual) is torch.Tensor
    assert torch.equal(actual, OPERATIONS[name](*plain))


def test_packed_tensors_say_what_they_stand_for() -> None:
    keys, values = packed(dtype=torch.bfloat16)
    assert (keys.shape, values.shape) == ((2, 3, 20, 16), (2, 3, 20, 8))
    assert keys.dtype == torch.bfloat16
    assert keys.device.type == "cpu"
    assert keys.dim() == 4
    assert keys.to(keys.device) is keys
    assert keys.to(torch.bfloat16) is keys
    assert "keys of 20 tokens" in repr(keys)
    assert view_of(keys, values) is keys.kv_view
    assert view_of(keys, torch.zeros(1)) is None
    assert view_of(*[packed()[i] for i in (0, 1)]) is None


def test_dropout_over_packed_keys_is_refused(tiny_model: PreTrainedModel) -> None:
    model = copy.deepcopy(tiny_model).train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    qkv.enable(model)
    with pytest.raises(ValueError, match=r"model\.eval"), torch.no_grad():
        model(torch.tensor([[5]]), **as_argument(qkv.QKVCache(model.config, "int8")))
