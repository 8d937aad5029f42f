"""``qkv bench memory``: what a cache holds after a prompt and some steps, and the most memory on the way there.

Nothing is timed: each cache in turn is filled by the model itself, from a prompt of random tokens, and memory is
followed through the prompt's pass and the steps; see ``peak``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.named_caches import UNQUANTIZED, NamedCache, named_cache
from qkv_eval.bench.decode import check_memory, held_values, probe_layers
from qkv_eval.bench.peak import TensorMemory
from qkv_eval.bench.prompt import check_caches, check_positions, pieces, random_prompt, read_piece
from qkv_eval.held import bits_per_value, kv_bytes
from qkv_eval.peers import Progress, attend_as_meant, with_baseline

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MemorySettings:
    """What to measure: every cache at every batch and context, and after that many decode steps.

    ``chunk``: tokens of the prompt in one pass; None: all at once.
    """

    caches: tuple[str, ...] = (UNQUANTIZED, "none", "int8")
    batch: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (1024,)
    steps: int = 4
    chunk: int | None = None
    seed: int = 0


def run(model: PreTrainedModel, settings: MemorySettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the memory of each cache at each batch and context; ``dynamic`` is always one of them.

    Returns:
        ``rows``, with the keys ``cache, batch, context, kv_bytes, bytes_per_token, peak_bytes, ratio_to_fp16`` and
        ``peak_step_bytes, bits_per_value, steps, chunk``; and ``notes``. ``kv_bytes`` is what the tensors of the cache
        hold in the end, spare room included, and ``bytes_per_token`` the same for each token of each sequence.
        ``peak_bytes`` is the most that all tensors took at once above the weights, from the prompt's first token to
        the last step; ``peak_step_bytes`` during the steps alone. ``ratio_to_fp16`` is the size of a plain 16-bit
        cache of the same tokens divided by ``kv_bytes``: above 1 is smaller.

    Raises:
        ValueError: an unknown cache, a context that the model has no positions for, or a cache that does not fit in
            the memory that is free.
    """
    caches = with_baseline(settings.caches)
    check_caches(model, caches)
    most = max(settings.context) + settings.steps
    notes = [note for note in [check_positions(model, most)] if note is not None]
    rows: list[dict[str, Any]] = []
    for batch in settings.batch:
        for context in settings.context:
            rows += measure_memory(
                model,
                caches,
                batch,
                context,
                steps=settings.steps,
                chunk=settings.chunk,
                seed=settings.seed,
                progress=progress,
            )
    return {"rows": rows, "notes": notes}


@torch.inference_mode()
def measure_memory(
    model: PreTrainedModel,
    caches: Sequence[NamedCache],
    batch: int,
    context: int,
    *,
    steps: int = 4,
    chunk: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measures each cache at one batch and context, and leaves the model plain.

    Args:
        model: the model; its own attention serves all caches but ours.
        caches: with ``dynamic`` the first.
        batch, context: sequences, and tokens of the prompt in each.
        steps: tokens that come one by one after it.
        chunk: tokens of the prompt in one pass; None: all at once.

    Returns:
        The rows of :func:`run` in the order of ``caches``.

    Raises:
        ValueError: a cache would not fit in the memory that is free, or ``dynamic`` is not the first.
    """
    if not caches or caches[0].name != UNQUANTIZED:
        raise ValueError(f"the first cache must be {UNQUANTIZED!r}: the others are measured against its tokens")
    tokens = batch * (context + steps)
    check_memory(probe_layers(model), tokens, 1)
    text = random_prompt(model, batch, context + steps, seed)
    values = 0
    rows: list[dict[str, Any]] = []
    for named in caches:
        attend_as_meant(model, named)
        cache: Any = named.make(model.config)
        memory = TensorMemory()
        for piece in pieces(text[:, :context], chunk):
            with memory.part("prompt"):
                read_piece(model, cache, piece)
        if steps:
            with memory.part("steps"):
                for step in range(context, context + steps):
                    read_piece(model, cache, text[:, step : step + 1])
        if named.name == UNQUANTIZED:
            # The numbers that have to be kept: in a layer with a sliding window, of fewer tokens.
            values = held_values(cache)
        size = kv_bytes(cache)
        rows.append(
            {
                "cache": named.name,
                "batch": batch,
                "context": context,
                "kv_bytes": size,
                "bytes_per_token": size / tokens,
                "peak_bytes": memory.peak,
                "ratio_to_fp16": 2 * values / size,
                "peak_step_bytes": memory.peaks.get("steps"),
                "bits_per_value": bits_per_value(cache, values),
                "steps": steps,
                "chunk": chunk,
            }
        )
        del cache
        if progress is not None:
            progress(f"following memory, batch {batch}, context {context}", len(rows), len(caches))
    attend_as_meant(model, named_cache(UNQUANTIZED))
    return rows
