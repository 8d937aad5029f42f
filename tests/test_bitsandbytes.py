"""Side by side with bitsandbytes: its code books are ours, and models whose weights it holds work with our caches.

It is an extra (`pip install qkv[bnb]`); on CPUs it does all that is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, PreTrainedModel

import qkv
from qkv.formats import get_format
from qkv.formats.base import Format
from qkv.named_caches import as_argument

bnb: Any = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed: pip install qkv[bnb]")
pytest.importorskip("accelerate", reason="transformers loads models for bitsandbytes with accelerate only")

pytestmark = [
    pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]

BLOCK = 64
each_4_bit = pytest.mark.parametrize("name", ["nf4", "fp4"])
few = settings(max_examples=60, deadline=None)
many = settings(max_examples=200, deadline=None)


def book(name: str) -> Format:
    format = get_format(name)
    assert format is not None
    assert format.table is not None
    return format


# ---- code books ----------------------------------------------------------------------------------------------------


@each_4_bit
def test_the_tables_of_4_bits_are_theirs(name: str) -> None:
    assert torch.equal(torch.tensor(book(name).table), bnb.get_4bit_type(name, device="cpu"))


def test_the_table_of_8_bits_is_theirs() -> None:
    assert torch.equal(torch.tensor(book("bnb8").table), bnb.create_dynamic_map())


def quantized(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Their codes, uint8, and scales of ``x [n, 64]``, and what they decode it to, float32."""
    flat = x.reshape(-1)
    if name == "bnb8":
        codes, state = bnb.quantize_blockwise(flat, blocksize=BLOCK)
        decoded = bnb.dequantize_blockwise(codes, state)
    else:
        packed, state = bnb.quantize_4bit(flat, blocksize=BLOCK, quant_type=name)
        codes = torch.cat([packed >> 4, packed & 15], dim=1)
        state.dtype = torch.float32
        decoded = bnb.dequantize_4bit(packed, state)
    return codes.view(x.shape), state.absmax, decoded.float().view(x.shape)


def blocks() -> st.SearchStrategy[np.ndarray]:
    """Two blocks of float32 within -1 .. 1."""
    return arrays(np.float32, (2, BLOCK), elements=st.one_of(st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0])))


