"""``qkv bench redundancy``: why a cache exists, counted and timed.

The same model continues the same prompt, always with its likeliest token: without a cache, so that every step reads the
whole sequence again, and through each cache, where a step reads the newest token alone. Hooks on the projections that
make keys and values count how often those of each position are computed. For a prompt of p tokens and g new ones

* without a cache: p + (p + 1) + ... + (p + g - 1) = ``p*g + g*(g - 1)/2`` positions, the first of them g times;
* with a cache: each position once, ``p + g - 1`` in all. The last new token is chosen and never read, so its keys are
  not needed; who counts them too, as for a text that goes on, arrives at ``p + g``.

Every layer and every head does the same, so they multiply both counts and cancel in the ratio, the factor of waste. It
is right to keep keys and values because those of a position depend on what stands before it, and on nothing after.

One pass counts, with hooks; others without hooks are timed, in turn token by token, so that a slow spell of the machine
falls on all alike.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument, named_cache
from qkv_eval.bench.fit import FEWEST_CONTEXTS, fit_line
from qkv_eval.bench.prompt import check_caches, check_positions, random_prompt
from qkv_eval.bench.timing import Timing, noise_warning
from qkv_eval.held import kv_bytes
from qkv_eval.peers import Progress, attend_as_meant, with_baseline

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

NO_CACHE = "no cache"
# Usual pairs of a prompt and what is written after it: a question, a chat, a document and its summary, a long one.
USUAL = ((32, 128), (128, 128), (128, 1024), (1024, 256), (1024, 1024), (8192, 512), (32768, 1024), (131072, 4096))

# What the projections are called in transformers' models: of keys and of values, of both (often with queries), and of
# latent attention, where the first makes what is common to all heads and the second each head's keys and values of it.
_SEPARATE = (("k_proj", "v_proj"), ("key", "value"), ("k", "v"), ("kv_a_proj_with_mqa", "kv_b_proj"))
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "kv_proj")


# ---- closed forms ---------------------------------------------------------------------------------------------------


def positions_without_cache(prompt: int, generated: int) -> int:
    """Returns for how many positions keys are computed if every step reads the whole sequence again."""
    return prompt * generated + generated * (generated - 1) // 2


def positions_with_cache(prompt: int, generated: int) -> int:
    """Returns for how many positions keys are computed if each is computed once; the last token's are not needed."""
    return prompt + generated - 1


def waste_factor(prompt: int, generated: int) -> float:
    """Returns how many times as many keys are computed without a cache as with one."""
    return positions_without_cache(prompt, generated) / positions_with_cache(prompt, generated)


def usual_factors(pairs: Iterable[tuple[int, int]] = USUAL) -> list[dict[str, Any]]:
    """Returns rows ``prompt, generated, without_cache, with_cache, factor`` by the closed forms; nothing is run."""
    return [
        {
            "prompt": prompt,
            "generated": generated,
            "without_cache": positions_without_cache(prompt, generated),
            "with_cache": positions_with_cache(prompt, generated),
            "factor": waste_factor(prompt, generated),
        }
        for prompt, generated in pairs
    ]


# ---- counting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Projections:
    """What makes the keys and the values of a layer; the same module for both if they are made in one."""

    name: str
    keys: torch.nn.Module
    values: torch.nn.Module


def find_projections(model: PreTrainedModel) -> list[Projections]:
    """Finds the projections of keys and values in each attention layer of a decoder, by what models call them.

    Raises:
        ValueError: a model with an encoder, or one where none are found.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, whose tokens are read once with a cache or without; redundancy "
            "is measured on a model with a decoder alone"
        )
    found = []
    # Beside a language model there may be others, for images or sound, which read their input once.
    for name, module in model.get_decoder().named_modules():
        parts = dict(module.named_children())
        for keys, values in (*_SEPARATE, *((fused, fused) for fused in _FUSED)):
            if keys in parts and values in parts:
                found.append(Projections(name, parts[keys], parts[values]))
                break
    if not found:
        known = ", ".join(dict.fromkeys([name for pair in _SEPARATE for name in pair] + list(_FUSED)))
        raise ValueError(
            f"no projections of keys and values are found in {type(model).__name__}; known are those called {known}"
        )
    return found


class ProjectionCounts:
    """How often keys and values were computed: two tensors, int64 ``[layers, positions]``."""

    def __init__(self, layers: int, positions: int) -> None:
        self.keys = torch.zeros(layers, positions, dtype=torch.int64)
        self.values = torch.zeros_like(self.keys)

    def used(self) -> torch.Tensor:
        """Returns which layers computed any, bool ``[layers]``; some models have layers that use another's."""
        return self.keys.any(dim=1)


