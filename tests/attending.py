"""What tests of attention share: shapes, data, and how much a result may be off from the oracle on identical codes.

How much a result may be off, unless a test says otherwise, as root mean square over the output:

* Decoding followed by torch in bfloat16 and float16: twice the error of plain attention in that type, and eight units
  in the last place for when that was lucky. In float32, and of the kernel where nothing is quantized, likewise.
* Kernel over 8 bits: on top of that a twentieth of the error that quantization itself makes, which is that of exact
  attention over the stored numbers against exact attention over the given ones.
* Kernel over fewer bits: what it rounds (the query and the weights, to 16 bits) does not depend on the bits of codes,
  while the error of quantization doubles with every bit less. So it is a twentieth of ``2**(bits - 8)`` of it. Codes
  with a zero point do not lie around zero, and meet that rounding three times as large: three times as much.
* In bfloat16 and float16 the rounding of the output comes on top, which nobody can avoid.

On hard data, made to break it, a tenth of the error of quantization, whatever the bits. A quarter where quantization
leaves less than half of what attention says, so that its error cannot grow any more; and where one channel is huge in
queries and keys both, and keys have a scale per channel: it takes the bits of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from instruction_sets import INSTRUCTION_SETS, using
from setups import GROUP_TOKENS, SETUPS

from qkv.attention import attention, choose
from qkv.attention.cpu import MAX_QUERIES
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView

QUANTIZED = [name for name in SETUPS if name != "none"]
each_setup = pytest.mark.parametrize("name", SETUPS)
each_quantized_setup = pytest.mark.parametrize("name", QUANTIZED)


# Instruction sets of the kernel, and the backends that need none.
BACKENDS = [*INSTRUCTION_SETS, "dense", "reference"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Shape(NamedTuple):
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    q_len: int = 1
    kv_len: int = 40
    key_dim: int = 16
    value_dim: int = 16


# Three of everything: a format of 8 bits, one with zero points, rotated or not, a code book.
CHANNELS = {"key_format": "int4", "key_granularity": "channel", "key_group_size": GROUP_TOKENS, "equalize": False}
SOME: list[dict[str, Any]] = [
    {"format": "int8", "equalize": False},
    {"format": "int8", "granularity": "head", "equalize": True},
    {"format": "int4_rot", "key_format": "fp8_e4m3"},
    {"format": "int3_rot", **CHANNELS},
    {"format": "nf4", "key_format": "int5_rot", "key_granularity": "group", "equalize": True},
]
each_of_some = pytest.mark.parametrize("options", SOME, ids=lambda o: " ".join(map(str, o.values())))


class Data(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def random_data(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    return Data(
        normal(shape.batch, shape.kv_heads * shape.group, shape.q_len, shape.key_dim),
        normal(shape.batch, shape.kv_heads, shape.kv_len, shape.key_dim),
        normal(shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim),
    )


def store_for(data: Data, config: CacheConfig) -> LayerStore:
    """An empty store; where keys are to be equalized the vectors are given, so that it begins with the first token."""
    return LayerStore(config, **(vectors_for(data.keys) if config.equalize else {}))


def vectors_for(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """A centre and a multiplier of keys; of a few tokens, and not those that would be chosen."""
    heads, dim = keys.shape[1], keys.shape[3]
    multiplier = 10.0 ** (torch.rand(heads, dim, generator=torch.Generator().manual_seed(dim)) - 0.5)
    centre = keys.float().nan_to_num(0.0, 0.0, 0.0).mean(dim=(0, 2)) if keys.shape[2] else torch.ones(heads, dim)
    return {"key_centre": centre, "key_multiplier": multiplier}


def view_of(data: Data, config: CacheConfig) -> KVView:
    """A view of a store of the keys and values, without exact copies for early queries."""
    store = store_for(data, config)
    store.append(data.keys, data.values)
    return KVView(store)


def config_of(name: str, **more: Any) -> CacheConfig:
    return CacheConfig(**{**SETUPS[name], **more})


def f64(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    return x.numpy() if x.dtype == torch.bool else x.double().numpy()


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any) -> np.ndarray:
    """The oracle's attention."""
    tensors = {name: f64(x) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    return oracle.attention(f64(query), f64(keys), f64(values), **tensors)


def run(backend: str, query: torch.Tensor, view: KVView, **how: Any) -> torch.Tensor:
    """One backend's attention: an instruction set of the kernel, ``dense`` or ``reference``."""
    if backend == "dense":
        with using("none"):
            assert choose(query, view) == "dense"
            return attention(query, view, **how)
    if backend == "reference":
        return attention(query, view, backend="reference", **how)
    with using(backend):
        return attention(query, view, backend="cpu", **how)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def plain(data: Data, dtype: torch.dtype, **how: Any) -> np.ndarray:
    """Attention as a model computes it in one type: scores and weighted values in ``dtype``, softmax in float32."""
    group = data.query.shape[1] // data.keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (data.keys, data.values))
    scores = (data.query.to(dtype) @ keys.transpose(2, 3)).float()
    scale = how.get("softmax_scale") or data.keys.shape[3] ** -0.5
    scores *= scale
    if how.get("softcap") is not None:
        scores = torch.tanh(scores / how["softcap"]) * how["softcap"]
    q_len, kv_len = scores.shape[2:]
    mask = how.get("mask")
    if mask is None and how.get("causal", True):
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if how.get("sinks") is not None:
        column = how["sinks"].float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights.nan_to_num(0.0).to(dtype) @ values).transpose(1, 2).double().numpy()


