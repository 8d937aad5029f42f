"""``qkv bench decode``: the time of one decode step of a whole model, by cache, batch and context.

Each cache is filled through its ``update`` with random keys and values of the model's shapes, layer by layer; no
prompt is run, so contexts beyond the model's trained length serve as well. Then all caches of one (batch, context) take
turns, one step each per round. A cache grows by the token of each step, so the context is the stated one plus the
rounds so far, at most a few dozen tokens.

Two more caches of each kind can take part in the same turns: a nearly empty one, whose step is everything but the cache
(its own share is the difference), and one of the same context that has got there by many steps, not at once: whatever
grew with their number would show.

Keys and values are normal with the spread that each layer showed for one real token: what they are does not change
the work of any cache here, but numbers far from real ones would meet denormals in the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument, named_cache
from qkv_eval.bench.fit import fit_steps
from qkv_eval.bench.prompt import check_positions, random_prompt, read_piece
from qkv_eval.bench.timing import Contestant, Timing, noise_warning, time_in_turn
from qkv_eval.held import bits_per_value, kv_bytes
from qkv_eval.peers import Progress, attend_as_meant, with_baseline

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class LayerShape:
    """What a layer of a model puts into its cache for one token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key_spread: float
    value_spread: float
    dtype: torch.dtype

    @property
    def values(self) -> int:
        """Numbers per token: keys and values of all heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class DecodeSettings:
    """What to measure: every cache at every batch and context.

    ``base``: the context of the caches that own shares are measured against; None: not. ``steps``: of the caches that
    have come to their context step by step; 0: none.
    """

    caches: tuple[str, ...] = (UNQUANTIZED, "none", "int8")
    batch: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (128, 4096)
    rounds: int = 15
    warmup: int = 2
    seed: int = 0
    base: int | None = None
    steps: int = 0


def run(model: PreTrainedModel, settings: DecodeSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the decode step of each cache at each batch and context; ``dynamic`` is always one of them.

    Returns:
        ``rows``, with the keys ``cache, batch, context, ms_per_step, ratio_to_dynamic, kv_bytes, tokens_per_s`` and
        ``bits_per_value, spread, rounds``; ``fits``, the line of the time over the context for each cache and batch
        with three contexts or more, see :func:`qkv_eval.bench.fit.fit_steps`; and ``notes``, lines that a reader of
        the figures should know. With ``base``, rows have ``base_context, base_ms, cache_ms`` (the cache's own share,
        the difference to a step at the base; None at contexts up to it) and ``cache_ms_iqr`` (the middle half of the
        differences of single rounds is so wide). With ``steps``, ``steps, ms_after_steps`` and ``ratio_after_steps``,
        ``ms_per_step`` divided by it: 1 if nothing grows with the steps done.

    Raises:
        ValueError: an unknown cache, caches that do not fit in the memory that is free, a context that the model has
            no positions for, or fewer tokens in a context than steps.
    """
    caches = with_baseline(settings.caches)
    if settings.steps >= min(settings.context):
        raise ValueError(f"{settings.steps} steps do not fit in a context of {min(settings.context)} tokens")
    rows: list[dict[str, Any]] = []
    most = max(settings.context) + settings.warmup + settings.rounds
    notes = [note for note in [check_positions(model, most)] if note is not None]
    for batch in settings.batch:
        for context in settings.context:
            measured, timings = measure_decode(
                model,
                caches,
                batch,
                context,
                rounds=settings.rounds,
                warmup=settings.warmup,
                seed=settings.seed,
                base=settings.base,
                steps=settings.steps,
                progress=progress,
            )
            rows.extend(measured)
            note = noise_warning(timings)
            if note is not None:
                notes.append(f"batch {batch}, context {context}: {note}")
    return {"rows": rows, "fits": fit_steps(rows), "notes": notes}


