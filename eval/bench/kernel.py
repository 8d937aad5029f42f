"""``qkv bench kernel``: the time of attention alone over a cache of codes, beside the best that torch does.

That is torch's best over unquantized fp32 tensors, and for models in bf16 its best over bf16 tensors as well, in the
same turns. One query token, as in decoding. Data lies in as many layers as are needed to be well above the last-level
cache, and a turn goes through all of them, as a decode step does: every layer is read from memory, and the time of a
turn is divided by their number. Torch's side gets the same care: several ways to compute the same attention, each at
its best layout and on its own layers, and the fastest of them is the one to beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import qkv
from qkv.attention import attention, choose
from qkv.named_caches import NamedCache, named_cache
from qkv_eval.bench.bandwidth import last_level_cache, read_bandwidth
from qkv_eval.bench.timing import Contestant, noise_warning, time_in_turn
from qkv_eval.peers import Progress

# Keys repeated for every query head are tried up to this size of one layer; above it they cannot win.
_LARGEST_REPEATED = 1 << 30


# The types of queries, and what people call them.
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class KernelSettings:
    """What to measure: every cache and type of the query at every shape, length and batch.

    ``formats``: caches of ours by name: formats, presets, YAML files. ``shape``: ``(kv_heads, q_per_kv, head_dim)``.
    """

    formats: tuple[str, ...] = ("int8", "fp8_e4m3")
    shape: tuple[tuple[int, int, int], ...] = ((3, 3, 64),)
    kv_len: tuple[int, ...] = (8192,)
    batch: tuple[int, ...] = (1,)
    rounds: int = 30
    warmup: int = 2
    seed: int = 0
    dtype: tuple[str, ...] = ("float32",)


@dataclass(frozen=True)
class _Filled:
    """A cache of several layers, all the same size, and the query that goes with it."""

    named: NamedCache
    query: torch.Tensor
    cache: qkv.QKVCache
    layers: int

    @property
    def peer(self) -> str:
        return f"{self.named.name}, {_name_of(self.query.dtype)}"


def run(settings: KernelSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures attention over each cache at each shape, length and batch.

    Returns:
        ``rows``, with the keys ``format, backend, batch, kv_heads, q_per_kv, head_dim, kv_len, ms, sdpa_ms, speedup,
        gb_per_s, read_gb_per_s, fraction_of_read_bandwidth`` and ``dtype`` (of the query), ``sdpa_way,
        bits_per_value, turn_bytes, spread``; and ``notes``, lines that a reader of the figures should know.
        ``gb_per_s`` counts the bytes of codes and scales, read once in each call; a turn of all layers reads
        ``turn_bytes`` of them, more than the processor's last-level cache. If bfloat16 is among the types, all rows
        have ``sdpa_bf16_ms``, ``sdpa_bf16_way`` and ``speedup_bf16`` too, torch's best over bf16 tensors.

    Raises:
        ValueError: an unknown cache or one that is not ours, or an unknown type.
    """
    our_caches(settings.formats)
    query_types(settings.dtype)
    if progress is not None:
        progress("reading memory", 0, 1)
    bandwidth = read_bandwidth()
    if progress is not None:
        progress("reading memory", 1, 1)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for shape, kv_len, batch in itertools.product(settings.shape, settings.kv_len, settings.batch):
        measured, note = measure_attention(settings, shape, kv_len, batch, progress)
        for row in measured:
            row["read_gb_per_s"] = bandwidth / 1e9
            row["fraction_of_read_bandwidth"] = row["gb_per_s"] * 1e9 / bandwidth
        rows.extend(measured)
        if note is not None:
            notes.append(note)
    return {"rows": rows, "notes": notes}


