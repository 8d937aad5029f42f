"""Stores of one layer, what is in them, and the oracle's store beside each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import strategies as st
from setups import SETUPS

from qkv.config import CacheConfig
from qkv.formats import get_format
from qkv.planes import Plane
from qkv.storage import LayerStore
from qkv.view import KVView

each_setup = pytest.mark.parametrize("setup", [name for name in SETUPS if name != "none"])
# One of each kind, where what is tested has little to do with the numbers.
SOME = [
    "int8 token",
    "int8 token equalized",
    "fp8_e4m3 head",
    "int8 group",
    "int4 group",
    "int3 channel",
    "int4_rot channel equalized",
    "nf4 group",
]
some_setups = pytest.mark.parametrize("setup", SOME)

Pair = tuple[torch.Tensor, torch.Tensor]


def options_of(setup: str) -> dict[str, Any]:
    """What a set-up says; of any name of one, and the same with keys equalized."""
    if setup in SETUPS:
        return SETUPS[setup]
    return {**SETUPS[setup.removesuffix(" equalized")], "equalize": True}


def config_of(setup: str, **changes: Any) -> CacheConfig:
    """A set-up, with groups as small as they can be."""
    options = options_of(setup)
    if options.get("granularity") == "group" and get_format(options["format"]).block is None:
        changes.setdefault("group_size", 16)
    return CacheConfig(**{**options, **changes})


def sizes(setup: str) -> dict[str, int]:
    """Head sizes that go with it: small ones, or some groups of channels."""
    return {"key_dim": 32, "value_dim": 64} if options_of(setup).get("granularity") == "group" else {}


def kv(
    n: int, batch: int = 2, heads: int = 2, key_dim: int = 6, value_dim: int = 5, seed: int = 0, growing: float = 0.0
) -> Pair:
    """Keys and values of ``n`` tokens; with ``growing``, some tokens are larger by up to ten to that power."""
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for dim in (key_dim, value_dim):
        x = torch.randn(batch, heads, n, dim, generator=generator)
        power = torch.rand(batch, heads, n, 1, generator=generator) ** 8 * growing
        pair.append(x * 10.0**power)
    return pair[0], pair[1]


def part(pair: Pair, start: int, end: int) -> Pair:
    return pair[0][:, :, start:end], pair[1][:, :, start:end]


def joined(*pairs: Pair) -> Pair:
    """One behind the other."""
    return torch.cat([pair[0] for pair in pairs], dim=2), torch.cat([pair[1] for pair in pairs], dim=2)


def filled(config: CacheConfig, pair: Pair, cuts: list[int] | None = None, **others: Any) -> LayerStore:
    """A store of the tokens, appended in the pieces that ``cuts`` make of them."""
    store = LayerStore(config, **others)
    total = pair[0].shape[2]
    edges = [0, *sorted(min(c, total) for c in cuts or []), total]
    for start, end in pairwise(edges):
        store.append(*part(pair, start, end))
    return store


def stepwise(config: CacheConfig, pair: Pair, **others: Any) -> LayerStore:
    return filled(config, pair, list(range(1, pair[0].shape[2])), **others)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, in which a NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def of_each_number(plane: Plane, tensor: torch.Tensor, offset: int, n: int) -> torch.Tensor:
    """Scales, or offsets, as ``[batch, heads, n, dim]``: for each number of ``n`` tokens the one that it has."""
    x = plane._get(tensor, offset, n)
    granularity, size = plane.scaling.granularity, plane.scaling.group
    if granularity == "group":
        return x.repeat_interleave(size, dim=3)
    if granularity == "channel":
        return x.repeat_interleave(size, dim=2)[:, :, offset % size : offset % size + n]
    return x.unsqueeze(3).expand(-1, -1, n, plane.dim)


def contents(store: LayerStore) -> list[torch.Tensor]:
    """What is stored, as bit patterns by token: keys, their scales and offsets, values, theirs; and what is exact."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(7)]
    for run in store.runs():
        for side, plane in enumerate(run.segment.planes()):
            exact = plane.format is None
            if exact:
                rows = bits(plane.codes[:, :, run.offset : run.offset + run.length])
                scale = offset = torch.zeros(()).expand(rows.shape)
            else:
                rows = plane.read_codes(run.offset, run.length).view(torch.uint8)
                scale, offset = (
                    torch.zeros(()).expand(rows.shape)
                    if x is None
                    else of_each_number(plane, x, run.offset, run.length)
                    for x in (plane.scale, plane.offset)
                )
            for i, x in enumerate((rows, scale, offset)):
                parts[3 * side + i].append((x if i == 0 else bits(x)).long())
            if side == 0:
                parts[6].append(torch.full((run.length,), exact))
    return [torch.cat(p, dim=0 if i == 6 else 2) for i, p in enumerate(parts)]


def exact_tokens(store: LayerStore) -> list[bool]:
    """Of each token held, whether it is exact."""
    return [run.segment not in store.packed for run in store.runs() for _ in range(run.length)]


def vectors(store: LayerStore) -> list[torch.Tensor]:
    """What rows go through before they are encoded."""
    held = [getattr(x, name) for x in store._transforms if x is not None for name in ("signs", "centre", "multiplier")]
    return [x for x in held if x is not None]


