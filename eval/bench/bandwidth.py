"""What the memory of this machine can deliver: the size of its last cache, and how fast it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from qkv_eval.bench.timing import Contestant, time_in_turn

# If the processor does not say how large its last-level cache is.
_ASSUMED_CACHE = 32 << 20
_LARGEST_BUFFER = 1 << 30


def last_level_cache() -> int:
    """Returns the size of the largest cache of the processor, in bytes; 32 MiB if it does not say."""
    sizes = [_ASSUMED_CACHE // 1024]
    try:
        found = [
            path.read_text(encoding="ascii").strip()
            for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        ]
    except OSError:
        found = []
    known = [int(size[:-1]) for size in found if size.endswith("K")]
    return 1024 * max(known or sizes)


def read_bandwidth(rounds: int = 9) -> float:
    """Measures how fast memory is read with all of torch's threads, in bytes per second.

    The fastest of several reductions over a buffer of eight times the last-level cache (at most 1 GiB), by their
    medians: each reads every byte once and keeps almost nothing.
    """
    size = min(8 * last_level_cache(), _LARGEST_BUFFER)
    buffer = torch.ones(size // 4, dtype=torch.float32)
    ways: dict[str, Callable[[], object]] = {
        "sum": buffer.sum,
        "max": buffer.max,
        "int32 max": buffer.view(torch.int32).max,
        "dot": lambda: torch.dot(buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]),
    }
    timings = time_in_turn([Contestant(name, call) for name, call in ways.items()], rounds)
    return buffer.numel() * 4 / min(timing.median for timing in timings.values())