def our_caches(names: Sequence[str]) -> list[NamedCache]:
    """Returns the caches of these names, which the kernel can read only if they are ours.

    Raises:
        ValueError: an unknown cache, one that is not ours, or two that tables would show under one name.
    """
    caches = [named_cache(name) for name in names]
    for name, cache in zip(names, caches, strict=True):
        if not cache.is_ours:
            known = ", ".join((*qkv.formats(), *qkv.presets()))
            raise ValueError(f"{name!r} holds no codes for a kernel; use a YAML file or one of {known}")
    shown = [cache.name for cache in caches]
    for name in shown:
        if shown.count(name) > 1:
            raise ValueError(f"two of the caches would be called {name!r} in tables; rename the YAML file of one")
    return caches


def query_types(names: Sequence[str]) -> tuple[torch.dtype, ...]:
    """Returns the types of these names, each once.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"a query is fp32 or bf16, not {name!r}")
    return tuple(dict.fromkeys(DTYPES[name] for name in names))


@torch.inference_mode()
def measure_attention(
    settings: KernelSettings,
    shape: tuple[int, int, int],
    kv_len: int,
    batch: int,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Times attention of one query token over each cache, in turn with torch's ways over unquantized tensors.

    Returns:
        The rows, without the bandwidth of the machine, and a warning if the timings are noisy.
    """
    kv_heads, q_per_kv, head_dim = shape
    types = query_types(settings.dtype)
    generator = torch.Generator().manual_seed(settings.seed)
    query = torch.randn(batch, kv_heads * q_per_kv, 1, head_dim, generator=generator)
    values = 2 * batch * kv_heads * kv_len * head_dim
    caches = [
        _Filled(named, query.to(dtype), *_filled_cache(named, shape, kv_len, batch, settings.seed, dtype))
        for named in our_caches(settings.formats)
        for dtype in types
    ]
    contestants = [
        Contestant(one.peer, _attend_to_all(one.query, [one.cache.view(layer) for layer in range(one.layers)]))
        for one in caches
    ]
    # float32 is what a speedup means everywhere; bf16 is what a model in bf16 would have had.
    ways = {
        (dtype, way): found
        for dtype in dict.fromkeys((torch.float32, *types))
        for way, found in torch_ways(query.to(dtype), shape, kv_len, settings.seed).items()
    }
    contestants += [Contestant(_torch_peer(*key), call) for key, (call, _) in ways.items()]
    what = f"attention, {kv_heads}x{q_per_kv}x{head_dim}, kv_len {kv_len}, batch {batch}"

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)

    timings = time_in_turn(contestants, settings.rounds, settings.warmup, report)
    seconds = {key: timings[_torch_peer(*key)].median / count for key, (_, count) in ways.items()}
    best = {dtype: min((key for key in ways if key[0] == dtype), key=seconds.__getitem__) for dtype, _ in ways}
    expected = seconds[best[torch.float32]]
    rows = []
    for one in caches:
        taken = timings[one.peer].median / one.layers
        bits = float(one.cache.stats()["bits_per_value"])
        read = bits * values / 8
        row = {
            "format": one.named.name,
            "backend": choose(one.query, one.cache.view(0)),
            "batch": batch,
            "kv_heads": kv_heads,
            "q_per_kv": q_per_kv,
            "head_dim": head_dim,
            "kv_len": kv_len,
            "dtype": _name_of(one.query.dtype),
            "ms": 1e3 * taken,
            "sdpa_ms": 1e3 * expected,
            "speedup": expected / taken,
            "gb_per_s": read / taken / 1e9,
            "sdpa_way": best[torch.float32][1],
            "bits_per_value": bits,
            "turn_bytes": round(read * one.layers),
            "spread": timings[one.peer].spread,
        }
        if torch.bfloat16 in best:
            in_bf16 = seconds[best[torch.bfloat16]]
            row.update(
                sdpa_bf16_ms=1e3 * in_bf16,
                sdpa_bf16_way=best[torch.bfloat16][1],
                speedup_bf16=in_bf16 / taken,
            )
        rows.append(row)
    to_beat = [_torch_peer(*key) for key in best.values()]
    note = noise_warning({name: timings[name] for name in [*(one.peer for one in caches), *to_beat]})
    return rows, None if note is None else f"{what}: {note}"