def assert_same(a: LayerStore, b: LayerStore) -> None:
    assert a.length == b.length
    for x, y in zip([*contents(a), *vectors(a)], [*contents(b), *vectors(b)], strict=True):
        assert torch.equal(x, y)


def snapshot(store: LayerStore) -> dict[str, Any]:
    """Every byte and number of a store."""
    state: dict[str, Any] = {
        name: getattr(store, name)
        for name in ("length", "first", "shape", "packed_length", "version", "changes", "_open", "_encoded")
    }
    state["vectors"] = [x.tolist() for x in vectors(store)]
    for i, segment in enumerate(store.segments()):
        state[f"segment {i}"] = (segment.start, segment.length, segment.capacity)
        for j, plane in enumerate(segment.planes()):
            for k, tensor in enumerate(plane.tensors()):
                state[f"tensor {i} {j} {k}"] = (tensor.data_ptr(), bits(tensor).flatten().tolist())
    for name in ("_key_head", "_value_head"):
        scale = getattr(store, name)
        state[name] = None if scale is None or scale.current is None else scale.current.tolist()
    return state


def decoded(store: LayerStore, first: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    keys, values = KVView(store, first=first).decode(torch.float64)
    return keys.numpy(), values.numpy()


def codec(name: str) -> oracle.Codec:
    """A format that the oracle does not know, one vector at a time; it is held against others elsewhere."""
    format = get_format(name)

    def through(vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = torch.from_numpy(vector)
        scale, offset = format.choose(x)
        codes = format.encode(x, scale, offset)
        return codes.numpy(), format.decode(codes, scale, torch.float64, offset).numpy()

    return through


def like(config: CacheConfig, **given: torch.Tensor) -> oracle.Store:
    """The oracle's store of the same description."""

    def both(what: str) -> list[Any]:
        return [getattr(config, f"{side}_{what}") or getattr(config, what) for side in ("key", "value")]

    def tensors(*names: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        found = [given.get(name) for name in names]
        return tuple(None if x is None else x.double().numpy() for x in found)

    def own(name: str | None, granularity: str | None) -> int | None:
        """The group of a format that the oracle does not know."""
        if name is None or name in oracle.FORMATS or granularity not in ("group", "channel"):
            return None
        return get_format(name).block or get_format(name).group_sizes[granularity]

    names = [None if name == "none" else name for name in both("format")]
    return oracle.Store(
        tuple(names),
        tuple(both("granularity")),
        config.residual_length,
        config.sink_tokens,
        tensors("key_scale", "value_scale"),
        tuple(
            size or own(name, granularity)
            for size, name, granularity in zip(both("group_size"), names, both("granularity"), strict=True)
        ),
        config.equalize,
        tensors("key_centre", "key_multiplier"),
        {name: codec(name) for name in names if name is not None and name not in oracle.FORMATS},
    )


def add(store: oracle.Store, pair: Pair) -> None:
    for t in range(pair[0].shape[2]):
        store.append(*(x[:, :, t].double().numpy() for x in pair))


def assert_equals(store: LayerStore, expected: oracle.Store) -> None:
    assert store.length == len(expected.tokens)
    assert exact_tokens(store) == [token.codes is None for token in expected.tokens]
    for found, wanted in zip(decoded(store), expected.now(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def group_of(config: CacheConfig) -> int:
    """Tokens that are encoded together."""
    return config.group_size if config.granularity == "channel" else 1


def exact_by_the_book(config: CacheConfig, length: int, warm: int) -> list[bool]:
    """Of each token, whether it is exact: sinks, the residual window, an unfinished group, all while warming up."""
    end = 0 if length < warm else max(0, length - config.residual_length) // group_of(config) * group_of(config)
    return [not config.sink_tokens <= t < end for t in range(length)]


SIZES = {"key_dim": 32, "value_dim": 32}


@st.composite
def configs(draw: st.DrawFn, quantized: bool = True) -> CacheConfig:
    """Any two formats together; for head sizes of 32, which go with every one."""
    names = [name for name in SETUPS if name != "none"] if quantized else list(SETUPS)
    key = SETUPS[draw(st.sampled_from(names))]
    value = key if draw(st.booleans()) else SETUPS[draw(st.sampled_from(list(SETUPS)))]
    options: dict[str, Any] = {
        "format": key["format"],
        "value_format": value["format"],
        "equalize": key.get("equalize"),
    }
    for side, of_side in (("key", key), ("value", value)):
        granularity = of_side.get("granularity")
        options[f"{side}_granularity"] = granularity
        if granularity == "channel":
            options[f"{side}_group_size"] = draw(st.sampled_from([16, 16, 16, 32, 64]))
        elif granularity == "group" and get_format(of_side["format"]).block is None:
            options[f"{side}_group_size"] = draw(st.sampled_from([16, 32]))
    return CacheConfig(
        **options,
        residual_length=draw(st.sampled_from([0, 0, 1, 5, 64, 80])),
        sink_tokens=draw(st.sampled_from([0, 0, 1, 4, 70])),
        prefill=draw(st.sampled_from(["stored", "exact"])),
    )