@each_4_bit
@many
@given(
    x=blocks(),
    exponent=st.integers(-10, 10),
    sign=st.sampled_from([1.0, -1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_under_a_scale_that_both_can_store_codes_are_theirs_bit_for_bit(
    name: str, x: np.ndarray, exponent: int, sign: float, dtype: torch.dtype
) -> None:
    rows = torch.from_numpy(x)
    rows[:, 7] = sign  # the largest number of each block: a power of two
    rows = (rows * 2.0**exponent).to(dtype)
    codes, scale, _ = quantized(rows, name)
    own, _ = book(name).choose(rows)
    assert own.tolist() == scale.tolist() == [2.0**exponent] * 2
    assert torch.equal(book(name).encode(rows, own), codes)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """The numbers ``x [n]`` in rows that begin with 1, filled up with it: ``[.., 64]``."""
    x = torch.nn.functional.pad(x, (0, -len(x) % (BLOCK - 1)), value=1.0).view(-1, BLOCK - 1)
    return torch.cat([torch.ones(len(x), 1), x], dim=1)


def around_midpoints(name: str) -> torch.Tensor:
    """The numbers halfway between two entries, and those next to them; float32 ``[.., 64]``."""
    values = np.unique(np.array(book(name).table, dtype=np.float32))
    middle = (values[:-1] + values[1:]) / np.float32(2)
    numbers = [middle]
    for side in (-2, 2):
        near = middle
        for _ in range(3):
            near = np.nextafter(near, np.float32(side))
            numbers.append(near)
    return in_blocks(torch.from_numpy(np.concatenate(numbers)))


@each_4_bit
def test_numbers_around_midpoints_go_where_theirs_go(name: str) -> None:
    rows = around_midpoints(name)
    codes, _, _ = quantized(rows, name)
    own, _ = book(name).choose(rows)
    assert torch.equal(book(name).encode(rows, own), codes)


def test_zeros_become_their_zeros() -> None:
    for name in ("nf4", "fp4"):
        rows = torch.zeros(1, BLOCK)
        own, _ = book(name).choose(rows)
        assert torch.equal(book(name).encode(rows, own), quantized(rows, name)[0])


@pytest.mark.parametrize("name", ["nf4", "fp4", "bnb8"])
def test_their_codes_decode_to_their_numbers_under_their_scale(name: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, BLOCK) * 10.0 ** torch.randint(-6, 6, (200, 1))
    codes, scale, decoded = quantized(rows, name)
    assert torch.equal(book(name).decode(codes, scale, torch.float32), decoded)


@pytest.mark.parametrize("name", ["nf4", "fp4", "bnb8"])
@many
@given(x=blocks(), size=st.floats(2.0**-10, 2.0**10, width=32))
def test_errors_differ_by_no_more_than_the_rounding_of_the_scale(name: str, x: np.ndarray, size: float) -> None:
    rows = torch.from_numpy(x) * size
    own, _ = book(name).choose(rows)
    ours = (book(name).decode(book(name).encode(rows, own), own, torch.float64) - rows).abs()
    theirs = (quantized(rows, name)[2].double() - rows).abs()
    # Of 8 bits they look a number up by its place on a grid of 65,536.
    room = rows.double().abs().amax(dim=-1, keepdim=True) * (2.0**-7 + (2.0**-15 if name == "bnb8" else 2.0**-20))
    room = room + 1e-37
    assert bool((ours <= theirs + room).all())
    assert bool((theirs <= ours + room).all())


def test_codes_of_8_bits_are_theirs_on_the_grid_that_they_look_numbers_up_on() -> None:
    # The places as their kernel computes them, in float32.
    grid = torch.from_numpy(np.float32(-1) + np.arange(65536, dtype=np.float32) * np.float32(2) / np.float32(65535))
    rows = in_blocks(grid)
    codes, scale, _ = quantized(rows, "bnb8")
    assert set(scale.tolist()) == {1.0}
    own, _ = book("bnb8").choose(rows)
    assert torch.equal(book("bnb8").encode(rows, own), codes)


def test_between_places_of_that_grid_ours_is_the_nearer_one() -> None:
    torch.manual_seed(0)
    rows = torch.cat([torch.ones(1000, 1), torch.rand(1000, BLOCK - 1) * 2e-4 - 1e-4], dim=1)
    own, _ = book("bnb8").choose(rows)
    ours = (book("bnb8").decode(book("bnb8").encode(rows, own), own, torch.float64) - rows).abs()
    theirs = (quantized(rows, "bnb8")[2].double() - rows).abs()
    assert bool((ours <= theirs + 1e-12).all())


# ---- models --------------------------------------------------------------------------------------------------------

# How weights are held, and the type of all else.
WEIGHTS: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, torch.float32, "Linear4bit"),
    "fp4 bfloat16": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.bfloat16},
        torch.bfloat16,
        "Linear4bit",
    ),
    "int8": ({"load_in_8bit": True}, torch.float32, "Linear8bitLt"),
}
PROMPT = 150  # beyond the 128 tokens from which int8 takes its vectors for keys
NEW = 12


def kind_of_weights(model: PreTrainedModel) -> str:
    return type(model.model.layers[0].self_attn.k_proj).__name__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk, its sizes multiples of the 64 that 4-bit weights are packed by."""
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(hidden_size=192, intermediate_size=256, head_dim=64).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=list(WEIGHTS))
def loaded(request: pytest.FixtureRequest, folder: Path) -> PreTrainedModel:
    """A model whose weights bitsandbytes holds in 4 or 8 bits."""
    how, dtype, kind = WEIGHTS[request.param]
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**how), dtype=dtype, device_map="cpu"
    ).eval()
    assert kind_of_weights(model) == kind
    return model


@pytest.fixture(params=["decoded", "fused"])
def model(request: pytest.FixtureRequest, loaded: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The same, with transformers' attention or with ours; transformers' afterwards."""
    if request.param == "fused":
        qkv.enable(loaded)
    yield loaded
    qkv.disable(loaded)


