"""``qkv tune``: which format each layer's keys and values get, so that a budget of bits costs the least.

1. Measure (``qkv_eval.tune_costs``): the KL divergence of each candidate for each side of each layer, one pass each,
   all else unquantized; the bits it stores; if a limit is on it, its time.
2. Solve (``qkv_eval.tune_solve``): one candidate for each side of each layer, with the least sum of divergences under
   the budget; once by the figures as measured, once by smoothed ones. The sum is a prediction: errors of several layers
   do not quite add up.
3. Validate, on other windows of the text: the solutions at several budgets beside uniform set-ups (one candidate for
   all keys, one for all values), presets among them. What is chosen is the best of all that keep the budget, so that it
   lies on the front of the uniform ones or below it even where the prediction misleads.
4. Verify on held-out windows, which nothing was chosen by: the figures to quote, those of ``qkv eval ppl``.

The three parts of the text are apart: whole windows each, in the order measuring, validation, held-out; of a window for
measuring only the beginning is used. Everything measured goes into a results file as it comes (see ``qkv_eval.sweep``),
by keys that hold all that it depends on: a run after a kill goes on where it was, and another budget measures no layer
again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, named_cache
from qkv_eval.perplexity import by_position, check_context, score_caches, summarize
from qkv_eval.sweep import MACHINE, VERSIONS, ResultsFile, file_contents
from qkv_eval.text import Text, cut_windows, load_dataset_text, load_text
from qkv_eval.tune_costs import (
    REFERENCE,
    SIDES,
    Candidate,
    Geometry,
    Ledger,
    Passes,
    default_candidates,
    measure_time,
    query_heads_per_kv,
    read_candidates,
    resolved,
    side_value,
)
from qkv_eval.tune_solve import Choice, solve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv_eval.peers import Progress

# Part of every key: to be raised when the same words come to mean another computation.
KEY_VERSION = 1
TUNED = "tuned"
# Positions at the start of a window that are not looked at when single layers are measured: formats that take scales or
# rotations from the first tokens keep these exact until then, which would make them look better than they are.
_SKIP = 160
# Budgets at which the predicted front is drawn.
_FRONT_POINTS = 24
# Uniform set-ups that are validated because they are the best predicted ones within the limits.
_BEST_UNIFORM = 3
# How often a bracket around the bound on the divergence is cut, and into how many parts.
_CUTS, _PARTS = 2, 4
# Presets of at most so many bits per value more or less than the choice are verified beside it.
_NEAR = 0.75
# Divergences below it count as this much where their logarithms are looked at.
_LEAST_KLD = 1e-9
# A prediction that is off by more than this is told.
_OFF = 2.0
# How often a choice that turns out to take too long is solved again with a tighter limit.
_TRIES = 5


@dataclass(frozen=True)
class TuneSettings:
    """What is asked for, and what it is measured on. One at least of ``bits``, ``max_kld``, ``max_ratio_of_time``.

    Attributes:
        bits: bits per value at most, counted at ``context``.
        max_kld: mean KL divergence in nats at most, on the validation text; the fewest bits are looked for.
        max_ratio_of_time: time of attention at most, as a part of that with ``int8`` in all layers.
        text, dataset: as in ``qkv_eval.ppl.PplSettings``.
        candidates: a YAML file, see ``qkv_eval.tune_costs.read_candidates``; None: the default ones.
        formats: set-ups of ours by name to verify beside the choice; the presets of about its bits come along.
        sink_tokens: the first tokens that stay exact, with every candidate.
        context: tokens in the cache when bits are counted and attention is timed; None: ``window``.
        window: tokens in a window for validation and verification.
        limit: held-out windows; None: what is left of the text.
        validate: windows for validation.
        measure_window, measure_windows: tokens in a window for measuring single layers, 256 or more, and such windows.
        points: budgets beside the one asked for at which the front is validated and verified.
        rounds: timed turns of each candidate.
    """

    bits: float | None = None
    max_kld: float | None = None
    max_ratio_of_time: float | None = None
    text: str | None = None
    dataset: str | None = None
    candidates: str | None = None
    formats: tuple[str, ...] = ("int8",)
    sink_tokens: int = 4
    context: int | None = None
    window: int = 2048
    limit: int | None = 4
    validate: int = 2
    measure_window: int = 512
    measure_windows: int = 2
    points: int = 6
    rounds: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"bits": self.bits, "max_kld": self.max_kld, "max_ratio_of_time": self.max_ratio_of_time}
        if all(value is None for value in limits.values()):
            raise ValueError("there is nothing to tune for; give --bits, --max-kld or --max-ratio-of-time")
        if self.bits is not None and self.max_kld is not None:
            raise ValueError("give --bits (least divergence) or --max-kld (fewest bits), not both")
        for name, value in limits.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be a number above 0")
        if self.text is not None and self.dataset is not None:
            raise ValueError("give a text file or a data set, not both")
        for name, least in (("validate", 1), ("measure_windows", 1), ("measure_window", 256), ("points", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use {least} or more")
        if self.measure_window > self.window:
            raise ValueError(
                f"measure_window={self.measure_window} is longer than a window; use {self.window} tokens or fewer"
            )
        if self.context is not None and self.context < 1:
            raise ValueError(f"context={self.context} is no number of tokens; use 1 or more")


@dataclass(frozen=True)
class Parts:
    """The windows of a text by what they are for, int64 ``[windows, tokens]``; no token is in two of them."""

    measuring: torch.Tensor
    validation: torch.Tensor
    held_out: torch.Tensor


def split_text(tokenizer: PreTrainedTokenizerBase, text: Text, settings: TuneSettings) -> Parts:
    """Cuts a text into windows for measuring, for validation and held-out ones, in this order.

    Raises:
        ValueError: the text is too short to leave one held-out window.
    """
    first, second = settings.measure_windows, settings.measure_windows + settings.validate
    most = None if settings.limit is None else second + settings.limit
    windows = cut_windows(tokenizer, text, settings.window, most)
    if len(windows) <= second:
        raise ValueError(
            f"the text {text.name!r} gives {len(windows)} windows of {settings.window} tokens; {first} for measuring, "
            f"{settings.validate} for validation and 1 held-out take {second + 1}; use a longer text, or a shorter "
            "window"
        )
    return Parts(windows[:first, : settings.measure_window], windows[first:second], windows[second:])


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


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: TuneSettings,
    progress: Progress | None = None,
    results: ResultsFile | None = None,
    identity: Sequence[Any] = (),
    setup: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Tunes a model's cache; the module says how. Leaves the model plain.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        settings: what is asked for.
        progress: called with what is done, how much of it, and how much it is in all.
        results: where what is measured goes, and where it is looked for first; None: nowhere.
        identity: what tells the model from others in ``results``.
        setup: versions and machine, as ``qkv.cli.run.describe_setup`` gives them; None: found by it.

    Returns:
        ``config``, the ``qkv.CacheConfig`` of the choice, and

        - ``rows``: for each layer, side (``key``, ``value``) and candidate ``layer, side, format`` (the candidate's
          name), ``bits_per_value`` (of this side), ``kld, kld_stderr`` (nats, this side of this layer alone stored so),
          ``time_share`` (of attention's time with ``int8``, this side's part; null if not measured) and ``chosen``;
        - ``front``: for each budget ``budget, bits_per_value, kld_predicted, time_ratio, exact`` of the solution, and
          where it was validated and verified ``format, kld_validation, kld_held_out`` of the choice at this budget;
        - ``verified``: rows as of ``qkv eval ppl`` on the held-out text, with ``kind`` (``baseline``, ``tuned``,
          ``uniform``, ``preset``), ``kld_predicted``, ``kld_validation`` and ``time_ratio`` besides; the choice is
          called ``tuned``. ``bits_per_value`` is counted at the context;
        - ``choice``: the choice's own row of these;
        - ``text``: name, SHA-256, ``windows`` and ``window`` of the held-out part, and of the others; ``context``; and
          ``notes``, lines that a reader of the figures should know.

    Raises:
        ValueError: settings that do not go together or with the model, a text that is too short, or limits that no
            choice keeps.
    """
    return _Tuner(model, tokenizer, settings, progress, results, identity, setup).run()