class ProjectionHooks(AbstractContextManager["ProjectionHooks"]):
    """Counts what projections compute while it is entered, of one sequence at a time.

    A projection sees rows, not positions: say with :meth:`at` where a step begins before the model is called.

    Args:
        projections: of the model's layers.
    """

    def __init__(self, projections: Sequence[Projections]) -> None:
        self.projections = projections
        self._handles: list[RemovableHandle] = []
        self._counts: ProjectionCounts | None = None
        self._first = self._rows = 0

    def at(self, counts: ProjectionCounts | None, first: int = 0, rows: int = 0) -> None:
        """Says where the next calls are counted, and that they read ``rows`` tokens from position ``first`` on."""
        self._counts, self._first, self._rows = counts, first, rows

    def __enter__(self) -> ProjectionHooks:
        for layer, found in enumerate(self.projections):
            sides = (("keys", found.keys), ("values", found.values))
            self._handles += [module.register_forward_hook(self._hook(layer, side)) for side, module in sides]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, layer: int, side: str) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
        def count(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if self._counts is None:
                return
            rows, end = output.shape[:-1].numel(), self._first + self._rows
            if rows not in (self._rows, end):
                raise ValueError(
                    f"{self.projections[layer].name} computed {side} of {rows} tokens in a step of {self._rows}; which "
                    "positions these are is not known"
                )
            # What is computed of more tokens than the step has is computed of all before them as well.
            getattr(self._counts, side)[layer, end - rows : end] += 1

        return count


# ---- generating -----------------------------------------------------------------------------------------------------


class _Writer:
    """One continuation of a prompt by the likeliest tokens, through a cache or, with None, without one."""

    def __init__(self, model: PreTrainedModel, named: NamedCache | None, prompt: torch.Tensor) -> None:
        self.name = NO_CACHE if named is None else named.name
        self.tokens = prompt
        self.cache: Cache | None = None if named is None else named.make(model.config)
        # By how much the likeliest token of each step was ahead of the next.
        self.gaps: list[float] = []
        self._model = model
        self._named = named_cache(UNQUANTIZED) if named is None else named
        self._read = 0
        # As in `generate`: predictions of all the tokens that are read again would cost more than the keys.
        last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._more: dict[str, Any] = {"logits_to_keep": 1} if last else {}

    @property
    def first(self) -> int:
        """The position of the first token that the next step reads."""
        return 0 if self.cache is None else self._read

    @property
    def rows(self) -> int:
        """How many tokens the next step reads."""
        return self.tokens.shape[1] - self.first

    def prepare(self) -> None:
        attend_as_meant(self._model, self._named)

    def step(self) -> None:
        if self.cache is None:
            output = self._model(input_ids=self.tokens, use_cache=False, **self._more)
        else:
            piece = self.tokens[:, self.first :]
            output = self._model(input_ids=piece, use_cache=True, **as_argument(self.cache), **self._more)
        self._read = self.tokens.shape[1]
        best = output.logits[:, -1].float().topk(2)
        self.gaps.append(float(best.values[0, 0] - best.values[0, 1]))
        self.tokens = torch.cat([self.tokens, best.indices[:, :1]], dim=1)


@dataclass(frozen=True)
class RedundancySettings:
    """What to measure: every cache, and none, at every length of the prompt and number of new tokens."""

    caches: tuple[str, ...] = (UNQUANTIZED, "int8")
    prompt_tokens: tuple[int, ...] = (64,)
    new_tokens: tuple[int, ...] = (64,)
    rounds: int = 3
    seed: int = 0


def run(model: PreTrainedModel, settings: RedundancySettings, progress: Progress | None = None) -> dict[str, Any]:
    """Counts and times generation without a cache and through each; ``dynamic`` is always one of them.

    Returns:
        ``rows``, the first of each prompt and number of new tokens with the cache ``no cache``, and the keys

        * ``cache, prompt, generated``;
        * ``positions_computed``: of how many positions a layer computed keys, each time counted; ``expected``: the
          same by the closed form; ``value_positions_computed``: the same of values; ``factor``: the first divided by
          the positions there are; ``first_position_computed`` and ``counts``: how often the keys of position 0 and of
          each were computed;
        * ``layers, layer_positions_computed, kv_heads, head_positions_computed``: layers that compute keys, their
          count in all; key/value heads of all layers, and the count over these;
        * ``seconds`` for all new tokens, ``ms_first`` (with the prompt), ``ms_second, ms_last``, ``spread, rounds``;
        * ``same_tokens``: the new tokens at the start that are those without a cache; ``gap``: how far the two
          likeliest tokens were apart in logits where they first differ, None where they do not;
        * ``kv_bytes``: the cache's size in the end, None without one;
        * ``tokens``: of each new token its ``position, ms`` and the counts up to it, ``positions_computed`` and
          ``layer_positions_computed``.

        ``fits``, see :func:`fit_growth`; ``factors``, see :func:`usual_factors`; and ``notes``.

    Raises:
        ValueError: an unknown cache, a model whose projections are not found, or more tokens than it has positions.
    """
    caches = with_baseline(settings.caches)
    find_projections(model)
    check_caches(model, caches)
    most = positions_with_cache(max(settings.prompt_tokens), max(settings.new_tokens))
    notes = [note for note in [check_positions(model, most)] if note is not None]
    rows: list[dict[str, Any]] = []
    for prompt in settings.prompt_tokens:
        for generated in settings.new_tokens:
            measured, timings = measure_redundancy(
                model, caches, prompt, generated, rounds=settings.rounds, seed=settings.seed, progress=progress
            )
            rows += measured
            where = f"prompt {prompt}, {generated} new tokens"
            notes += [f"{where}: {note}" for note in _remarks(measured)]
            noise = noise_warning(timings)
            if noise is not None:
                notes.append(f"{where}: {noise}")
    fits = [fit for row in rows if (fit := fit_growth(row)) is not None]
    return {"rows": rows, "fits": fits, "factors": usual_factors(), "notes": notes}


@torch.inference_mode()
def measure_redundancy(
    model: PreTrainedModel,
    caches: Sequence[NamedCache],
    prompt: int,
    generated: int,
    *,
    rounds: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Timing]]:
    """Counts and times the continuation of a random prompt without a cache and through each; leaves the model plain.

    Args:
        model: the model; its own attention serves all caches but ours.
        caches: with ``dynamic`` among them.
        prompt, generated: tokens of the prompt and after it, at least one each.
        rounds: timed continuations of each.

    Returns:
        The rows of :func:`run`, without a cache first, and the timings of whole continuations.

    Raises:
        ValueError: a number below 1, a model whose projections are not found, or one whose layers keep keys that no
            projection was seen to compute.
    """
    if min(prompt, generated, rounds) < 1:
        raise ValueError(f"prompt {prompt}, generated {generated} and rounds {rounds} must be at least 1")
    text = random_prompt(model, 1, prompt, seed)
    what, total = f"generating, prompt {prompt}, {generated} new tokens", (1 + rounds) * generated

    def report(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    def new_writers() -> list[_Writer]:
        return [_Writer(model, named, text) for named in (None, *caches)]

    # The first pass counts, and warms up for those that are timed.
    counted = new_writers()
    with ProjectionHooks(find_projections(model)) as hooks:
        layers = len(hooks.projections)
        counts = [ProjectionCounts(layers, prompt + generated) for _ in counted]
        history: list[list[tuple[int, int]]] = [[] for _ in counted]
        for done in range(generated):
            for writer, count, after in zip(counted, counts, history, strict=True):
                writer.prepare()
                hooks.at(count, writer.first, writer.rows)
                writer.step()
                in_all = int(count.keys.sum())
                after.append((in_all // max(int(count.used().sum()), 1), in_all))
            report(done + 1)
    heads = _kv_heads(counted, counts)

    seconds: list[list[list[float]]] = [[] for _ in counted]  # by writer, round and token
    for turn in range(rounds):
        writers = new_writers()
        for taken in seconds:
            taken.append([])
        for done in range(generated):
            first = (turn + done) % len(writers)
            for index in (*range(first, len(writers)), *range(first)):
                writers[index].prepare()
                begin = time.perf_counter()
                writers[index].step()
                seconds[index][turn].append(time.perf_counter() - begin)
            report((1 + turn) * generated + done + 1)
    attend_as_meant(model, named_cache(UNQUANTIZED))

    timings = {
        writer.name: Timing(tuple(sum(of_round) for of_round in taken))
        for writer, taken in zip(counted, seconds, strict=True)
    }
    rows = []
    for writer, count, after, taken in zip(counted, counts, history, seconds, strict=True):
        used = count.used()
        by_position = count.keys[used][0]
        ms = [1e3 * statistics.median(of_token) for of_token in zip(*taken, strict=True)]
        same = _same_tokens(counted[0].tokens, writer.tokens, prompt)
        computed = int(by_position.sum())
        expected = positions_without_cache if writer.cache is None else positions_with_cache
        rows.append(
            {
                "cache": writer.name,
                "prompt": prompt,
                "generated": generated,
                "positions_computed": computed,
                "expected": expected(prompt, generated),
                "value_positions_computed": int(count.values[used][0].sum()),
                "factor": computed / int((by_position > 0).sum()),
                "first_position_computed": int(by_position[0]),
                "layers": int(used.sum()),
                "layer_positions_computed": int(count.keys.sum()),
                "kv_heads": sum(heads),
                "head_positions_computed": int((count.keys[used].sum(dim=1) * torch.tensor(heads)).sum()),
                "layers_agree": bool((count.keys[used] == by_position).all()),
                "seconds": timings[writer.name].median,
                "ms_first": ms[0],
                "ms_second": ms[1] if generated > 1 else None,
                "ms_last": ms[-1],
                "spread": timings[writer.name].spread,
                "rounds": rounds,
                "same_tokens": same,
                "gap": counted[0].gaps[same] if same < generated else None,
                "kv_bytes": None if writer.cache is None else kv_bytes(writer.cache),
                "tokens": [
                    {
                        "position": prompt + i,
                        "ms": of_token,
                        "positions_computed": one,
                        "layer_positions_computed": all_,
                    }
                    for i, (of_token, (one, all_)) in enumerate(zip(ms, after, strict=True))
                ],
                "counts": by_position.tolist(),
            }
        )
    return rows, timings


def fit_growth(row: dict[str, Any]) -> dict[str, Any] | None:
    """Fits how the counts of one row grow with the tokens generated, and its time of a token with the position.

    Args:
        row: of :func:`measure_redundancy`.

    Returns:
        ``cache, prompt, generated``; ``squared, linear, constant``: the counted positions as a polynomial of the new
        tokens so far, by least squares (without a cache 1/2, prompt - 1/2 and 0; with one 0, 1 and prompt - 1);
        ``max_deviation``, the largest distance from it, in positions; ``ms_per_1000_positions`` and ``r2``, the slope
        of a straight line through the times of all tokens but the first, and how much of their variance it explains.
        None for fewer than four new tokens, through which such curves always go.
    """
    if row["generated"] <= FEWEST_CONTEXTS:
        return None
    so_far = np.arange(1, row["generated"] + 1, dtype=np.float64)
    counted = np.array([token["positions_computed"] for token in row["tokens"]], dtype=np.float64)
    squared, linear, constant = np.polyfit(so_far, counted, 2)
    off = np.abs(counted - np.polyval([squared, linear, constant], so_far))
    later = row["tokens"][1:]
    line = fit_line([token["position"] for token in later], [token["ms"] for token in later])
    return {
        "cache": row["cache"],
        "prompt": row["prompt"],
        "generated": row["generated"],
        "squared": float(squared),
        "linear": float(linear),
        "constant": float(constant),
        "max_deviation": float(off.max()),
        "ms_per_1000_positions": 1e3 * float(line["slope"] or 0.0),
        "r2": line["r2"],
    }


def _kv_heads(writers: Sequence[_Writer], counts: Sequence[ProjectionCounts]) -> list[int]:
    """The key/value heads of each layer that keeps keys, as DynamicCache has them."""
    index = next(i for i, writer in enumerate(writers) if writer.name == UNQUANTIZED)
    cache: Any = writers[index].cache
    kept = [getattr(layer, "keys", None) for layer in cache.layers]
    heads = [keys.shape[1] for keys in kept if keys is not None]
    for count in counts:
        if int(count.used().sum()) != len(heads):
            raise ValueError(
                f"{len(heads)} layers of this model keep keys, and {int(count.used().sum())} projections were seen to "
                "compute some: there are others, under names that are not known here"
            )
    return heads


def _same_tokens(one: torch.Tensor, other: torch.Tensor, prompt: int) -> int:
    differ = (one[0, prompt:] != other[0, prompt:]).nonzero()
    return int(differ[0]) if len(differ) else one.shape[1] - prompt


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader should know of the rows of one measurement."""
    found = []
    for row in rows:
        if row["positions_computed"] != row["expected"] or not row["layers_agree"]:
            found.append(f"{row['cache']}: the counts are not those of the closed form, or layers differ in them")
        if row["value_positions_computed"] != row["positions_computed"]:
            found.append(
                f"{row['cache']}: latent attention keeps what keys and values are made of, counted as keys, and makes "
                f"them of all of it again in each step: of {row['value_positions_computed']} positions"
            )
        if row["cache"] == UNQUANTIZED and row["gap"] is not None:
            found.append(
                f"DynamicCache goes on otherwise than no cache after {row['same_tokens']} tokens, where the two "
                f"likeliest were {row['gap']:.2g} apart in logits: rounding decides near ties"
            )
    return found