def is_fused(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == "qkv"


def prompt() -> torch.Tensor:
    return torch.randint(3, 250, (2, PROMPT), generator=torch.Generator().manual_seed(1))


def logits(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """Of a prompt and of each of some tokens behind it, ``[batch, PROMPT + NEW, vocabulary]``, double."""
    following = torch.randint(3, 250, (2, NEW), generator=torch.Generator().manual_seed(2))
    found = []
    with torch.no_grad():
        for ids in (prompt(), *following.split(1, dim=1)):
            found.append(model(ids, **as_argument(cache)).logits)
    return torch.cat(found, dim=1).double()


def generated(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    ids = prompt()
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
    )[:, PROMPT:]


def test_unquantized_it_is_dynamic_cache(model: PreTrainedModel) -> None:
    plain = DynamicCache(config=model.config)
    cache = qkv.QKVCache(model.config, "none")
    expected, found = logits(model, plain), logits(model, cache)
    if not is_fused(model):
        assert torch.equal(found, expected)
    else:
        # Sums in another order. 8-bit weights round activations to 8 bits, and 4-bit weights on processors with AVX-512
        # to bfloat16 whatever the model's type (a millionth more changes nothing), which makes much of little.
        rounds = model.dtype == torch.bfloat16 or kind_of_weights(model) in ("Linear8bitLt", "Linear4bit")
        assert (found - expected).norm() <= (2e-2 if rounds else 1e-5) * expected.norm()
    expected_ids = generated(model, DynamicCache(config=model.config))
    found_ids = generated(model, qkv.QKVCache(model.config, "none"))
    if not is_fused(model):
        assert torch.equal(found_ids, expected_ids)
    assert found_ids.shape == expected_ids.shape == (2, NEW)


def error(model: PreTrainedModel, cache: qkv.QKVCache) -> float:
    """How far the logits lie from those over a ``DynamicCache``, as a part of their size."""
    expected, found = logits(model, DynamicCache(config=model.config)), logits(model, cache)
    assert bool(found.isfinite().all())
    return ((found - expected).norm() / expected.norm()).item()


FORMATS = ["int8", "int4", "nf4"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_cache_costs_no_more_than_with_the_weights_as_they_were(
    name: str, model: PreTrainedModel, folder: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if is_fused(model):
        qkv.enable(plain)
    found = error(model, cache := qkv.QKVCache(model.config, name))
    # A small and random model makes much of 4 bits: 0.4. What else there is comes from bfloat16 and 8-bit activations.
    assert 0 < found <= 1.25 * error(plain, qkv.QKVCache(plain.config, name)) + 0.02
    stats = cache.stats()
    assert stats["tokens"] == PROMPT + NEW
    assert stats["bits_per_value"] < (8.5 if name == "int8" else 5)
    served = {row["backend"] for row in stats["layers"]}
    assert served <= ({"cpu", "dense", "reference"} if is_fused(model) else {"decoded"})


@pytest.mark.parametrize("name", FORMATS)
def test_it_generates_with_a_quantized_cache(name: str, model: PreTrainedModel) -> None:
    cache = qkv.QKVCache(model.config, name)
    ids = generated(model, cache)
    assert ids.shape == (2, NEW)
    assert torch.equal(ids, generated(model, qkv.QKVCache(model.config, name)))
    assert cache.get_seq_length() == PROMPT + NEW - 1


def test_the_code_book_of_the_weights_serves_the_cache_too(loaded: PreTrainedModel) -> None:
    """A key that is on a grid of nf4 already, as a weight is, stays as it is."""
    torch.manual_seed(0)
    values = torch.tensor(book("nf4").table)[torch.randint(0, 16, (1, 1, 5, 64))]
    values[..., 0] = 1.0
    cache = qkv.QKVCache(loaded.config, "nf4")
    keys, shown = cache.update(values.to(loaded.dtype), values.to(loaded.dtype), 0)
    if loaded.dtype == torch.float32:
        assert torch.equal(keys, values)
        assert torch.equal(shown, values)
    else:
        torch.testing.assert_close(keys.float(), values, rtol=2.0**-8, atol=0)
