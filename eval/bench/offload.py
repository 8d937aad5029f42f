"""``qkv bench offload``: a cache that is larger than the memory it may take, by resident size and time.

A cache of each kind is filled with a random prompt and then decoded with. Resident memory is that of this process,
above what it was before the cache, when the model had run already; what the system keeps of the file in its own cache
of files is no part of that.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv_eval.bench.prompt import random_prompt
from qkv_eval.peers import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class OffloadSettings:
    """What to measure: the cache's format, the tokens in it, the bytes that it may take in memory, and the steps."""

    format: str = "int8"
    context: int = 8192
    max_bytes: int = 1 << 25
    chunk: int = 128
    steps: int = 32
    folder: str | None = None
    seed: int = 0


@torch.inference_mode()
def run(model: PreTrainedModel, settings: OffloadSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Fills and decodes with a cache in memory, and with one of which the older part lies in a file.

    Returns:
        ``rows`` with ``cache`` (``memory`` or ``offload``), ``context, kv_bytes, offloaded_bytes, max_bytes,
        resident_bytes`` (the most above the baseline while decoding; None where the system does not say),
        ``prefill_seconds, ms_per_step, slowdown`` (of a step, over that in memory) and ``same`` (whether all logits of
        the steps equal those in memory, bit for bit).

    Raises:
        ValueError: limits that are not allowed.
    """
    qkv.enable(model)
    prompt = random_prompt(model, 1, settings.context, settings.seed)
    limits = {"on_full": "offload", "max_bytes": settings.max_bytes, "offload_folder": settings.folder}
    rows: list[dict[str, Any]] = []
    wanted: list[torch.Tensor] = []
    for name, options in (("memory", {}), ("offload", limits)):
        if progress is not None:
            progress(name, len(rows), 2)
        _pass(model, prompt[:, : settings.chunk], qkv.QKVCache(model.config, settings.format))
        before = resident()
        cache = qkv.QKVCache(model.config, settings.format, **options)  # type: ignore[arg-type]
        began = time.perf_counter()
        for start in range(0, settings.context, settings.chunk):
            logits = _pass(model, prompt[:, start : start + settings.chunk], cache)
        filled = time.perf_counter() - began
        times, most, same = [], 0, True
        token = logits.argmax(-1)
        for step in range(settings.steps):
            began = time.perf_counter()
            logits = _pass(model, token, cache)
            times.append(time.perf_counter() - began)
            token = logits.argmax(-1)
            now = resident(trim=step == 0)
            most = max(most, (now or 0) - (before or 0))
            if name == "memory":
                wanted.append(logits)
            else:
                same = same and torch.equal(logits, wanted[step])
        rows.append(
            {
                "cache": name,
                "context": settings.context,
                "kv_bytes": cache.nbytes(),
                "offloaded_bytes": cache.offloaded_bytes(),
                "max_bytes": settings.max_bytes if options else None,
                "resident_bytes": most if before is not None else None,
                "prefill_seconds": filled,
                "ms_per_step": statistics.median(times) * 1e3,
                "slowdown": statistics.median(times) * 1e3 / rows[0]["ms_per_step"] if rows else 1.0,
                "same": same,
            }
        )
        del cache
    qkv.disable(model)
    return {"rows": rows}


def _pass(model: PreTrainedModel, tokens: torch.Tensor, cache: qkv.QKVCache) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, past_key_values=cache, logits_to_keep=1).logits
    return logits


def resident(trim: bool = True) -> int | None:
    """The resident size of this process, bytes; None where the system does not say."""
    if trim:
        gc.collect()
        with suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)