class _Tuner:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TuneSettings,
        progress: Progress | None,
        results: ResultsFile | None,
        identity: Sequence[Any],
        setup: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.settings, self.notes = model, settings, list[str]()
        self.report: Progress = progress or (lambda what, done, total: None)
        self.store = _Store(results, identity, setup)
        given = read_candidates(settings.candidates) if settings.candidates is not None else None
        asked = dict(_preset(name, model) for name in settings.formats)
        check_context(model, settings.window)
        self.text = load_dataset_text(settings.dataset) if settings.dataset is not None else load_text(settings.text)
        self.parts = split_text(tokenizer, self.text, settings)
        held_out = len(self.parts.held_out)
        if settings.limit is not None and held_out < settings.limit:
            self.notes.append(
                f"the text {self.text.name!r} leaves {held_out} held-out windows of {settings.window} tokens"
            )
        self.base = qkv.CacheConfig("none", sink_tokens=settings.sink_tokens)
        self.ledger = Ledger(model, settings.context or settings.window)
        self.candidates = self._usable(given)
        self.presets = [
            Plan(name, "preset", config, self.ledger.bits_per_value(config), None) for name, config in asked.items()
        ]
        self._given = set(asked)
        self.presets += self._other_presets()
        # What is chosen from for each layer: a candidate for its keys and one for its values. Their bits are counted
        # together, since tokens that wait for their group stay exact on both sides.
        self.pairs = list(itertools.product(self.candidates["key"], self.candidates["value"]))
        self.bits: list[list[int]] = []
        for layer in self.ledger.layers:
            self.report("counting bits", len(self.bits), len(self.ledger.layers))
            self.bits.append([self.ledger.count(self._uniform_config(at), layer)[0] for at in range(len(self.pairs))])
        self.report("counting bits", len(self.bits), len(self.bits))
        self.numbers = self.ledger.total(self.base)[1]
        self.shares: dict[tuple[int, Candidate], float] | None = None
        self.reference_time = 0.0
        self.klds: dict[tuple[int, Candidate], Mapping[str, Any]] = {}
        self.validated: dict[qkv.CacheConfig, float] = {}

    def run(self) -> dict[str, Any]:
        self._check_bits()
        if self.settings.max_ratio_of_time is not None:
            self._measure_times()
        self._measure_klds()
        uniform = self._uniform()
        chosen, pool, points = self._choose(uniform)
        return self._verify(chosen, pool, points, uniform)

    # ---- what there is to choose from

    def _usable(self, given: Mapping[str, Sequence[Candidate]] | None) -> dict[str, list[Candidate]]:
        """The candidates that go with all layers; one that was asked for has to."""
        dims = {geometry.value_dim for geometry in self.ledger.layers.values()}
        usable: dict[str, list[Candidate]] = {}
        for side, candidates in (given or default_candidates(dims)).items():
            usable[side] = []
            for candidate in candidates:
                try:
                    for layer in self.ledger.layers:
                        self.ledger.side(candidate, layer, self.base)
                except ValueError as error:
                    if given is not None:
                        raise ValueError(
                            f"the candidate {candidate.name} for {side}s cannot be used: {error}"
                        ) from error
                    self.notes.append(f"the candidate {candidate.name} for {side}s is left out: {error}")
                else:
                    usable[side].append(candidate)
            if not usable[side]:
                raise ValueError(f"no candidate for {side}s can be used with this model; give others with --candidates")
        return usable

    def _other_presets(self) -> list[Plan]:
        """The presets of about the bits that were asked for; all of them where bits were not asked for."""
        found = []
        for name, config in (_preset(name, self.model) for name in qkv.presets()):
            if any(config == plan.config for plan in self.presets):
                continue
            try:
                bits = self.ledger.bits_per_value(config)
            except ValueError:  # it does not go with this model
                continue
            if self.settings.bits is None or abs(bits - self.settings.bits) <= _NEAR:
                found.append(Plan(name, "preset", config, bits, None))
        return found

    def _uniform_config(self, pick: int) -> qkv.CacheConfig:
        """One pair of candidates for all layers."""
        return self._config([pick] * len(self.ledger.layers))

    def _config(self, picks: Iterable[int]) -> qkv.CacheConfig:
        """The set-up of a choice of pairs: what most layers have for all, and what differs for single layers."""
        chosen = {
            (layer, candidate.side): candidate
            for layer, pick in zip(self.ledger.layers, picks, strict=True)
            for candidate in self.pairs[pick]
        }
        common = {
            side: Counter(candidate for candidate in chosen.values() if candidate.side == side).most_common(1)[0][0]
            for side in SIDES
        }
        base = replace(
            self.base,
            format=common["key"].format,
            **common["key"].changes() | {"key_format": None},
            **common["value"].changes(),
        )
        if base.value_format == base.format:
            base = replace(base, value_format=None)
        layers: dict[int, dict[str, Any]] = {}
        for (layer, side), candidate in chosen.items():
            usual = common[side].changes()
            different = {name: value for name, value in candidate.changes().items() if value != usual[name]}
            if different:
                layers.setdefault(layer, {}).update(different)
        return replace(base, layers=layers)

    # ---- measuring

    def _check_bits(self) -> None:
        least = sum(min(group) for group in self.bits) / self.numbers
        if self.settings.bits is not None and self.settings.bits < least:
            raise ValueError(
                f"no choice of the candidates stays within {self.settings.bits:g} bits per value; the smallest stores "
                f"{least:.3f} at context {self.ledger.context}"
            )

    def _measure_klds(self) -> None:
        settings = self.settings
        facts: dict[str, Any] = {
            "windows": _digest(self.parts.measuring),
            "skip": _SKIP,
            "sink_tokens": settings.sink_tokens,
        }
        wanted = [
            (layer, candidate) for layer in self.ledger.layers for side in SIDES for candidate in self.candidates[side]
        ]
        passes: Passes | None = None
        what = "measuring single layers"
        try:
            for done, (layer, candidate) in enumerate(wanted):
                self.report(what, done, len(wanted))
                key = self.store.key("kld", **facts, layer=layer, changes=candidate.changes())
                row = self.store.find(key)
                if row is None:
                    begin = time.perf_counter()
                    if passes is None:
                        passes = Passes(self.model, self.parts.measuring, _SKIP)
                        passes.__enter__()
                    config = replace(self.base, layers={layer: candidate.changes()})
                    divergence = passes.divergence(config, layer).double()
                    row = {
                        "layer": layer,
                        "side": candidate.side,
                        "format": candidate.name,
                        "kld": divergence.mean().item(),
                        "kld_stderr": divergence.std().item() / divergence.numel() ** 0.5,
                    }
                    about = {"window": settings.measure_window, "windows": settings.measure_windows}
                    row = self.store.keep(key, "tune", about, row, time.perf_counter() - begin)
                _finite(row["kld"], row)
                self.klds[layer, candidate] = row
        finally:
            if passes is not None:
                passes.__exit__()
        self.report(what, len(wanted), len(wanted))

    def _measure_times(self) -> None:
        """The time of each side of each layer with each candidate, in parts of a layer's time with the reference."""
        kinds = dict.fromkeys(self.ledger.layers.values())
        wanted = [(kind, side, candidate) for kind in kinds for side in SIDES for candidate in self.candidates[side]]
        other = {side: Candidate(side, REFERENCE) for side in SIDES}
        shares: dict[tuple[Geometry, Candidate], float] = {}
        what = "timing attention"
        for done, (kind, side, candidate) in enumerate(wanted):
            self.report(what, done, len(wanted))
            config = replace(self.base, **(other | {side: candidate})["key"].changes())
            config = replace(config, **(other | {side: candidate})["value"].changes())
            # What both sides share, and the other side's half, are taken to be as in the reference.
            shares[kind, candidate] = max(0.01, self._pair_ratio(kind, config) - 0.5)
        self.report(what, len(wanted), len(wanted))
        self.reference_time = sum(self._reference_seconds(layer) for layer in self.ledger.layers)
        self.shares = {
            (layer, candidate): shares[kind, candidate]
            for layer, kind in self.ledger.layers.items()
            for side in SIDES
            for candidate in self.candidates[side]
        }
        least = sum(map(min, self._times())) / self.reference_time
        limit = self.settings.max_ratio_of_time
        assert limit is not None
        if least > limit:
            raise ValueError(
                f"no choice of the candidates takes {limit:g} times the time of {REFERENCE} or less; the fastest takes "
                f"{least:.3f} times at context {self.ledger.context}"
            )

    def _times(self) -> list[list[float]]:
        """Seconds of attention by layer and pair, as the sum of both sides' shares."""
        assert self.shares is not None
        return [
            [self._reference_seconds(layer) * sum(self.shares[layer, each] for each in pair) for pair in self.pairs]
            for layer in self.ledger.layers
        ]

    def _timing(self, kind: Geometry, config: qkv.CacheConfig) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"geometry": repr(kind), "context": self.ledger.context, "rounds": self.settings.rounds}
        key = self.store.key("time", timed=True, **facts, config=config.to_dict())
        row = self.store.find(key)
        if row is None:
            begin = time.perf_counter()
            queries = query_heads_per_kv(self.model, kind)
            ours, reference, spread = measure_time(
                kind, queries, self.ledger.context, config, self.settings.rounds, self.settings.seed
            )
            row = {"seconds": ours, "reference_seconds": reference, "ratio": ours / reference, "spread": spread}
            self.store.keep(key, "time of attention", facts, row, time.perf_counter() - begin)
        return row

    def _pair_ratio(self, kind: Geometry, config: qkv.CacheConfig) -> float:
        return float(self._timing(kind, resolved(config, 0))["ratio"])

    def _reference_seconds(self, layer: int) -> float:
        reference = resolved(replace(self.base, format=REFERENCE), layer)
        return float(self._timing(self.ledger.layers[layer], reference)["reference_seconds"])

    def _time_ratio(self, config: qkv.CacheConfig) -> float | None:
        """Time of attention in all layers over that with the reference, each pair of candidates measured as it is."""
        if self.shares is None:
            return None
        spent = sum(
            self._reference_seconds(layer) * self._pair_ratio(kind, config.for_layer(layer))
            for layer, kind in self.ledger.layers.items()
        )
        return spent / self.reference_time

    # ---- choosing

    def _solve(self, budget: float | None, name: str, smooth: bool = False) -> Plan | None:
        """The best choice within a budget of bits per value, or none, and within the limit on the time.

        With ``smooth``, each divergence is drawn halfway (of logarithms) to what its layer and its candidate have on
        the whole: single ones, measured on few predictions, are noisy, and a solution seeks out what came out low.
        """
        costs = self._smooth_costs() if smooth else self._costs()
        ratio = self.settings.max_ratio_of_time
        tight_ratio = ratio
        for _ in range(_TRIES):
            limits: list[float] = []
            weights: list[Sequence[Sequence[float]]] = []
            if budget is not None:
                limits.append(budget * self.numbers)
                weights.append(self.bits)
            if tight_ratio is not None:
                limits.append(tight_ratio * self.reference_time)
                weights.append(self._times())
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
        config = self._config(found.picks)
        bits, ratio = self.ledger.bits_per_value(config), self._time_ratio(config)
        return Plan(name, TUNED, config, bits, self._predict(found.picks), ratio, found.exact)

    def _costs(self) -> list[list[float]]:
        """The divergence by layer and pair."""
        return [[self._kld(layer, pair) for pair in self.pairs] for layer in self.ledger.layers]

    def _smooth_costs(self) -> list[list[float]]:
        smooth: dict[tuple[int, Candidate], float] = {}
        for side in SIDES:
            candidates = self.candidates[side]
            klds = [[max(_LEAST_KLD, self._kld(layer, [c])) for c in candidates] for layer in self.ledger.layers]
            logs = torch.tensor(klds, dtype=torch.float64).log()
            fitted = logs.mean(0, keepdim=True) + logs.mean(1, keepdim=True) - logs.mean()
            for layer, row in zip(self.ledger.layers, ((logs + fitted) / 2).exp().tolist(), strict=True):
                smooth |= {(layer, candidate): value for candidate, value in zip(candidates, row, strict=True)}
        return [[sum(smooth[layer, each] for each in pair) for pair in self.pairs] for layer in self.ledger.layers]

    def _predict(self, picks: Iterable[int]) -> float:
        return sum(self._kld(layer, self.pairs[pick]) for layer, pick in zip(self.ledger.layers, picks, strict=True))

    def _kld(self, layer: int, pair: Sequence[Candidate]) -> float:
        # Of what changes nothing it can come out below 0, by rounding.
        return sum(max(0.0, float(self.klds[layer, candidate]["kld"])) for candidate in pair)

    def _uniform(self) -> list[Plan]:
        """One candidate for all keys and one for all values: those that no other beats in bits and prediction."""
        plans = []
        for pick, (key, value) in enumerate(self.pairs):
            predicted, config = self._predict([pick] * len(self.ledger.layers)), self._uniform_config(pick)
            name = key.name if key.name == value.name else f"{key.name} + {value.name}"
            if any(name == preset.name and config != preset.config for preset in self.presets):
                name = f"{name}, uniform"
            plans.append(Plan(name, "uniform", config, self.ledger.bits_per_value(config), predicted))
        best: list[Plan] = []
        for plan in sorted(plans, key=lambda plan: (plan.bits, plan.predicted)):
            if not best or (plan.predicted or 0.0) < (best[-1].predicted or 0.0):
                plan = replace(plan, time_ratio=self._time_ratio(plan.config))
                if self._is_fast_enough(plan):
                    best.append(plan)
        return best

    def _is_fast_enough(self, plan: Plan) -> bool:
        limit = self.settings.max_ratio_of_time
        return limit is None or plan.time_ratio is None or plan.time_ratio <= limit

    def _choose(self, uniform: Sequence[Plan]) -> tuple[Plan, list[Plan], dict[float, Plan]]:
        """The choice, everything that was validated, and the solutions at the budgets of the front."""
        settings = self.settings
        thin = _spread_over(uniform, settings.points)
        budgets = {plan.bits for plan in thin}
        if settings.max_kld is not None:
            budgets |= set(self._budgets(6))
        points = self._solve_at(budgets)
        # Presets that are uniform set-ups of the candidates; others are only verified beside the choice.
        pairs = {self._uniform_config(pick) for pick in range(len(self.pairs))}
        presets = [plan for plan in self.presets if plan.config in pairs]
        presets = [replace(plan, time_ratio=self._time_ratio(plan.config)) for plan in presets]
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
        return self._best(pool, settings.bits), pool, points

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

    def _budgets(self, count: int) -> list[float]:
        """Bits per value from the smallest choice to the largest, evenly."""
        least, most = (sum(map(edge, self.bits)) / self.numbers for edge in (min, max))
        return [least + (most - least) * place / (count - 1) for place in range(count)]

    def _solve_at(self, budgets: Iterable[float]) -> dict[float, Plan]:
        solved: dict[float, Plan] = {}
        for budget in sorted(budgets):
            plan = self._solve(budget, f"{TUNED} {budget:.2f}")
            if plan is not None and plan.name not in {other.name for other in solved.values()}:
                solved[budget] = plan
        return solved

    def _validate(self, plans: Sequence[Plan]) -> None:
        rows = self._score([plan.config for plan in plans], self.parts.validation, "validating")
        for plan in plans:
            self.validated[plan.config] = _finite(rows[plan.config]["kld_mean"], rows[plan.config])

    def _best(self, pool: Sequence[Plan], bits: float | None) -> Plan:
        """The least divergent on the validation text of all plans within a budget."""
        within = [plan for plan in pool if bits is None or plan.bits <= bits * (1 + 1e-9)]
        return min(within, key=lambda plan: (self.validated[plan.config], plan.bits))

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
            low = max(too_few, default=self._budgets(2)[0])
            tried = self._solve_at(low + (enough - low) * part / _PARTS for part in range(1, _PARTS))
            self._validate(list(tried.values()))
            pool += tried.values()
            points |= tried
        return min(keep(), key=lambda plan: (plan.bits, self.validated[plan.config]))

    # ---- scoring

    def _score(
        self, configs: Iterable[qkv.CacheConfig], windows: torch.Tensor, what: str
    ) -> dict[qkv.CacheConfig | None, dict[str, Any]]:
        """Figures as of ``qkv eval ppl``, without the names, by set-up; None: those of the unquantized cache."""
        facts: dict[str, Any] = {"windows": _digest(windows)}
        about = {"window": windows.shape[1], "windows": len(windows)}
        keys: dict[qkv.CacheConfig | None, str] = {None: self.store.key("score", **facts, config=None)}
        for config in configs:
            scales = file_contents(config.scales) if config.scales is not None else None
            keys[config] = self.store.key("score", **facts, config=config.to_dict(), scales=scales)
        rows = {config: self.store.find(key) for config, key in keys.items()}
        missing = [config for config in keys if config is not None and (rows[config] is None or rows[None] is None)]
        if missing:
            names = {str(number): config for number, config in enumerate(missing)}
            caches = [NamedCache(name, _maker(config), is_ours=True) for name, config in names.items()]
            begin = time.perf_counter()
            scores = score_caches(
                self.model, windows, caches, progress=lambda _, done, total: self.report(what, done, total)
            )
            seconds = (time.perf_counter() - begin) / len(scores)
            baseline = scores[UNQUANTIZED]
            for name, found in scores.items():
                scored = names.get(name)
                if rows[scored] is not None:
                    continue  # the unquantized cache comes along every time
                row = {**summarize(found, baseline), "by_position": by_position(found, baseline)}
                rows[scored] = self.store.keep(keys[scored], what, about, row, seconds)
        return {config: dict(row) for config, row in rows.items() if row is not None}

    def _verify(
        self, chosen: Plan, pool: Sequence[Plan], points: Mapping[float, Plan], uniform: Sequence[Plan]
    ) -> dict[str, Any]:
        settings = self.settings
        chosen = replace(chosen, name=TUNED, kind=TUNED)
        known = {plan.config: plan.predicted for plan in uniform}
        presets = [
            replace(plan, predicted=known.get(plan.config), time_ratio=self._time_ratio(plan.config))
            for plan in self.presets
            if plan.name in self._given or abs(plan.bits - chosen.bits) <= _NEAR
        ]
        named = {plan.config for plan in presets}
        beside = [plan for plan in uniform if plan.config in self.validated and plan.config not in named]
        at_budgets = {
            budget: replace(self._best(pool, budget), name=plan.name, kind=TUNED) for budget, plan in points.items()
        }
        if settings.max_kld is not None:  # the search tried budgets close to each other
            shown = {id(plan) for plan in _spread_over(list(at_budgets.values()), settings.points)}
            at_budgets = {budget: plan for budget, plan in at_budgets.items() if id(plan) in shown}
        others = {plan.config: plan for _, plan in sorted(at_budgets.items(), reverse=True)}  # at the smallest budget
        others.pop(chosen.config, None)
        plans = [*presets, *beside, *list(others.values())[::-1], chosen]
        scored = self._score([plan.config for plan in plans], self.parts.held_out, "verifying on held-out text")
        bits = float(torch.finfo(self.model.dtype).bits)
        verified = [{"format": UNQUANTIZED, "kind": "baseline", **scored[None], "bits_per_value": bits}]
        verified += [self._verified(plan, scored[plan.config]) for plan in plans]
        choice = verified[-1]
        self._judge(choice, verified)
        held_out = self.parts.held_out
        return {
            "config": chosen.config,
            "rows": self._cost_rows(chosen),
            "front": self._front(points, at_budgets, scored),
            "verified": verified,
            "choice": choice,
            "asked": self.asked(),
            "context": self.ledger.context,
            "text": {
                "name": self.text.name,
                "sha256": self.text.sha256,
                "windows": len(held_out),
                "window": held_out.shape[1],
                "validation_windows": len(self.parts.validation),
                "measuring_windows": len(self.parts.measuring),
                "measuring_window": self.parts.measuring.shape[1],
            },
            "notes": self.notes,
        }

    def _verified(self, plan: Plan, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": plan.name,
            "kind": plan.kind,
            **row,
            "bits_per_value": plan.bits,
            "kld_predicted": plan.predicted,
            "kld_validation": self.validated.get(plan.config),
            "time_ratio": plan.time_ratio,
        }

    def _judge(self, choice: Mapping[str, Any], verified: Sequence[Mapping[str, Any]]) -> None:
        """Notes where the held-out text disagrees with what the choice was made by."""
        predicted, found = choice["kld_predicted"], choice["kld_mean"]
        if predicted and found and not 1 / _OFF <= found / predicted <= _OFF:
            self.notes.append(
                f"the divergence on held-out text is {found / predicted:.2g} times the predicted one ({found:.3g} and "
                f"{predicted:.3g} nats): the costs of single layers do not add up here; trust what was verified"
            )
        bound = self.settings.max_kld
        if bound is not None and found is not None and found > bound:
            self.notes.append(
                f"the bound of {bound:g} nats holds on the validation text; on held-out text it is {found:.3g}"
            )
        better = [
            row
            for row in verified
            if row["kind"] in ("uniform", "preset") and row["bits_per_value"] <= choice["bits_per_value"]
            and found is not None and row["kld_mean"] is not None and row["kld_mean"] < found
        ]  # fmt: skip
        if better:
            row = min(better, key=lambda row: row["kld_mean"])
            self.notes.append(
                f"{row['format']} stores no more and has the lower divergence on held-out text ({row['kld_mean']:.3g} "
                f"and {found:.3g} nats)"
                + ("" if row["kld_validation"] is None else "; on the validation text it had not")
            )

    def _cost_rows(self, chosen: Plan) -> list[dict[str, Any]]:
        rows = []
        for layer, kind in self.ledger.layers.items():
            own = chosen.config.for_layer(layer)
            numbers = self.ledger.count(self.base, layer)[1]
            for side in SIDES:
                values = numbers * kind.width(side) // sum(map(kind.width, SIDES))
                for candidate in self.candidates[side]:
                    row = self.klds[layer, candidate]
                    given = {name: side_value(own, side, name) for name in ("format", "granularity", "group_size")}
                    if side == "key":
                        given["equalize"] = own.equalize
                    rows.append(
                        {
                            "layer": layer,
                            "side": side,
                            "format": candidate.name,
                            "bits_per_value": self.ledger.side(candidate, layer, self.base) / values,
                            "kld": row["kld"],
                            "kld_stderr": row["kld_stderr"],
                            "time_share": None if self.shares is None else self.shares[layer, candidate],
                            "chosen": candidate == Candidate(side, **given),
                        }
                    )
        return rows

    def _front(
        self, points: Mapping[float, Plan], at_budgets: Mapping[float, Plan], scored: Mapping[Any, Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The solutions by budget; where the time is limited as well, only those that were validated."""
        solved = dict(points)
        if self.shares is None:
            solved = {**self._solve_at(self._budgets(_FRONT_POINTS)), **solved}
        rows = []
        for budget, plan in sorted(solved.items()):
            row: dict[str, Any] = {
                "budget": budget,
                "bits_per_value": plan.bits,
                "kld_predicted": plan.predicted,
                "time_ratio": plan.time_ratio,
                "exact": plan.exact,
            }
            if budget in at_budgets:
                best = at_budgets[budget]
                held_out = scored[best.config]["kld_mean"]
                row |= {"format": best.name, "kld_validation": self.validated[best.config], "kld_held_out": held_out}
            rows.append(row)
        return rows


class _Store:
    """What was measured, by keys of everything that it depends on; in a file, if there is one."""

    def __init__(self, results: ResultsFile | None, identity: Sequence[Any], setup: Mapping[str, Any] | None) -> None:
        if setup is None:
            from qkv.cli.run import describe_setup

            setup = describe_setup()
        self._file, self._identity, self._setup = results, list(identity), setup
        self._rows: dict[str, Mapping[str, Any]] = {}

    def key(self, kind: str, timed: bool = False, **facts: Any) -> str:
        names = VERSIONS + (MACHINE if timed else ())
        matters = {
            "key_version": KEY_VERSION,
            "kind": kind,
            "model": self._identity,
            "facts": facts,
            "setup": {name: self._setup.get(name) for name in names},
        }
        return hashlib.sha256(json.dumps(matters, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def find(self, key: str) -> Mapping[str, Any] | None:
        if self._file is not None and key in self._file.rows:
            found: Mapping[str, Any] = self._file.rows[key]["rows"][0]
            return found
        return self._rows.get(key)

    def keep(
        self, key: str, command: str, settings: Mapping[str, Any], row: Mapping[str, Any], seconds: float
    ) -> Mapping[str, Any]:
        """Keeps a row, on the disk before this returns, and gives it back as it will be found."""
        self._rows[key] = row
        if self._file is None:
            return row
        line = {
            "key": key,
            "model": self._setup.get("model"),
            "dtype": self._setup.get("dtype"),
            "cache": row.get("format", ""),
            "evaluation": command,
            "command": command,
            "settings": dict(settings),
            "seconds": seconds,
            "rows": [row],
            "meta": {name: self._setup.get(name) for name in VERSIONS + MACHINE} | {"command": command},
        }
        self._file.append(line)
        return self._file.rows[key]["rows"][0]


def _preset(name: str, model: PreTrainedModel) -> tuple[str, qkv.CacheConfig]:
    named = named_cache(name)
    cache = named.make(model.config)
    if not isinstance(cache, qkv.QKVCache):
        raise ValueError(
            f"{name!r} is no set-up of ours to verify beside the choice; use formats of ours "
            f"({', '.join(qkv.formats())}) or the path of a YAML file"
        )
    return named.name, cache.config


def _maker(config: qkv.CacheConfig) -> Any:
    return lambda model_config: qkv.QKVCache(model_config, config)


def _spread_over(plans: Sequence[Plan], count: int) -> list[Plan]:
    """``count`` of the plans, evenly by their place, the first and the last among them."""
    if len(plans) <= count:
        return list(plans)
    return [plans[round(i * (len(plans) - 1) / max(1, count - 1))] for i in range(count)]


def _digest(windows: torch.Tensor) -> str:
    content = json.dumps([list(windows.shape), windows.flatten().tolist()])
    return hashlib.sha256(content.encode()).hexdigest()


def _finite(value: Any, row: Mapping[str, Any]) -> float:
    if value is None or not value < float("inf"):
        raise ValueError(
            f"the divergence of {row.get('format', 'a set-up')} is not a finite number: the model's predictions are not"
        )
    return float(value)