@torch.inference_mode()
def measure_decode(
    model: PreTrainedModel,
    caches: Sequence[NamedCache],
    batch: int,
    context: int,
    *,
    rounds: int,
    warmup: int = 2,
    seed: int = 0,
    base: int | None = None,
    steps: int = 0,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Timing]]:
    """Times one decode step through each cache in turn, at one batch and context, and leaves the model plain.

    Args:
        model: the model; its own attention serves all caches but ours.
        caches: with ``dynamic`` among them.
        batch, context: sequences, and tokens in each.
        rounds, warmup: timed steps of each cache, and steps before them.
        base: the context of further caches, for the share of each cache in its step; None: no such caches.
        steps: of further caches, the last tokens of the context that have come one by one; 0: no such caches.

    Returns:
        The rows of :func:`run` in the order of ``caches``, and the timings behind them.

    Raises:
        ValueError: the caches would not fit in the memory that is free.
    """
    what = f"decoding, batch {batch}, context {context}"
    layers = probe_layers(model)
    is_shared = base is not None and base < context
    kept = context * (1 + (steps > 0)) + (base or 0) * is_shared
    check_memory(layers, batch * kept, len(caches))
    token = random_prompt(model, batch, 1, seed)
    filled = fill_caches(model, caches, layers, batch, context, seed, progress)
    values = held_values(filled[[named.name for named in caches].index(UNQUANTIZED)])
    rows: list[dict[str, Any]] = [
        {
            "cache": named.name,
            "batch": batch,
            "context": context,
            "kv_bytes": kv_bytes(cache),
            "bits_per_value": bits_per_value(cache, values),
        }
        for named, cache in zip(caches, filled, strict=True)
    ]
    contestants = [_contestant(model, named, cache, token) for named, cache in zip(caches, filled, strict=True)]
    if is_shared and base is not None:
        small = fill_caches(model, caches, layers, batch, base, seed, progress)
        contestants += [
            _contestant(model, named, cache, token, _at_base(named.name))
            for named, cache in zip(caches, small, strict=True)
        ]
    if steps:
        stepped = fill_caches(model, caches, layers, batch, context - steps, seed, progress)
        for named, cache in zip(caches, stepped, strict=True):
            attend_as_meant(model, named)
            for done in range(steps):
                read_piece(model, cache, token)
                if progress is not None:
                    progress(f"{named.name}: steps before, batch {batch}, context {context}", done + 1, steps)
        contestants += [
            _contestant(model, named, cache, token, _after_steps(named.name))
            for named, cache in zip(caches, stepped, strict=True)
        ]

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)

    timings = time_in_turn(contestants, rounds, warmup, report)
    attend_as_meant(model, named_cache(UNQUANTIZED))
    baseline = timings[UNQUANTIZED].median
    for row in rows:
        timing = timings[row["cache"]]
        row.update(
            ms_per_step=1e3 * timing.median,
            ratio_to_dynamic=baseline / timing.median,
            tokens_per_s=batch / timing.median,
            spread=timing.spread,
            rounds=rounds,
        )
        if base is not None:
            row.update(_own_share(timing, timings.get(_at_base(row["cache"])), base))
        if steps:
            after = timings[_after_steps(row["cache"])].median
            row.update(steps=steps, ms_after_steps=1e3 * after, ratio_after_steps=timing.median / after)
    return rows, timings


def held_values(cache: Any) -> int:
    """Numbers of keys and values in the layers of a ``DynamicCache``; with a sliding window, of fewer tokens."""
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def _at_base(name: str) -> str:
    return f"{name} (nearly empty)"


def _after_steps(name: str) -> str:
    return f"{name} (after steps)"


def _own_share(timing: Timing, at_base: Timing | None, base: int) -> dict[str, Any]:
    """What a cache's own share of its step is, out of turns with a cache of ``base`` tokens."""
    if at_base is None:
        return {"base_context": base, "base_ms": None, "cache_ms": None, "cache_ms_iqr": None}
    differences = Timing(tuple(a - b for a, b in zip(timing.seconds, at_base.seconds, strict=True)))
    return {
        "base_context": base,
        "base_ms": 1e3 * at_base.median,
        "cache_ms": 1e3 * (timing.median - at_base.median),
        "cache_ms_iqr": 1e3 * differences.middle_half,
    }


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Finds what each layer puts into its cache, by running one token through an unquantized one.

    Raises:
        ValueError: the model has layers that keep something else than keys and values.
    """
    attend_as_meant(model, named_cache(UNQUANTIZED))
    cache: Any = named_cache(UNQUANTIZED).make(model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **as_argument(cache), use_cache=True)
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise ValueError(
                f"layer {index} of this model keeps no keys and values; only attention layers can be filled"
            )
        layers.append(
            LayerShape(
                keys.shape[1],
                keys.shape[3],
                values.shape[3],
                keys.float().pow(2).mean().sqrt().item(),
                values.float().pow(2).mean().sqrt().item(),
                keys.dtype,
            )
        )
    return layers


@torch.inference_mode()
def fill_caches(
    model: PreTrainedModel,
    caches: Sequence[NamedCache],
    layers: Sequence[LayerShape],
    batch: int,
    context: int,
    seed: int,
    progress: Progress | None = None,
) -> list[Cache]:
    """Makes caches with the same random tokens, ``context`` in each of ``batch`` sequences, in every layer.

    One update for each layer, as a prompt's pass would do it; so beside the caches one layer is in memory, decoded.
    """
    generator = torch.Generator().manual_seed(seed)
    filled = [named.make(model.config) for named in caches]
    for index, layer in enumerate(layers):
        keys = torch.randn(batch, layer.kv_heads, context, layer.key_dim, generator=generator)
        values = torch.randn(batch, layer.kv_heads, context, layer.value_dim, generator=generator)
        keys, values = (keys * layer.key_spread).to(layer.dtype), (values * layer.value_spread).to(layer.dtype)
        for named, cache in zip(caches, filled, strict=True):
            attend_as_meant(model, named)
            cache.update(keys, values, index)
        if progress is not None:
            progress(f"filling caches, batch {batch}, context {context}", index + 1, len(layers))
    return filled


def _contestant(
    model: PreTrainedModel, named: NamedCache, cache: Cache, token: torch.Tensor, name: str | None = None
) -> Contestant:
    arguments = as_argument(cache)

    def step() -> None:
        model(input_ids=token, use_cache=True, **arguments)

    return Contestant(name or named.name, step, lambda: attend_as_meant(model, named))


def check_memory(layers: Sequence[LayerShape], tokens: int, caches: int) -> None:
    """Checks that caches of so many tokens fit in the memory that is free, each taken to be as the unquantized one.

    Raises:
        ValueError: they may not.
    """
    free = _free_memory()
    needed = caches * tokens * sum(layer.values * layer.dtype.itemsize for layer in layers)
    if free is not None and needed > free:
        raise ValueError(
            f"{caches} caches of {tokens} tokens may need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            "free; use a smaller batch or context, or fewer caches"
        )


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
