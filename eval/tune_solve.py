"""One option for each group, at the least cost, within limits: the multiple-choice knapsack of ``qkv tune``, exactly.

A bound from Lagrangian multipliers says how far any choice can be from the best: an option whose reduced cost (its cost
and its weights at the multipliers' prices, less the cheapest of its group) exceeds the gap between that bound and a
choice that is known cannot be part of a better one. What remains is enumerated, group by group, dropping what another
partial choice beats in cost and in every weight. With the few dozen groups and options of a tuning that is
milliseconds, and no solver has to be installed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Partial choices that are kept at most, with one limit and with several; beyond them the least promising are let go,
# and the answer may not be the best.
MOST_PARTIAL = (200_000, 4_000)
# Partial choices that all others are compared with where there is more than one limit.
_MOST_COMPARED = 250
# What rounding may add to a sum, as a part of it.
_ROUNDING = 1e-12
# Steps of the search for multipliers, and the powers of e between which they are looked for.
_STEPS, _LEAST, _LARGEST = 60, -25.0, 25.0


@dataclass(frozen=True)
class Choice:
    """A choice of one option for each group.

    Attributes:
        picks: the index of the option, by group.
        cost: the sum of the costs.
        weights: the sums of the weights, one for each limit.
        exact: whether no other choice within the limits costs less.
    """

    picks: tuple[int, ...]
    cost: float
    weights: tuple[float, ...]
    exact: bool = True


def solve(
    costs: Sequence[Sequence[float]], weights: Sequence[Sequence[Sequence[float]]], limits: Sequence[float]
) -> Choice | None:
    """Returns the choice of least cost within all limits, or None if there is none.

    Args:
        costs: of each option of each group; at least one option in a group, any finite numbers.
        weights: of each option of each group, one number of at least 0 for each limit.
        limits: what each sum of weights may reach.

    Raises:
        ValueError: a group without options, a number that is not finite, or a negative weight.
    """
    if not limits or not costs or not all(len(group) for group in costs):
        raise ValueError("a choice needs limits, and groups with at least one option each")
    problem = _Problem([np.asarray(c, float) for c in costs], [np.asarray(w, float) for w in weights], limits)
    prices, known = problem.find_prices()
    return problem.enumerate(prices, known)


class _Problem:
    """A problem with what its search needs; costs and weights are scaled so that sums are around 1."""

    def __init__(self, costs: list[Array], weights: list[Array], limits: Sequence[float]) -> None:
        self.costs, self.weights, self.limits = costs, weights, np.asarray(limits, float)
        for cost, weight in zip(costs, weights, strict=True):
            if weight.shape != (len(cost), len(limits)):
                raise ValueError(f"{len(cost)} options with {len(limits)} limits have weights of shape {weight.shape}")
            if not (np.isfinite(cost).all() and np.isfinite(weight).all() and (weight >= 0).all()):
                raise ValueError("costs must be finite, and weights finite and at least 0")
        groups, most = len(costs), max(map(len, costs))
        # Padded with options that nobody takes.
        self._cost = np.full((groups, most), np.inf)
        self._weight = np.zeros((groups, most, len(limits)))
        spread = sum(float(np.ptp(cost)) for cost in costs)
        largest = np.max([weight.max(0) for weight in weights], axis=0)
        # A limit that is next to nothing beside the weights is no measure for them.
        sizes = np.where(self.limits > 1e-9 * largest, self.limits, np.where(largest > 0, largest, 1.0))
        for group, (cost, weight) in enumerate(zip(costs, weights, strict=True)):
            self._cost[group, : len(cost)] = cost / (spread or 1.0)
            self._weight[group, : len(cost)] = weight / sizes
        self._limit = self.limits / sizes
        self._slack = _ROUNDING * groups
        self._rows = np.arange(groups)

    def _sums(self, picks: NDArray[np.int64]) -> tuple[float, Array]:
        return float(self._cost[self._rows, picks].sum()), self._weight[self._rows, picks].sum(0)

    def _fits(self, weights: Array) -> bool:
        return bool((weights <= self._limit + self._slack).all())

    def find_prices(self) -> tuple[Array, NDArray[np.int64] | None]:
        """Multipliers with a high bound, and the best choice within the limits that was seen on the way."""
        seen: list[tuple[float, NDArray[np.int64]]] = []

        def bound(prices: Array) -> tuple[float, Array]:
            """The bound at these prices, and by how much the choice behind it exceeds each limit."""
            picks = (self._cost + self._weight @ prices).argmin(1)
            cost, weights = self._sums(picks)
            if self._fits(weights) and (not seen or cost < seen[-1][0]):
                seen.append((cost, picks))
            return cost + float(prices @ (weights - self._limit)), weights - self._limit

        def climb(prices: Array, which: int) -> tuple[float, Array]:
            """The highest bound over the prices from ``which`` on, the others as they are."""
            best = (bound(prices)[0], prices)
            low, high = _LEAST, _LARGEST
            last = which == len(prices) - 1
            for _ in range(_STEPS):
                if last:  # the excess falls as the price rises
                    middle = (low + high) / 2
                    tried = prices.copy()
                    tried[which] = np.exp(middle)
                    value, excess = bound(tried)
                    if value > best[0]:
                        best = (value, tried)
                    low, high = (middle, high) if excess[which] > 0 else (low, middle)
                    continue
                places = (low + (high - low) / 3, high - (high - low) / 3)
                found = []
                for place in places:
                    tried = prices.copy()
                    tried[which] = np.exp(place)
                    found.append(climb(tried, which + 1))
                best = max(best, *found, key=lambda item: item[0])
                low, high = (places[0], high) if found[0][0] < found[1][0] else (low, places[1])
                if high - low < 1e-3:
                    break
            return best

        start = np.zeros(len(self._limit))
        _, prices = climb(start, 0)
        # What weighs least of all is a choice too, where prices found none.
        bound(np.full(len(start), np.exp(_LARGEST)))
        return prices, self._improve(seen[-1][1]) if seen else None

    def _improve(self, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Takes another option of one group, the one that saves most, for as long as one fits that saves anything."""
        picks = picks.copy()
        while True:
            _, weights = self._sums(picks)
            saved = self._cost[self._rows, picks][:, None] - self._cost
            then = weights + self._weight - self._weight[self._rows, picks][:, None]
            fits = (then <= self._limit + self._slack).all(2)
            saved = np.where(fits, saved, -np.inf)
            group, option = np.unravel_index(saved.argmax(), saved.shape)
            if saved[group, option] <= 0:
                return picks
            picks[group] = option

    def enumerate(self, prices: Array, known: NDArray[np.int64] | None) -> Choice | None:
        """The best choice, given multipliers and a choice within the limits, if one is known."""
        priced = self._cost + self._weight @ prices
        reduced = priced - priced.min(1, keepdims=True)
        lowest = float(priced.min(1).sum() - prices @ self._limit)
        gap = self._sums(known)[0] - lowest + self._slack if known is not None else np.inf
        gap += _ROUNDING * (1 + float(prices.sum()))
        # Groups that are as good as decided come first: their second-best option is far off.
        order = np.argsort(-np.sort(reduced, 1)[:, min(1, reduced.shape[1] - 1)], kind="stable")
        least = np.array([self._weight[group, : len(self.costs[group])].min(0) for group in order])
        rest = np.vstack([least[::-1].cumsum(0)[::-1][1:], np.zeros(len(self._limit))])
        most = MOST_PARTIAL[min(len(self._limit), 2) - 1]
        sums = np.zeros((1, len(self._limit)))
        spent, exact = np.zeros(1), True  # of the reduced cost
        steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for place, group in enumerate(order):
            options = np.flatnonzero(np.isfinite(reduced[group]) & (reduced[group] <= gap))
            total = (spent[:, None] + reduced[group, options]).ravel()
            weight = (sums[:, None] + self._weight[group, options]).reshape(-1, len(self._limit))
            kept = np.flatnonzero(
                (total <= gap) & (weight + rest[place] <= self._limit + self._slack).all(1)
            )  # what cannot be better, or not be finished
            if len(kept) > 4 * most:  # comparing them all would take long
                kept, exact = kept[np.argsort(total[kept], kind="stable")[: 4 * most]], False
            kept = kept[_undominated(total[kept] - weight[kept] @ prices, weight[kept])]
            if len(kept) > most:
                kept, exact = kept[np.argsort(total[kept], kind="stable")[:most]], False
            steps.append((kept // max(1, len(options)), options[kept % max(1, len(options))]))
            spent, sums = total[kept], weight[kept]
        if not len(spent):
            return self._choice(known, exact) if known is not None else None
        at = int(np.lexsort((sums[:, 0], spent - sums @ prices))[0])
        picks = np.zeros(len(order), np.int64)
        for group, (parents, options) in zip(order[::-1], steps[::-1], strict=True):
            picks[group] = options[at]
            at = int(parents[at])
        if known is not None and self._sums(known)[0] < self._sums(picks)[0]:
            picks = known
        return self._choice(picks, exact)

    def _choice(self, picks: NDArray[np.int64], exact: bool) -> Choice:
        cost = sum(float(group[pick]) for group, pick in zip(self.costs, picks, strict=True))
        weights = sum(group[pick] for group, pick in zip(self.weights, picks, strict=True))
        return Choice(tuple(int(pick) for pick in picks), cost, tuple(np.atleast_1d(weights).tolist()), exact)


def _undominated(cost: Array, weight: Array) -> NDArray[np.int64]:
    """Indices of the partial choices that no other beats, or equals, in cost and in all weights."""
    order = np.lexsort((cost, *weight.T[::-1]))
    if weight.shape[1] == 1:
        best = np.minimum.accumulate(cost[order])
        return order[np.flatnonzero(np.concatenate([[True], cost[order][1:] < best[:-1]]))] if len(order) else order
    everything = np.column_stack([cost, weight])[order]
    judges = np.argsort(everything.sum(1), kind="stable")[:_MOST_COMPARED]  # whoever is low in all beats many
    beats = (everything[judges, None] <= everything[None]).all(2)  # [judge, who]
    beats &= (everything[judges, None] < everything[None]).any(2) | (judges[:, None] < np.arange(len(order)))
    return order[~beats.any(0)]


__all__ = ["MOST_PARTIAL", "Choice", "solve"]
