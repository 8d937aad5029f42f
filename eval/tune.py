"""``qkv tune``: which format each layer's keys and values get, so that a budget of bits costs the least.

1. Measure (``qkv_eval.tune_measure``): the KL divergence of each candidate for each side of each layer, one pass each,
   all else unquantized; the bits it stores; if a limit is on it, its time.
2. Solve (``qkv_eval.tune_solve``): one candidate for each side of each layer, with the least sum of divergences under
   the budget; once by the figures as measured, once by smoothed ones. The sum is a prediction: errors of several layers
   do not quite add up.
3. Validate (``qkv_eval.tune_choose``), on other windows of the text: the solutions at several budgets beside uniform
   set-ups (one candidate for all keys, one for all values), presets among them. What is chosen is the best of all that
   keep the budget, so that it lies on the front of the uniform ones or below it even where the prediction misleads.
4. Verify on held-out windows, which nothing was chosen by: the figures to quote, those of ``qkv eval ppl``.

The three parts of the text are apart: whole windows each, in the order measuring, validation, held-out; of a window for
measuring only the beginning is used. Everything measured goes into a results file as it comes, by keys that hold all
that it depends on: a run after a kill goes on where it was, and another budget measures no layer again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv.named_caches import UNQUANTIZED, named_cache
from qkv_eval.perplexity import check_context
from qkv_eval.results_file import ResultsFile
from qkv_eval.text import load_dataset_text, load_text
from qkv_eval.tune_choose import TUNED, Chooser, Plan, spread_over
from qkv_eval.tune_costs import SIDES, Candidate, Ledger, default_candidates, read_candidates, side_value
from qkv_eval.tune_measure import Measurements, Store
from qkv_eval.tune_settings import TuneSettings, split_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv_eval.peers import Progress

# Budgets at which the predicted front is drawn.
_FRONT_POINTS = 24
# Presets of at most so many bits per value more or less than the choice are verified beside it.
_NEAR = 0.75
# A prediction that is off by more than this is told.
_OFF = 2.0


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
    report: Progress = progress or (lambda what, done, total: None)
    store = Store(results, identity, setup)
    given = read_candidates(settings.candidates) if settings.candidates is not None else None
    asked = dict(_preset(name, model) for name in settings.formats)
    check_context(model, settings.window)
    text = load_dataset_text(settings.dataset) if settings.dataset is not None else load_text(settings.text)
    parts = split_text(tokenizer, text, settings)
    held_out, notes = parts.held_out, list[str]()
    if settings.limit is not None and len(held_out) < settings.limit:
        notes.append(f"the text {text.name!r} leaves {len(held_out)} held-out windows of {settings.window} tokens")

    base = qkv.CacheConfig("none", sink_tokens=settings.sink_tokens)
    ledger = Ledger(model, settings.context or settings.window)
    candidates = _usable(given, ledger, base, notes)
    presets = _presets(asked, model, ledger, settings.bits)
    measured = Measurements(model, settings, parts.measuring, ledger, base, candidates, store, report)
    measured.check_bits()
    if settings.max_ratio_of_time is not None:
        measured.measure_times()
    measured.measure_klds()

    chooser = Chooser(measured, presets, parts.validation)
    uniform = chooser.uniform()
    chosen, pool, points = chooser.choose(uniform)
    chosen = replace(chosen, name=TUNED, kind=TUNED)
    at_budgets = _best_at_budgets(chooser, pool, points)
    plans = _to_verify(chooser, chosen, uniform, at_budgets, asked)
    scored = measured.score([plan.config for plan in plans], held_out, "verifying on held-out text")
    bits = float(torch.finfo(model.dtype).bits)
    verified = [{"format": UNQUANTIZED, "kind": "baseline", **scored[None], "bits_per_value": bits}]
    verified += [_verified(plan, scored[plan.config], chooser) for plan in plans]
    notes += _doubts(verified[-1], verified, settings.max_kld)
    return {
        "config": chosen.config,
        "rows": _cost_rows(measured, chosen),
        "front": _front(chooser, points, at_budgets, scored),
        "verified": verified,
        "choice": verified[-1],
        "asked": chooser.asked(),
        "context": ledger.context,
        "text": {
            "name": text.name,
            "sha256": text.sha256,
            "windows": len(held_out),
            "window": held_out.shape[1],
            "validation_windows": len(parts.validation),
            "measuring_windows": len(parts.measuring),
            "measuring_window": parts.measuring.shape[1],
        },
        "notes": notes,
    }


# ---- what there is to choose from -----------------------------------------------------------------------------------


def _usable(
    given: Mapping[str, Sequence[Candidate]] | None, ledger: Ledger, base: qkv.CacheConfig, notes: list[str]
) -> dict[str, list[Candidate]]:
    """The candidates that go with all layers; one that was asked for has to. What is left out goes into ``notes``."""
    dims = {geometry.value_dim for geometry in ledger.layers.values()}
    usable: dict[str, list[Candidate]] = {}
    for side, candidates in (given or default_candidates(dims)).items():
        usable[side] = []
        for candidate in candidates:
            try:
                for layer in ledger.layers:
                    ledger.side(candidate, layer, base)
            except ValueError as error:
                if given is not None:
                    raise ValueError(f"the candidate {candidate.name} for {side}s cannot be used: {error}") from error
                notes.append(f"the candidate {candidate.name} for {side}s is left out: {error}")
            else:
                usable[side].append(candidate)
        if not usable[side]:
            raise ValueError(f"no candidate for {side}s can be used with this model; give others with --candidates")
    return usable


def _presets(
    asked: Mapping[str, qkv.CacheConfig], model: PreTrainedModel, ledger: Ledger, bits: float | None
) -> list[Plan]:
    """The set-ups asked for by name, and the presets of about ``bits``; all of these where bits were not asked for."""
    found = [Plan(name, "preset", config, ledger.bits_per_value(config), None) for name, config in asked.items()]
    for name, config in (_preset(name, model) for name in qkv.presets()):
        if config in asked.values():
            continue
        try:
            stored = ledger.bits_per_value(config)
        except ValueError:  # it does not go with this model
            continue
        if bits is None or abs(stored - bits) <= _NEAR:
            found.append(Plan(name, "preset", config, stored, None))
    return found


def _preset(name: str, model: PreTrainedModel) -> tuple[str, qkv.CacheConfig]:
    named = named_cache(name)
    cache = named.make(model.config)
    if not isinstance(cache, qkv.QKVCache):
        raise ValueError(
            f"{name!r} is no set-up of ours to verify beside the choice; use formats of ours "
            f"({', '.join(qkv.formats())}) or the path of a YAML file"
        )
    return named.name, cache.config


# ---- what is said about the choice ----------------------------------------------------------------------------------


def _best_at_budgets(chooser: Chooser, pool: Sequence[Plan], points: Mapping[float, Plan]) -> dict[float, Plan]:
    """The best plan that was validated within each budget at which there is a solution."""
    settings = chooser.settings
    found = {budget: replace(chooser.best(pool, budget), name=plan.name, kind=TUNED) for budget, plan in points.items()}
    if settings.max_kld is not None:  # the search tried budgets close to each other
        shown = {id(plan) for plan in spread_over(list(found.values()), settings.points)}
        found = {budget: plan for budget, plan in found.items() if id(plan) in shown}
    return found


def _to_verify(
    chooser: Chooser,
    chosen: Plan,
    uniform: Sequence[Plan],
    at_budgets: Mapping[float, Plan],
    asked: Mapping[str, qkv.CacheConfig],
) -> list[Plan]:
    """What is scored on the held-out text: presets, uniform set-ups, the best by budget, and the choice, the last."""
    known = {plan.config: plan.predicted for plan in uniform}
    presets = [
        replace(plan, predicted=known.get(plan.config), time_ratio=chooser.measured.time_ratio(plan.config))
        for plan in chooser.presets
        if plan.name in asked or abs(plan.bits - chosen.bits) <= _NEAR
    ]
    named = {plan.config for plan in presets}
    beside = [plan for plan in uniform if plan.config in chooser.validated and plan.config not in named]
    others = {plan.config: plan for _, plan in sorted(at_budgets.items(), reverse=True)}  # at the smallest budget
    others.pop(chosen.config, None)
    return [*presets, *beside, *list(others.values())[::-1], chosen]


def _verified(plan: Plan, row: Mapping[str, Any], chooser: Chooser) -> dict[str, Any]:
    return {
        "format": plan.name,
        "kind": plan.kind,
        **row,
        "bits_per_value": plan.bits,
        "kld_predicted": plan.predicted,
        "kld_validation": chooser.validated.get(plan.config),
        "time_ratio": plan.time_ratio,
    }


def _doubts(choice: Mapping[str, Any], verified: Sequence[Mapping[str, Any]], max_kld: float | None) -> list[str]:
    """Says where the held-out text disagrees with what the choice was made by, a line for each point."""
    notes = []
    predicted, found = choice["kld_predicted"], choice["kld_mean"]
    if predicted and found and not 1 / _OFF <= found / predicted <= _OFF:
        notes.append(
            f"the divergence on held-out text is {found / predicted:.2g} times the predicted one ({found:.3g} and "
            f"{predicted:.3g} nats): the costs of single layers do not add up here; trust what was verified"
        )
    if max_kld is not None and found is not None and found > max_kld:
        notes.append(f"the bound of {max_kld:g} nats holds on the validation text; on held-out text it is {found:.3g}")
    better = [
        row
        for row in verified
        if row["kind"] in ("uniform", "preset") and row["bits_per_value"] <= choice["bits_per_value"]
        and found is not None and row["kld_mean"] is not None and row["kld_mean"] < found
    ]  # fmt: skip
    if better:
        row = min(better, key=lambda row: row["kld_mean"])
        notes.append(
            f"{row['format']} stores no more and has the lower divergence on held-out text ({row['kld_mean']:.3g} "
            f"and {found:.3g} nats)" + ("" if row["kld_validation"] is None else "; on the validation text it had not")
        )
    return notes


def _cost_rows(measured: Measurements, chosen: Plan) -> list[dict[str, Any]]:
    rows = []
    for layer, kind in measured.ledger.layers.items():
        own = chosen.config.for_layer(layer)
        numbers = measured.ledger.count(measured.base, layer)[1]
        for side in SIDES:
            values = numbers * kind.width(side) // sum(map(kind.width, SIDES))
            for candidate in measured.candidates[side]:
                row = measured.klds[layer, candidate]
                given = {name: side_value(own, side, name) for name in ("format", "granularity", "group_size")}
                if side == "key":
                    given["equalize"] = own.equalize
                rows.append(
                    {
                        "layer": layer,
                        "side": side,
                        "format": candidate.name,
                        "bits_per_value": measured.ledger.side(candidate, layer, measured.base) / values,
                        "kld": row["kld"],
                        "kld_stderr": row["kld_stderr"],
                        "time_share": None if measured.shares is None else measured.shares[layer, candidate],
                        "chosen": candidate == Candidate(side, **given),
                    }
                )
    return rows


def _front(
    chooser: Chooser,
    points: Mapping[float, Plan],
    at_budgets: Mapping[float, Plan],
    scored: Mapping[Any, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The solutions by budget; where the time is limited as well, only those that were validated."""
    solved = dict(points)
    if chooser.measured.shares is None:
        solved = {**chooser.solve_at(chooser.measured.budgets(_FRONT_POINTS)), **solved}
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
            row |= {"format": best.name, "kld_validation": chooser.validated[best.config], "kld_held_out": held_out}
        rows.append(row)
    return rows
