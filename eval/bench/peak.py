"""The most memory that tensors take at once while something runs.

torch's profiler is asked, since only it sits in the allocator. It is told of every block that torch takes or gives
back, also inside of an operator: the buffers of a softmax, both halves of a concatenation, a layer that is decoded and
dropped within one call. The large pages that caches lie in do not come from that allocator: they keep a log of their
own, and both are put in the order of time.

A ``TorchDispatchMode`` sees the results of operators and none of that; the resident size of the process counts what
malloc has not given back, and leaves out what was not yet written. What is missing here: memory that libraries take
from malloc themselves (scratch of matrix products, a few kilobytes in our own kernel), and what threads other than the
caller's take. :func:`peak_resident` includes it, as the cross-check that it is.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from qkv.large_pages import pool


class TensorMemory:
    """Follows what torch allocates on the CPU during parts of a program.

    What was there before the first part is not counted: the weights, the prompt. A block that is freed between two
    parts would count as held to the end, so hold on between them to what was made in them.

    Attributes:
        peaks: part -> the most bytes that were held at once during it, by blocks allocated in any part so far.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._blocks: dict[int, int] = {}
        self._held = 0
        self._pages = 0  # what large pages held at the end of the last part, beyond what they held before the first
        self._pages_before: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes held at once in any part; 0 before the first."""
        return max(self.peaks.values(), default=0)

    @property
    def held(self) -> int:
        """Bytes that were held at the end of the last part."""
        return self._held + self._pages

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Follows what is allocated within; a part may come several times under one name."""
        # The profiler's library says on standard error that it starts and stops, unless it is told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if self._pages_before is None:
            self._pages_before = pool.used
        changes: list[tuple[int, int]] = []
        pool.log = changes
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                yield
        finally:
            pool.log = None
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(trace))
            traced = json.loads(trace.read_text(encoding="utf-8", errors="replace"))
        base = int(traced.get("baseTimeNanoseconds", 0))
        found = [e for e in traced["traceEvents"] if e.get("name") == "[memory]"]
        events: list[tuple[float, Mapping[str, Any] | int]] = [(base + 1000 * float(e["ts"]), e["args"]) for e in found]
        events += [(when, used - self._pages_before) for when, used in changes]
        self.peaks[name] = max(self.peaks.get(name, 0), self._follow(sorted(events, key=lambda event: event[0])))

    def _follow(self, events: Iterable[tuple[float, Mapping[str, Any] | int]]) -> int:
        """Replays allocations and frees, in the order of time, and returns the most bytes held on the way.

        An event is what the profiler says of a block, or what large pages hold from then on.
        """
        peak = self.held
        for _, details in events:
            if isinstance(details, int):
                self._pages = details
                peak = max(peak, self.held)
                continue
            address, size = int(details["Addr"]), int(details["Bytes"])
            if size > 0:
                self._blocks[address] = size
                self._held += size
            else:  # of a block from before the first part there is nothing to take off
                self._held -= self._blocks.pop(address, 0)
            peak = max(peak, self.held)
        return peak


def peak_resident(call: Callable[[], object]) -> int | None:
    """Returns by how many bytes the resident size of this process rose at most during a call.

    None where the system cannot tell (it is asked through /proc, as on Linux).
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it; without it the figure is too small rather than wrong
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest mark is where we are now
    except OSError:
        call()
        return None
    before = _status_bytes("VmRSS")
    call()
    highest = _status_bytes("VmHWM")
    return None if before is None or highest is None else max(0, highest - before)


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