class Wanted:
    """What attention over a view is to give, and how much a backend may be off."""

    def __init__(self, data: Data, view: KVView, hard: bool = False, **how: Any):
        self.data, self.view, self.how, self.hard = data, view, how, hard
        self.stored = Data(data.query, *view.decode(torch.float64))
        self.exact = exact(*self.stored, **how)
        self.quantization = rms(self.exact - exact(*data, **how))

    def allowed(self, backend: str, dtype: torch.dtype) -> float:
        if backend == "reference":
            # Double precision throughout: 1e-12 for another order of summation.
            return 1e-12 * float(np.abs(self.exact).max(initial=1.0))
        plain_type = dtype if backend == "dense" else torch.float32
        floor = 2 * rms(plain(self.stored, plain_type, **self.how) - self.exact)
        floor += 2.0**-20 * float(np.abs(self.exact).max(initial=0.0))
        return floor if plain_type != torch.float32 else floor + self.quantization * self.part()

    def part(self) -> float:
        """Of the error of quantization, that a kernel may make."""
        store = self.view.store
        used = [format for format in (store.key_format, store.value_format) if format is not None]
        if self.hard:
            query, keys = (x.abs().amax(dim=(0, 1, 2)) for x in (self.data.query, self.data.keys))
            huge = (query > 20 * query.median()) & (keys > 20 * keys.median())
            taken = bool(huge.any()) and store.key_granularity == "channel"
            return 1 / 4 if taken or self.quantization > rms(self.exact) / 2 else 1 / 10
        if not used:
            return 0.0
        return min(2.0 ** (f.bits - 8) for f in used) / 20 * (3 if any(f.offset for f in used) else 1)

    def check(self, backend: str, out: torch.Tensor | None = None) -> None:
        """The backend's result is as near to the oracle's as the top of this file says."""
        if out is None:
            out = run(backend, self.data.query, self.view, **self.how)
        assert out.dtype == self.data.query.dtype
        assert out.is_contiguous()
        assert out.shape == self.exact.shape
        error = rms(f64(out) - self.exact)
        rounding = rms(f64(torch.from_numpy(self.exact).to(out.dtype)) - self.exact)
        if backend in INSTRUCTION_SETS and self.data.query.shape[2] > MAX_QUERIES:
            backend = "dense"  # which served
        allowed = rounding * (1 + 1e-6) + self.allowed(backend, out.dtype)
        told = f"{backend}: off by {error:.3g}, not {allowed:.3g}; quantization {self.quantization:.3g}"
        assert error <= allowed, told


def assert_close(backend: str, data: Data, view: KVView, **how: Any) -> None:
    Wanted(data, view, **how).check(backend)


# ---- formats, types, shapes ----------------------------------------------------------------------------------------


def mixed(key: str, value: str, **more: Any) -> CacheConfig:
    """Keys as one setup says, values as another."""
    keys, values = SETUPS[key], SETUPS[value]
    return CacheConfig(
        "none",
        key_format=keys["format"],
        value_format=values["format"],
        key_granularity=keys.get("granularity"),
        value_granularity=values.get("granularity"),
        key_group_size=keys.get("group_size"),
        value_group_size=values.get("group_size"),
        equalize=keys.get("equalize"),
        **more,
    )


# ---- masks, softcap, sinks, threads --------------------------------------------------------------------------------


def some_mask(kind: str, shape: Shape, seed: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of one kind; every dimension that can be broadcast sometimes is."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    heads = shape.kv_heads * shape.group
    size = [n if bool(torch.rand(1, generator=generator) < 0.5) else 1 for n in (shape.batch, heads, shape.q_len)]
    position = torch.arange(shape.kv_len)
    if kind == "left padding":
        pad = torch.randint(0, shape.kv_len + 1, (shape.batch,), generator=generator)
        rows = torch.arange(shape.kv_len - shape.q_len, shape.kv_len).view(1, 1, -1, 1)
        return (position >= pad.view(-1, 1, 1, 1)) & (position <= rows)
    seen = torch.rand(*size, shape.kv_len, generator=generator) < 0.6
    seen[:, :, -1:] &= torch.rand(1, generator=generator) < 0.5  # sometimes a row that sees nothing
    if kind == "boolean":
        return seen
    added = torch.randn(*size, shape.kv_len, generator=generator).to(dtype)
    lowest = -torch.inf if kind == "additive" else torch.finfo(dtype).min
    return added.masked_fill(~seen, lowest)


def with_infinities(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask with the lowest number of its type, which stands for not seen, as -inf."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, -torch.inf)


# ---- passes of several tokens --------------------------------------------------------------------------------------


def pass_over(config: CacheConfig, data: Data, before: int, n: int) -> KVView:
    """A view as attention gets it in a pass over the ``n`` tokens behind the first ``before``."""
    store = LayerStore(config)
    if before:
        store.append(data.keys[:, :, :before], data.values[:, :, :before])
    late = store.append(data.keys[:, :, before : before + n], data.values[:, :, before : before + n])
    return KVView(store, late)