def _torch_peer(dtype: torch.dtype, way: str) -> str:
    return f"torch, {_name_of(dtype)}: {way}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_ways(
    query: torch.Tensor, shape: tuple[int, int, int], kv_len: int, seed: int
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns the ways torch offers for attention of one query token over unquantized keys and values.

    Args:
        query: ``[batch, kv_heads * q_per_kv, 1, head_dim]``, of the type that keys and values have too.
        shape: ``(kv_heads, q_per_kv, head_dim)``.
        kv_len: tokens of keys and values, ``[batch, kv_heads, kv_len, head_dim]``, the same for all ways.
        seed: of their random numbers.

    Returns:
        By name, a function and how many layers it goes through. It returns the output of the first layer, the same for
        all ways up to rounding and shape.
    """
    kv_heads, q_per_kv, head_dim = shape
    batch = len(query)
    bytes_of_layer = 2 * query.dtype.itemsize * batch * kv_heads * kv_len * head_dim
    count = _layers_to_fill_memory(bytes_of_layer)
    layers = [_random_layer(shape, kv_len, batch, seed + layer, query.dtype) for layer in range(count)]
    packed = query.view(batch, kv_heads, q_per_kv, head_dim)
    scale = head_dim**-0.5

    def manual(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.softmax(packed @ keys.transpose(-1, -2) * scale, -1) @ values

    ways = {
        "grouped sdpa": _through(
            lambda keys, values: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), layers
        ),
        "sdpa, groups as queries": _through(
            lambda keys, values: F.scaled_dot_product_attention(packed, keys, values), layers
        ),
        "matmul and softmax": _through(manual, layers),
    }
    if q_per_kv > 1 and q_per_kv * bytes_of_layer <= _LARGEST_REPEATED:
        count = _layers_to_fill_memory(q_per_kv * bytes_of_layer)
        repeated = [tuple(x.repeat_interleave(q_per_kv, 1) for x in layer) for layer in layers[:count]]
        ways["sdpa, keys repeated"] = _through(
            lambda keys, values: F.scaled_dot_product_attention(query, keys, values), repeated
        )
    return ways


def _filled_cache(
    named: NamedCache,
    shape: tuple[int, int, int],
    kv_len: int,
    batch: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[qkv.QKVCache, int]:
    """A cache of ours with random tokens, and its layers: as many as no last-level cache holds."""
    cache: Any = named.make(None)  # type: ignore[arg-type]  # of no model: layers come as they are filled
    cache.update(*_random_layer(shape, kv_len, batch, seed, dtype), 0)
    # What is read: spare room does not keep anything out of a processor's cache.
    read = cache.stats()["bits_per_value"] / 8 * 2 * batch * shape[0] * kv_len * shape[2]
    count = _layers_to_fill_memory(int(read))
    for layer in range(1, count):
        cache.update(*_random_layer(shape, kv_len, batch, seed + layer, dtype), layer)
    return cache, count


def _random_layer(
    shape: tuple[int, int, int], kv_len: int, batch: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, shape[0], kv_len, shape[2])
    return torch.randn(size, generator=generator).to(dtype), torch.randn(size, generator=generator).to(dtype)


def _layers_to_fill_memory(bytes_of_layer: int) -> int:
    return max(2, -(-2 * last_level_cache() // bytes_of_layer))


def _attend_to_all(query: torch.Tensor, views: Sequence[Any]) -> Callable[[], torch.Tensor]:
    return _through(lambda view: attention(query, view), [(view,) for view in views])[0]


def _through(
    call: Callable[..., torch.Tensor], layers: Sequence[tuple[Any, ...]]
) -> tuple[Callable[[], torch.Tensor], int]:
    def turn() -> torch.Tensor:
        first = call(*layers[0])
        for layer in layers[1:]:
            call(*layer)
        return first

    return turn, len(layers)
