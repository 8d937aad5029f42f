"""What ``qkv tune`` measures, once for each model and text: what is measured is looked up first, and kept.

:class:`Measurements` knows what each candidate costs in each layer, in bits, divergence and time, and what whole
set-ups do to a text; :class:`Store` keeps what was measured by keys of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache
from qkv_eval.keys import MACHINE, VERSIONS, file_contents, make_key
from qkv_eval.perplexity import by_position, score_caches, summarize
from qkv_eval.tune_costs import (
    REFERENCE,
    SIDES,
    Candidate,
    Geometry,
    Ledger,
    Passes,
    measure_time,
    query_heads_per_kv,
    resolved,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qkv_eval.peers import Progress
    from qkv_eval.results_file import ResultsFile
    from qkv_eval.tune_settings import TuneSettings

# Part of every key: to be raised when the same words come to mean another computation.
KEY_VERSION = 1
# Positions at the start of a window that are not looked at when single layers are measured: formats that take scales or
# rotations from the first tokens keep these exact until then, which would make them look better than they are.
_SKIP = 160
# Divergences below it count as this much where their logarithms are looked at.
_LEAST_KLD = 1e-9


class Store:
    """What was measured, by keys of everything that it depends on; in a file, if there is one."""

    def __init__(self, results: ResultsFile | None, identity: Sequence[Any], setup: Mapping[str, Any] | None) -> None:
        if setup is None:
            from qkv.cli.run import describe_setup

            setup = describe_setup()
        self._file, self._identity, self._setup = results, list(identity), setup
        self._rows: dict[str, Mapping[str, Any]] = {}

    def key(self, kind: str, timed: bool = False, **facts: Any) -> str:
        """Returns the key of a row of a kind by what it depends on besides the model and the set-up."""
        matters = {"key_version": KEY_VERSION, "kind": kind, "model": self._identity, "facts": facts}
        return make_key(matters, self._setup, timed=timed)

    def find(self, key: str) -> Mapping[str, Any] | None:
        """Returns the row of a key, if there is one."""
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


class Measurements:
    """What can be chosen for the layers of a model, and what it costs.

    Args:
        model: a causal language model.
        settings: what is asked for.
        windows: the windows that single layers are measured on, int64 ``[windows, tokens]``.
        ledger: the layers, and the bits they store.
        base: what all set-ups share.
        candidates: by side, what goes with all layers.
        store: where what is measured goes, and where it is looked for first.
        report: called with what is done, how much of it, and how much it is in all.

    Attributes:
        pairs: what is chosen from for each layer: a candidate for its keys and one for its values. Their bits are
            counted together, since tokens that wait for their group stay exact on both sides.
        bits: what a layer stores, by layer and pair.
        numbers: how many values all layers store.
        klds: the row of each layer and candidate, once measured.
        shares: a side's part of its layer's time of attention, by layer and candidate; None: not measured.
        reference_time: seconds of attention with ``int8`` in all layers, if times are measured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TuneSettings,
        windows: torch.Tensor,
        ledger: Ledger,
        base: qkv.CacheConfig,
        candidates: Mapping[str, Sequence[Candidate]],
        store: Store,
        report: Progress,
    ) -> None:
        self.model, self.settings, self.windows, self.ledger = model, settings, windows, ledger
        self.base, self.candidates, self.store, self.report = base, candidates, store, report
        self.pairs = list(itertools.product(candidates["key"], candidates["value"]))
        self.bits: list[list[int]] = []
        for layer in ledger.layers:
            report("counting bits", len(self.bits), len(ledger.layers))
            self.bits.append([ledger.count(self.uniform_config(at), layer)[0] for at in range(len(self.pairs))])
        report("counting bits", len(self.bits), len(self.bits))
        self.numbers = ledger.total(base)[1]
        self.shares: dict[tuple[int, Candidate], float] | None = None
        self.reference_time = 0.0
        self.klds: dict[tuple[int, Candidate], Mapping[str, Any]] = {}

    def uniform_config(self, pick: int) -> qkv.CacheConfig:
        """One pair of candidates for all layers."""
        return self.config([pick] * len(self.ledger.layers))

    def config(self, picks: Iterable[int]) -> qkv.CacheConfig:
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

    def budgets(self, count: int) -> list[float]:
        """Bits per value from the smallest choice to the largest, evenly."""
        least, most = (sum(map(edge, self.bits)) / self.numbers for edge in (min, max))
        return [least + (most - least) * place / (count - 1) for place in range(count)]

    def check_bits(self) -> None:
        """Raises ``ValueError`` if nothing stays within the bits that were asked for."""
        least = sum(min(group) for group in self.bits) / self.numbers
        if self.settings.bits is not None and self.settings.bits < least:
            raise ValueError(
                f"no choice of the candidates stays within {self.settings.bits:g} bits per value; the smallest stores "
                f"{least:.3f} at context {self.ledger.context}"
            )

    def measure_klds(self) -> None:
        """Measures the divergence of each candidate in each layer, everything else unquantized."""
        settings = self.settings
        facts: dict[str, Any] = {
            "windows": _digest(self.windows),
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
                        passes = Passes(self.model, self.windows, _SKIP)
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
                finite(row["kld"], row)
                self.klds[layer, candidate] = row
        finally:
            if passes is not None:
                passes.__exit__()
        self.report(what, len(wanted), len(wanted))

    def measure_times(self) -> None:
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
        least = sum(map(min, self.times())) / self.reference_time
        limit = self.settings.max_ratio_of_time
        assert limit is not None
        if least > limit:
            raise ValueError(
                f"no choice of the candidates takes {limit:g} times the time of {REFERENCE} or less; the fastest takes "
                f"{least:.3f} times at context {self.ledger.context}"
            )

    def times(self) -> list[list[float]]:
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

    def time_ratio(self, config: qkv.CacheConfig) -> float | None:
        """Time of attention in all layers over that with the reference, each pair of candidates measured as it is."""
        if self.shares is None:
            return None
        spent = sum(
            self._reference_seconds(layer) * self._pair_ratio(kind, config.for_layer(layer))
            for layer, kind in self.ledger.layers.items()
        )
        return spent / self.reference_time

    def costs(self) -> list[list[float]]:
        """The divergence by layer and pair."""
        return [[self.kld(layer, pair) for pair in self.pairs] for layer in self.ledger.layers]

    def smooth_costs(self) -> list[list[float]]:
        """The same, each drawn halfway (of logarithms) to what its layer and its candidate have on the whole."""
        smooth: dict[tuple[int, Candidate], float] = {}
        for side in SIDES:
            candidates = self.candidates[side]
            klds = [[max(_LEAST_KLD, self.kld(layer, [c])) for c in candidates] for layer in self.ledger.layers]
            logs = torch.tensor(klds, dtype=torch.float64).log()
            fitted = logs.mean(0, keepdim=True) + logs.mean(1, keepdim=True) - logs.mean()
            for layer, row in zip(self.ledger.layers, ((logs + fitted) / 2).exp().tolist(), strict=True):
                smooth |= {(layer, candidate): value for candidate, value in zip(candidates, row, strict=True)}
        return [[sum(smooth[layer, each] for each in pair) for pair in self.pairs] for layer in self.ledger.layers]

    def predict(self, picks: Iterable[int]) -> float:
        """The divergence of a choice, as the sum of its parts."""
        return sum(self.kld(layer, self.pairs[pick]) for layer, pick in zip(self.ledger.layers, picks, strict=True))

    def kld(self, layer: int, pair: Sequence[Candidate]) -> float:
        """The divergence of candidates of one layer; of what changes nothing it can come out below 0, by rounding."""
        return sum(max(0.0, float(self.klds[layer, candidate]["kld"])) for candidate in pair)

    def score(
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


def _maker(config: qkv.CacheConfig) -> Any:
    return lambda model_config: qkv.QKVCache(model_config, config)


def _digest(windows: torch.Tensor) -> str:
    content = json.dumps([list(windows.shape), windows.flatten().tolist()])
    return hashlib.sha256(content.encode()).hexdigest()


def finite(value: Any, row: Mapping[str, Any]) -> float:
    """Returns a divergence as a number.

    Raises:
        ValueError: it is none, since the model's predictions are not.
    """
    if value is None or not value < float("inf"):
        raise ValueError(
            f"the divergence of {row.get('format', 'a set-up')} is not a finite number: the model's predictions are not"
        )
    return float(value)
