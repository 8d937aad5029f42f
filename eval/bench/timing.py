"""Timing that survives a shared machine: peers take turns within one process, and medians come with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Above this the middle half of the timings is so wide that a ratio of medians says little in its second digit.
NOISY = 0.10


@dataclass(frozen=True)
class Contestant:
    """One of the things timed in turn: ``call`` is timed; ``prepare`` runs before each call and is not."""

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Timing:
    """The timings of one contestant, in seconds, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median; 0.1: the middle half is a tenth of the median wide."""
        return self.middle_half / self.median

    @property
    def middle_half(self) -> float:
        """The interquartile range in seconds; of fewer than four timings the whole range."""
        if len(self.seconds) < 4:
            return max(self.seconds) - min(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


@torch.inference_mode()
def time_in_turn(
    contestants: Sequence[Contestant],
    rounds: int,
    warmup: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Times contestants in turn, round after round, each once a round.

    A slow spell of the machine then falls on all of them alike. Each round starts with another contestant, so that
    nobody always follows the same neighbour.

    Args:
        contestants: with different names.
        rounds: rounds that are kept.
        warmup: rounds before them that are run and not kept.
        progress: called with the rounds done and their total.

    Raises:
        ValueError: two contestants of one name.
    """
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    if len(seconds) != len(contestants):
        raise ValueError(f"contestants need different names, not {', '.join(c.name for c in contestants)}")
    for turn in range(-warmup, rounds):
        first = turn % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            if contestant.prepare is not None:
                contestant.prepare()
            begin = time.perf_counter()
            contestant.call()
            taken = time.perf_counter() - begin
            if turn >= 0:
                seconds[contestant.name].append(taken)
        if progress is not None:
            progress(turn + warmup + 1, rounds + warmup)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def noise_warning(timings: dict[str, Timing]) -> str | None:
    """Returns one line that says how noisy the machine was, or None if the timings are steady."""
    name, timing = max(timings.items(), key=lambda item: item[1].spread)
    if timing.spread <= NOISY:
        return None
    return (
        f"the machine is noisy: the middle half of the timings of {name} spans {timing.spread:.0%} of their median; "
        "close what else runs, or use more rounds"
    )
