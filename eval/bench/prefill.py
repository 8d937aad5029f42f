"""``qkv bench prefill``: the time and the memory of a prompt's pass through a whole model, by cache.

All caches of one (batch, context) take turns, one pass each per round, each into a new cache; the one before has been
dropped by then. Memory is followed in passes of their own, since following it takes time: see ``peak``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.named_caches import UNQUANTIZED, NamedCache, named_cache
from qkv_eval.bench.decode import check_memory, probe_layers
from qkv_eval.bench.peak import TensorMemory, peak_resident
from qkv_eval.bench.prompt import check_caches, check_positions, pieces, random_prompt, read_piece, read_prompt
from qkv_eval.bench.timing import Contestant, Timing, noise_warning, time_in_turn
from qkv_eval.held import kv_bytes
from qkv_eval.peers import Progress, attend_as_meant, with_baseline

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class PrefillSettings:
    """What to measure: every cache at every batch and context. ``chunk``: tokens in one pass; None: all at once."""

    caches: tuple[str, ...] = (UNQUANTIZED, "none", "int8")
    batch: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (1024,)
    chunk: int | None = None
    rounds: int = 5
    warmup: int = 1
    seed: int = 0


def run(model: PreTrainedModel, settings: PrefillSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures a prompt's pass into each cache at each batch and context; ``dynamic`` is always one of them.

    Returns:
        ``rows``, with the keys ``cache, batch, context, seconds, ratio_to_dynamic, peak_bytes`` and ``peak_rss_bytes,
        kv_bytes, tokens_per_s, chunk, spread, rounds``; and ``notes``, lines that a reader of the figures should know.
        ``peak_bytes`` is the most that tensors took at once above what was there before the pass (the weights and the
        prompt), the cache and the model's activations among them; ``peak_rss_bytes`` is by how much the process grew,
        or None where the system does not say.

    Raises:
        ValueError: an unknown cache, a context that the model has no positions for, or a cache that does not fit in
            the memory that is free.
    """
    caches = with_baseline(settings.caches)
    check_caches(model, caches)
    notes = [note for context in settings.context if (note := check_positions(model, context)) is not None]
    rows: list[dict[str, Any]] = []
    for batch in settings.batch:
        for context in settings.context:
            measured, timings = measure_prefill(
                model,
                caches,
                batch,
                context,
                chunk=settings.chunk,
                rounds=settings.rounds,
                warmup=settings.warmup,
                seed=settings.seed,
                progress=progress,
            )
            rows.extend(measured)
            note = noise_warning(timings)
            if note is not None:
                notes.append(f"batch {batch}, context {context}: {note}")
    return {"rows": rows, "notes": notes}


@torch.inference_mode()
def measure_prefill(
    model: PreTrainedModel,
    caches: Sequence[NamedCache],
    batch: int,
    context: int,
    *,
    chunk: int | None = None,
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Timing]]:
    """Times the pass of a random prompt into each cache in turn, and follows its memory; leaves the model plain.

    Args:
        model: the model; its own attention serves all caches but ours.
        caches: with ``dynamic`` among them.
        batch, context: sequences, and tokens in each.
        chunk: tokens in one pass; None: all at once.
        rounds, warmup: timed passes into each cache, and passes before them.

    Returns:
        The rows of :func:`run` in the order of ``caches``, and the timings behind them.

    Raises:
        ValueError: a cache would not fit in the memory that is free.
    """
    check_memory(probe_layers(model), batch * context, 1)
    prompt = random_prompt(model, batch, context, seed)
    held: list[Cache] = []  # the one cache that there is at a time

    def contestant(named: NamedCache) -> Contestant:
        def prepare() -> None:
            held.clear()
            attend_as_meant(model, named)
            held.append(named.make(model.config))

        return Contestant(named.name, lambda: read_prompt(model, held[0], prompt, chunk), prepare)

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{what}, batch {batch}, context {context}", done, total)

    contestants = [contestant(named) for named in caches]
    timings = time_in_turn(contestants, rounds, warmup, lambda done, total: report("reading prompts", done, total))
    baseline = timings[UNQUANTIZED].median
    rows: list[dict[str, Any]] = []
    for peer in contestants:
        timing = timings[peer.name]
        peak, resident, size = _memory_of(model, peer, held, prompt, chunk)
        rows.append(
            {
                "cache": peer.name,
                "batch": batch,
                "context": context,
                "seconds": timing.median,
                "ratio_to_dynamic": baseline / timing.median,
                "peak_bytes": peak,
                "peak_rss_bytes": resident,
                "kv_bytes": size,
                "tokens_per_s": batch * context / timing.median,
                "chunk": chunk,
                "spread": timing.spread,
                "rounds": rounds,
            }
        )
        report("following memory", len(rows), len(caches))
    held.clear()
    attend_as_meant(model, named_cache(UNQUANTIZED))
    return rows, timings


def _memory_of(
    model: PreTrainedModel, peer: Contestant, held: list[Cache], prompt: torch.Tensor, chunk: int | None
) -> tuple[int, int | None, int]:
    """The most bytes of tensors during a pass, the growth of the process in another, and the size of the cache."""
    assert peer.prepare is not None
    peer.prepare()
    resident = peak_resident(peer.call)
    peer.prepare()
    memory = TensorMemory()
    # Each piece is a part of its own: what the profiler writes down of a long prompt at once would be large.
    for piece in pieces(prompt, chunk):
        with memory.part("prompt"):
            read_piece(model, held[0], piece)
    return memory.peak, resident, kv_bytes(held[0])
