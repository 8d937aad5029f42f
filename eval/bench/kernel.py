"""``qkv bench kernel``: the time of attention alone over a cache of codes, beside the best that torch does in fp32.

One query token, as in decoding. Data lies in as many layers as are needed to be well above the last-level cache, and
a turn goes through all of them, as a decode step does: every layer is read from memory, and the time of a turn is
divided by their number. Torch's side gets the same care: several ways to compute the same attention, each at its best
layout and on its own layers, and the fastest of them is the one to beat.
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
from qkv_eval.bench.bandwidth import last_level_cache, read_bandwidth
from qkv_eval.bench.timing import Contestant, noise_warning, time_in_turn
from qkv_eval.peers import Progress

# Keys repeated for every query head are tried up to this size of one layer; above it they cannot win.
_LARGEST_REPEATED = 1 << 30


@dataclass(frozen=True)
class KernelSettings:
    """What to measure: every format at every shape ``(kv_heads, q_per_kv, head_dim)``, length and batch."""

    formats: tuple[str, ...] = ("int8", "fp8_e4m3")
    shape: tuple[tuple[int, int, int], ...] = ((3, 3, 64),)
    kv_len: tuple[int, ...] = (8192,)
    batch: tuple[int, ...] = (1,)
    rounds: int = 30
    warmup: int = 2
    seed: int = 0


def run(settings: KernelSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures attention over each format at each shape, length and batch.

    Returns:
        ``rows``, with the keys ``format, backend, batch, kv_heads, q_per_kv, head_dim, kv_len, ms, sdpa_ms, speedup,
        gb_per_s, read_gb_per_s, fraction_of_read_bandwidth`` and ``sdpa_way, spread``; and ``notes``, lines that a
        reader of the figures should know. ``gb_per_s`` counts the bytes of codes and scales, read once in each call.

    Raises:
        ValueError: an unknown format.
    """
    for name in settings.formats:
        if name not in qkv.formats():
            raise ValueError(f"unknown format {name!r}; use one of {', '.join(qkv.formats())}")
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


@torch.inference_mode()
def measure_attention(
    settings: KernelSettings,
    shape: tuple[int, int, int],
    kv_len: int,
    batch: int,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Times attention of one query token over each format, in turn with torch's ways over fp32 tensors.

    Returns:
        The rows, without the bandwidth of the machine, and a warning if the timings are noisy.
    """
    kv_heads, q_per_kv, head_dim = shape
    generator = torch.Generator().manual_seed(settings.seed)
    query = torch.randn(batch, kv_heads * q_per_kv, 1, head_dim, generator=generator)
    values = 2 * batch * kv_heads * kv_len * head_dim
    caches = {name: _filled_cache(name, shape, kv_len, batch, settings.seed) for name in settings.formats}
    contestants = [
        Contestant(name, _attend_to_all(query, [cache.view(layer) for layer in range(count)]))
        for name, (cache, count) in caches.items()
    ]
    ways = torch_ways(query, shape, kv_len, settings.seed)
    contestants += [Contestant(f"torch: {way}", call) for way, (call, _) in ways.items()]
    what = f"attention, {kv_heads}x{q_per_kv}x{head_dim}, kv_len {kv_len}, batch {batch}"

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)

    timings = time_in_turn(contestants, settings.rounds, settings.warmup, report)
    seconds = {way: timings[f"torch: {way}"].median / count for way, (_, count) in ways.items()}
    best = min(seconds, key=lambda way: seconds[way])
    expected = seconds[best]
    rows = []
    for name, (cache, count) in caches.items():
        taken = timings[name].median / count
        read = cache.stats()["bits_per_value"] * values / 8
        rows.append(
            {
                "format": name,
                "backend": choose(query, cache.view(0)),
                "batch": batch,
                "kv_heads": kv_heads,
                "q_per_kv": q_per_kv,
                "head_dim": head_dim,
                "kv_len": kv_len,
                "ms": 1e3 * taken,
                "sdpa_ms": 1e3 * expected,
                "speedup": expected / taken,
                "gb_per_s": read / taken / 1e9,
                "sdpa_way": best,
                "spread": timings[name].spread,
            }
        )
    note = noise_warning({name: timings[name] for name in [*caches, f"torch: {best}"]})
    return rows, None if note is None else f"{what}: {note}"


def torch_ways(
    query: torch.Tensor, shape: tuple[int, int, int], kv_len: int, seed: int
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns the ways torch offers for attention of one query token over unquantized fp32 keys and values.

    Args:
        query: float32 ``[batch, kv_heads * q_per_kv, 1, head_dim]``.
        shape: ``(kv_heads, q_per_kv, head_dim)``.
        kv_len: tokens of keys and values, ``[batch, kv_heads, kv_len, head_dim]``, the same for all ways.
        seed: of their random numbers.

    Returns:
        By name, a function and how many layers it goes through. It returns the output of the first layer, the same for
        all ways up to rounding and shape.
    """
    kv_heads, q_per_kv, head_dim = shape
    batch = len(query)
    bytes_of_layer = 2 * 4 * batch * kv_heads * kv_len * head_dim
    layers = [_random_layer(shape, kv_len, batch, seed + i) for i in range(_layers_to_fill_memory(bytes_of_layer))]
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
    name: str, shape: tuple[int, int, int], kv_len: int, batch: int, seed: int
) -> tuple[qkv.QKVCache, int]:
    cache = qkv.QKVCache(None, name)
    cache.update(*_random_layer(shape, kv_len, batch, seed), 0)
    count = _layers_to_fill_memory(cache.nbytes())
    for layer in range(1, count):
        cache.update(*_random_layer(shape, kv_len, batch, seed + layer), layer)
    return cache, count


def _random_layer(shape: tuple[int, int, int], kv_len: int, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, shape[0], kv_len, shape[2])
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


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
