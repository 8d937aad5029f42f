"""How ``qkv tune`` chooses: solutions by budget beside uniform set-ups, and the best of them on the validation text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import qkv
from qkv_eval.tune_costs import REFERENCE
from qkv_eval.tune_measure import Measurements, finite
from qkv_eval.tune_solve import Choice, solve

if TYPE_CHECKING:
    import torch

    from qkv_eval.tune_settings import TuneSettings

TUNED = "tuned"
# Uniform set-ups that are validated because they are the best predicted ones within the limits.
_BEST_UNIFORM = 3
# How often a bracket around the bound on the divergence is cut, and into how many parts.
_CUTS, _PARTS = 2, 4
# How often a choice that turns out to take too long is solved again with a tighter limit.
_TRIES = 5


@dataclass(frozen=True)
class Plan:
    """A set-up of all layers.

    Attributes:
        name: what tables show.
        kind: ``tuned``, ``uniform`` or ``preset``.
        config: the set-up.
        bits: per value, counted at the context.
        predicted: the sum of the divergences of its parts; None: of a preset.
        time_ratio: time of attention over that with ``int8`` in all layers; None: not measured.
        exact: whether no better solution was possible, by the prediction.
    """

    name: str
    kind: str
    config: qkv.CacheConfig
    bits: float
    predicted: float | None
    time_ratio: float | None = None
    exact: bool = True


class Chooser:
    """Chooses among what was measured.

    Args:
        measured: what each part of a set-up costs.
        presets: set-ups by name; those that are uniform set-ups of the candidates can be chosen.
        validation: the windows that the choice is made by, int64 ``[windows, tokens]``.

    Attributes:
        validated: the mean divergence on these windows of each set-up that was looked at.
    """

    def __init__(self, measured: Measurements, presets: Sequence[Plan], validation: torch.Tensor) -> None:
        self.measured, self.presets, self._validation = measured, presets, validation
        self.settings: TuneSettings = measured.settings
        self.validated: dict[qkv.CacheConfig, float] = {}

    def uniform(self) -> list[Plan]:
        """One candidate for all keys and one for all values: those that no other beats in bits and prediction."""
        measured, plans = self.measured, []
        for pick, (key, value) in enumerate(measured.pairs):
            predicted = measured.predict([pick] * len(measured.ledger.layers))
            config = measured.uniform_config(pick)
            name = key.name if key.name == value.name else f"{key.name} + {value.name}"
            if any(name == preset.name and config != preset.config for preset in self.presets):
                name = f"{name}, uniform"
            plans.append(Plan(name, "uniform", config, measured.ledger.bits_per_value(config), predicted))
        best: list[Plan] = []
        for plan in sorted(plans, key=lambda plan: (plan.bits, plan.predicted)):
            if not best or (plan.predicted or 0.0) < (best[-1].predicted or 0.0):
                plan = replace(plan, time_ratio=measured.time_ratio(plan.config))
                if self._is_fast_enough(plan):
                    best.append(plan)
        return best

    def choose(self, uniform: Sequence[Plan]) -> tuple[Plan, list[Plan], dict[float, Plan]]:
        """The choice, everything that was validated, and the solutions at the budgets of the front."""
        settings, measured = self.settings, self.measured
        thin = spread_over(uniform, settings.points)
        budgets = {plan.bits for plan in thin}
        if settings.max_kld is not None:
            budgets |= set(measured.budgets(6))
        points = self.solve_at(budgets)
        # Presets that are uniform set-ups of the candidates; others are only verified beside the choice.
        pairs = {measured.uniform_config(pick) for pick in range(len(measured.pairs))}
        presets = [plan for plan in self.presets if plan.config in pairs]
        presets = [replace(plan, time_ratio=measured.time_ratio(plan.config)) for plan in presets]
        pool = [*thin, *points.values(), *(plan for plan in presets if self._is_fast_enough(plan))]
        if settings.max_kld is not None:
            self._validate(pool)
            return self._fewest_bits(pool, points), pool, points
        within = [plan for plan in uniform if settings.bits is None or plan.bits <= settings.bits]
        pool += sorted(within, key=lambda plan: plan.predicted or 0.0)[:_BEST_UNIFORM]
        asked = [plan for smooth in (False, True) if (plan := self._solve(settings.bits, TUNED, smooth)) is not None]
        pool += asked
        if not asked and not within:
            raise ValueError(f"no choice of the candidates keeps {self.asked()}")
        self._validate(pool)
        return self.best(pool, settings.bits), pool, points

    def asked(self) -> str:
        """The limits in words."""
        settings = self.settings
        parts = []
        if settings.bits is not None:
            parts.append(f"at most {settings.bits:g} bits per value")
        if settings.max_kld is not None:
            parts.append(f"a divergence of at most {settings.max_kld:g} nats")
        if settings.max_ratio_of_time is not None:
            parts.append(f"at most {settings.max_ratio_of_time:g} times the time of {REFERENCE}")
        return " and ".join(parts)

    def solve_at(self, budgets: Iterable[float]) -> dict[float, Plan]:
        """The solutions at budgets of bits per value, each but once."""
        solved: dict[float, Plan] = {}
        for budget in sorted(budgets):
            plan = self._solve(budget, f"{TUNED} {budget:.2f}")
            if plan is not None and plan.name not in {other.name for other in solved.values()}:
                solved[budget] = plan
        return solved

    def best(self, pool: Sequence[Plan], bits: float | None) -> Plan:
        """The least divergent on the validation text of all plans within a budget."""
        within = [plan for plan in pool if bits is None or plan.bits <= bits * (1 + 1e-9)]
        return min(within, key=lambda plan: (self.validated[plan.config], plan.bits))

    def _solve(self, budget: float | None, name: str, smooth: bool = False) -> Plan | None:
        """The best choice within a budget of bits per value, or none, and within the limit on the time.

        With ``smooth``, each divergence is drawn halfway (of logarithms) to what its layer and its candidate have on
        the whole: single ones, measured on few predictions, are noisy, and a solution seeks out what came out low.
        """
        measured = self.measured
        costs = measured.smooth_costs() if smooth else measured.costs()
        ratio = self.settings.max_ratio_of_time
        tight_ratio = ratio
        for _ in range(_TRIES):
            limits: list[float] = []
            weights: list[Sequence[Sequence[float]]] = []
            if budget is not None:
                limits.append(budget * measured.numbers)
                weights.append(measured.bits)
            if tight_ratio is not None:
                limits.append(tight_ratio * measured.reference_time)
                weights.append(measured.times())
            found = solve(costs, [list(zip(*parts, strict=True)) for parts in zip(*weights, strict=True)], limits)
            if found is None:
                return None
            plan = self._plan(found, name)
            if ratio is None or tight_ratio is None or plan.time_ratio is None or plan.time_ratio <= ratio:
                return plan
            # Both sides of a layer together take more time than their shares say.
            tight_ratio *= 0.995 * ratio / plan.time_ratio
        return None

    def _plan(self, found: Choice, name: str) -> Plan:
        config = self.measured.config(found.picks)
        bits, ratio = self.measured.ledger.bits_per_value(config), self.measured.time_ratio(config)
        return Plan(name, TUNED, config, bits, self.measured.predict(found.picks), ratio, found.exact)

    def _is_fast_enough(self, plan: Plan) -> bool:
        limit = self.settings.max_ratio_of_time
        return limit is None or plan.time_ratio is None or plan.time_ratio <= limit

    def _validate(self, plans: Sequence[Plan]) -> None:
        rows = self.measured.score([plan.config for plan in plans], self._validation, "validating")
        for plan in plans:
            self.validated[plan.config] = finite(rows[plan.config]["kld_mean"], rows[plan.config])

    def _fewest_bits(self, pool: list[Plan], points: dict[float, Plan]) -> Plan:
        """The smallest plan that keeps the bound on the validation text; adds to ``pool`` what it tries."""
        bound = self.settings.max_kld
        assert bound is not None

        def keep() -> list[Plan]:
            return [plan for plan in pool if self.validated[plan.config] <= bound]

        if not keep():
            closest = min(pool, key=lambda plan: self.validated[plan.config])
            raise ValueError(
                f"no choice of the candidates keeps {self.asked()}; the closest, of {closest.bits:.2f} bits per value, "
                f"has {self.validated[closest.config]:.3g} on the validation text"
            )
        for _ in range(_CUTS):
            enough = min(plan.bits for plan in keep())
            too_few = [b for b, plan in points.items() if b < enough and self.validated[plan.config] > bound]
            low = max(too_few, default=self.measured.budgets(2)[0])
            tried = self.solve_at(low + (enough - low) * part / _PARTS for part in range(1, _PARTS))
            self._validate(list(tried.values()))
            pool += tried.values()
            points |= tried
        return min(keep(), key=lambda plan: (plan.bits, self.validated[plan.config]))


def spread_over(plans: Sequence[Plan], count: int) -> list[Plan]:
    """``count`` of the plans, evenly by their place, the first and the last among them."""
    if len(plans) <= count:
        return list(plans)
    return [plans[round(i * (len(plans) - 1) / max(1, count - 1))] for i in range(count)]
