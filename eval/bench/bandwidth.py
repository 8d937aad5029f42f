"""What the memory of this machine can deliver: the size of its last cache, and how fast it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from qkv import large_pages
from qkv_eval.bench.timing import Contestant, time_in_turn

# If the processor does not say how large its last-level cache is.
_ASSUMED_CACHE = 32 << 20
_LARGEST_BUFFER = 1 << 30


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Returns the bytes of last-level cache that the processors of this program have in all; 32 MiB if none says.

    Large processors have several such caches, each shared by some cores: data has to exceed all of them together.

    Args:
        root: where the system describes its processors.
    """
    try:
        allowed = {str(number) for number in os.sched_getaffinity(0)}
    except AttributeError:  # not on every system
        allowed = None
    found: dict[tuple[int, str], int] = {}
    for folder in root.glob("cpu[0-9]*/cache/index*"):
        if allowed is not None and folder.parent.parent.name.removeprefix("cpu") not in allowed:
            continue
        try:
            level, size, shared = (
                (folder / name).read_text(encoding="ascii").strip() for name in ("level", "size", "shared_cpu_list")
            )
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[-1:]]
            found[int(level), shared] = unit * int(size[:-1])
        except (OSError, ValueError, KeyError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or _ASSUMED_CACHE


def read_bandwidth(rounds: int = 9) -> float:
    """Measures how fast memory is read with all of torch's threads, in bytes per second.

    The fastest of several reductions over a buffer of eight times the last-level cache (at most 1 GiB), by their
    medians: each reads every byte once and keeps almost nothing. The buffer lies in large pages where caches do. What
    fetches further ahead than torch's reductions can read faster.
    """
    size = min(8 * last_level_cache(), _LARGEST_BUFFER)
    buffer = large_pages.empty(size, torch.device("cpu")).view(torch.float32).fill_(1.0)
    ways: dict[str, Callable[[], object]] = {
        "sum": buffer.sum,
        "max": buffer.max,
        "int32 max": buffer.view(torch.int32).max,
        "dot": lambda: torch.dot(buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]),
    }
    timings = time_in_turn([Contestant(name, call) for name, call in ways.items()], rounds)
    return buffer.numel() * 4 / min(timing.median for timing in timings.values())
