"""``qkv eval layers``: where the error of a format comes from, layer by layer and head by head.

Two measures, on windows of a text:

- What storing does to the numbers of a layer. The model runs over a window unquantized; at each layer the keys and
  values that it caches are stored in each format too, and the same queries attend to both. Nothing of that goes on to
  later layers, so the errors of a layer are its own.
- What storing does to the predictions: the divergence when one layer alone is stored in the format, and all others as
  they are (``kld_alone``). It is scored as in ``qkv_eval.perplexity``.

All errors are relative, a root mean square over a root mean square, so that 0.01 is one per cent:
sqrt(sum |stored - exact|^2 / sum |exact|^2) over all windows, tokens and channels.

- ``key_error, value_error``: of the keys (after rotary embedding, as they are cached) and of the values.
- ``score_error``: of the logits that queries give to the keys that they see, after each query's mean over these keys is
  taken away: softmax does not see what all have in common. Before softcap, position bias and mask.
- ``output_error``: of the output of attention, before its projection, with both keys and values stored.

A residual window is seen as it stands at the end of a text window: its tokens are exact, all others are not, whichever
query asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument, named_cache
from qkv_eval.held import kv_bytes
from qkv_eval.peers import Progress
from qkv_eval.perplexity import Scores, check_context, score_caches, summarize
from qkv_eval.text import cut_windows, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

# Queries whose scores are worked on at a time.
_QUERIES = 256
# Tokens in one pass through a model.
_PASS_TOKENS = 2048
# Caches that are scored together may hold so many bytes.
_MOST_BYTES = 1 << 30
# What makes a layer exact, whatever the set-up says of the others.
_EXACT: dict[str, Any] = {
    "format": "none",
    "key_format": None,
    "value_format": None,
    "granularity": None,
    "group_size": None,
    "residual_length": 0,
    "sink_tokens": 0,
}


@dataclass(frozen=True)
class LayersSettings:
    """Which formats to look at, and on which text.

    Attributes:
        formats: formats of ours, or YAML files.
        text: a text file, or None for the embedded text.
        window, limit: tokens in a window, and windows.
    """

    formats: tuple[str, ...] = ("int8", "fp8_e4m3")
    text: str | None = None
    window: int = 512
    limit: int = 1
    seed: int = 0


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: LayersSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Says where each format's error comes from; the module says what is measured. Leaves the model plain.

    Layers that are not stored by qkv (linear attention) have no rows. Where attention does not use what is cached, or
    is the model's own, the errors of scores and output are null; so is the score error where a layer's attention had
    nothing but itself to see. A note says which layers that is about.

    Returns:
        ``rows``, for each format and layer one row for the layer (``head`` null), then one for each kv head, with the
        keys

        - ``format, layer, head``;
        - ``key_error, value_error, score_error, output_error``: relative errors; those of scores and output are over
          all query heads of the kv head, and those of the row of a layer over all its heads;
        - ``score_error_by_query_head, output_error_by_query_head``: lists over the query heads that share this kv head;
          null in the row of a layer;
        - ``kld_alone``: KL(unquantized || this layer alone stored so) in nats, mean over all predictions; null in the
          rows of heads.

        ``totals``, for each format ``format, kld`` (all layers stored so), ``kld_alone_sum``, ``ppl``,
        ``dppl_percent`` and ``scoring``; ``text`` (name, SHA-256, windows); and ``notes``, lines that a reader of the
        figures should know.

    Raises:
        ValueError: a cache that is unknown or not one of ours, a text that is too short, a window beyond the model's
            limit, or a model of which qkv stores no layer.
    """
    setups = [_setup(model, name) for name in dict.fromkeys(settings.formats)]
    if not setups:
        raise ValueError("formats is empty; give one or several")
    for setup in setups:
        if [other.name for other in setups].count(setup.name) > 1:
            raise ValueError(f"two of the formats would be called {setup.name!r} in tables; rename the YAML of one")
    check_context(model, settings.window)
    text = load_text(settings.text)
    windows = cut_windows(tokenizer, text, settings.window, settings.limit)
    notes = []
    if len(windows) < settings.limit:
        notes.append(f"the text {text.name!r} gives {len(windows)} windows of {settings.window} tokens")
    errors = measure_errors(model, windows, setups, progress)
    klds, totals = _measure_divergence(model, windows, setups, progress)
    rows = []
    for setup in setups:
        for layer in setup.layers:
            found = errors[setup.name].get(layer)
            whole, heads = found.rows() if found is not None else (_no_errors(), [])
            names = {"format": setup.name, "layer": layer}
            rows.append({**names, "head": None, **whole, "kld_alone": klds[setup.name][layer]})
            rows.extend({**names, "head": i, **head, "kld_alone": None} for i, head in enumerate(heads))
    notes += _notes(setups[0], errors[setups[0].name])
    return {
        "rows": rows,
        "totals": totals,
        "text": {"name": text.name, "sha256": text.sha256, "windows": len(windows), "window": settings.window},
        "notes": notes,
    }


@dataclass(frozen=True)
class Setup:
    """A set-up of ours, to be looked at layer by layer.

    Attributes:
        name: what tables show.
        config: how all layers are stored, without ``scales``. Queries see what is stored, whatever ``prefill`` was.
        scales: static scales by name; empty where there are none.
        layers: the layers of the model that qkv stores.
        others: those that it leaves as they are.
    """

    name: str
    config: qkv.CacheConfig
    scales: Mapping[str, torch.Tensor]
    layers: tuple[int, ...]
    others: tuple[int, ...]

    def whole(self) -> NamedCache:
        """The cache that stores all layers so."""
        return self._cache(self.name, self.config, self.scales)

    def alone(self, layer: int) -> NamedCache:
        """The cache that stores one layer so, and all others exactly."""
        changes = {other: _EXACT for other in self.layers if other != layer}
        if layer in self.config.layers:
            changes[layer] = dict(self.config.layers[layer])
        scales = {name: scale for name, scale in self.scales.items() if name.startswith(f"layers.{layer}.")}
        return self._cache(f"{self.name}, layer {layer} alone", replace(self.config, layers=changes), scales)

    @staticmethod
    def _cache(name: str, config: qkv.CacheConfig, scales: Mapping[str, torch.Tensor]) -> NamedCache:
        def make(model_config: PreTrainedConfig) -> Cache:
            return qkv.QKVCache(model_config, config, scales=scales or None)

        return NamedCache(name, make, is_ours=True)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, kv_heads, tokens, head_dim]`` of a layer as they are once stored."""
        # Without a model's configuration no layer has a sliding window: every token of the text can be compared.
        cache = qkv.QKVCache(None, self.config, scales=self.scales or None)
        cache.update(keys, values, layer)
        return cache.view(layer).decode()


class _Sums:
    """Sums of squares for one format and layer, by kv head or query head, float64."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def has(self, what: str) -> bool:
        return what in self._sums

    def add(self, what: str, exact: torch.Tensor, stored: torch.Tensor) -> None:
        """Takes in tensors ``[batch, heads, ...]``."""
        dims = [0, *range(2, exact.dim())]
        squares = ((stored - exact).square(), exact.square())
        sums = torch.stack([x.sum(dims, dtype=torch.float64) for x in squares]).cpu()
        self._sums[what] = self._sums[what] + sums if what in self._sums else sums

    def rows(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The errors of the layer, and those of each kv head."""
        heads = self._sums["key"].shape[1]
        whole: dict[str, Any] = {}
        by_head: list[dict[str, Any]] = [{} for _ in range(heads)]
        for what in ("key", "value", "score", "output"):
            sums = self._sums.get(what)
            whole[f"{what}_error"] = _relative(sums.sum(1)) if sums is not None else None
            for i, row in enumerate(by_head):
                part = (
                    sums[:, i * sums.shape[1] // heads : (i + 1) * sums.shape[1] // heads] if sums is not None else None
                )
                row[f"{what}_error"] = _relative(part.sum(1)) if part is not None else None
                if what in ("score", "output"):
                    whole[f"{what}_error_by_query_head"] = None
                    errors = [_relative(x) for x in part.unbind(1)] if part is not None else None
                    row[f"{what}_error_by_query_head"] = errors
        return whole, by_head


class _Recorder(DynamicCache):
    """A ``DynamicCache`` that shows what it was given, and what it handed out, to a watcher."""

    def __init__(self, config: PreTrainedConfig, watcher: _Watcher) -> None:
        super().__init__(config=config)
        self._watcher = watcher

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        handed = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._watcher.stored(layer_idx, *handed)
        return handed


class _Watcher:
    """Sees the keys and values that are cached, and the queries that come for them, and adds up errors.

    Args:
        setups: what to compare with the exact keys and values.
    """

    def __init__(self, setups: Sequence[Setup]) -> None:
        self._setups = setups
        self._layer = -1
        self._exact: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stored: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sums: dict[str, dict[int, _Sums]] = {setup.name: {} for setup in setups}

    def stored(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values ``[batch, kv_heads, tokens, head_dim]`` have been cached for a layer."""
        self._layer, self._exact, self._stored = layer, (keys, values), {}
        for setup in self._setups:
            if layer not in setup.layers:
                continue
            stored = setup.store(layer, keys, values)
            sums = self.sums[setup.name].setdefault(layer, _Sums())
            for what, exact, other in zip(("key", "value"), self._exact, stored, strict=True):
                sums.add(what, exact.float(), other.float())
            self._stored[setup.name] = stored

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Exact attention, with the signature of transformers' attention interface; adds up errors on the way."""
        layer, stored = self._layer, {}
        # Another layer's keys, or other ones than are cached: what a format would do to these cannot be known.
        if self._exact is not None and key is self._exact[0] and value is self._exact[1]:
            stored, self._exact = self._stored, None
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        outputs = []
        for start in range(0, query.shape[2], _QUERIES):
            part = query[:, :, start : start + _QUERIES].float()
            seen, bias = _mask(attention_mask, position_bias, causal, start, part, query.shape[2], key.shape[2])
            finish = _Finish(seen, bias, softcap, s_aux)
            scores = _scores(part, key.float(), scale)
            output = finish(scores, value.float())
            outputs.append(output)
            if not stored:
                continue
            centred = _centred(scores, seen)
            for name, (other_keys, other_values) in stored.items():
                other_scores = _scores(part, other_keys.float(), scale)
                sums = self.sums[name][layer]
                sums.add("score", centred, _centred(other_scores, seen))
                sums.add("output", output, finish(other_scores, other_values.float()))
        return torch.cat(outputs, dim=2).transpose(1, 2).to(query.dtype).contiguous(), None


def measure_errors(
    model: PreTrainedModel, windows: torch.Tensor, setups: Sequence[Setup], progress: Progress | None = None
) -> dict[str, dict[int, _Sums]]:
    """Runs the model over windows ``[windows, tokens]`` and compares, in each layer, exact with stored.

    Returns:
        Sums of errors by set-up and layer.
    """
    watcher = _Watcher(setups)
    rows = max(1, _PASS_TOKENS // windows.shape[1])
    with _watched(model, watcher), torch.inference_mode():
        for start in range(0, len(windows), rows):
            if progress is not None:
                progress("comparing layers", start, len(windows))
            group = windows[start : start + rows].to(model.device)
            # What is predicted is of no interest here, and the vocabulary would take most of the memory.
            model.base_model(input_ids=group, **as_argument(_Recorder(model.config, watcher)), use_cache=True)
    if progress is not None:
        progress("comparing layers", len(windows), len(windows))
    return watcher.sums


@contextmanager
def _watched(model: PreTrainedModel, watcher: _Watcher) -> Iterator[None]:
    """Lets a watcher do a model's attention; the model is plain and transformers as it was afterwards."""
    # Under the name of the fused attention, for which transformers makes the masks already.
    qkv.enable(model)
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = watcher.attend  # of this table alone, in front of what is registered
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        qkv.disable(model)


def _measure_divergence(
    model: PreTrainedModel, windows: torch.Tensor, setups: Sequence[Setup], progress: Progress | None
) -> tuple[dict[str, dict[int, float]], list[dict[str, Any]]]:
    """Returns ``kld_alone`` by set-up and layer, and the totals of each set-up."""
    klds: dict[str, dict[int, float]] = {}
    totals = []
    groups = windows.split(max(1, _PASS_TOKENS // windows.shape[1]))
    for setup in setups:
        contestants = [setup.whole(), *(setup.alone(layer) for layer in setup.layers)]
        size = _bundle_size(model, groups[0])
        bundles = [contestants[at : at + size] for at in range(0, len(contestants), size)]
        parts: dict[str, list[Scores]] = {}
        work, done = len(groups) * len(contestants), 0
        for group in groups:
            for number, bundle in enumerate(bundles):
                report = _part_of(progress, f"storing single layers as {setup.name}", done, len(bundle), work)
                for name, scores in score_caches(model, group, bundle, progress=report).items():
                    if name != UNQUANTIZED or number == 0:
                        parts.setdefault(name, []).append(scores)
                done += len(bundle)
        baseline = Scores.joined(parts[UNQUANTIZED])
        figures = [summarize(Scores.joined(parts[cache.name]), baseline) for cache in contestants]
        whole, alone = figures[0], [figure["kld_mean"] for figure in figures[1:]]
        klds[setup.name] = dict(zip(setup.layers, alone, strict=True))
        totals.append(
            {
                "format": setup.name,
                "kld": whole["kld_mean"],
                "kld_alone_sum": sum(alone),
                "ppl": whole["ppl"],
                "dppl_percent": whole["dppl_percent"],
                "scoring": whole["scoring"],
            }
        )
    return klds, totals


def _bundle_size(model: PreTrainedModel, group: torch.Tensor) -> int:
    """Caches of a group of windows that fit into memory together; each bundle costs one more unquantized run."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.base_model(input_ids=group[:1, :1].to(model.device), **as_argument(cache), use_cache=True)
    return max(1, _MOST_BYTES // (kv_bytes(cache) * group.numel()))


def _setup(model: PreTrainedModel, name: str) -> Setup:
    named = named_cache(name)
    cache = named.make(model.config)
    if not isinstance(cache, qkv.QKVCache):
        raise ValueError(
            f"{name!r} cannot store a single layer alone; use formats of ours ({', '.join(qkv.formats())}) or the path "
            "of a YAML file"
        )
    stats = cache.stats()["layers"]
    ours = tuple(row["layer"] for row in stats if row["backend"] != "untouched")
    if not ours:
        raise ValueError(f"qkv stores no layer of {type(model).__name__}: there is nothing to compare")
    others = tuple(row["layer"] for row in stats if row["backend"] == "untouched")
    return Setup(named.name, replace(cache.config, prefill="stored", scales=None), _scales(cache.config), ours, others)


def _scales(config: qkv.CacheConfig) -> dict[str, torch.Tensor]:
    if config.scales is None:
        return {}
    from safetensors.torch import load_file

    return load_file(config.scales)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """``[batch, q_heads, queries, kv_len]`` of queries and grouped keys."""
    batch, heads, queries, width = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1] * queries, width)
    return (grouped @ key.transpose(2, 3) * scale).view(batch, heads, queries, -1)


def _mask(
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
    start: int,
    query: torch.Tensor,
    q_len: int,
    kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the queries from ``start`` on see, boolean ``[batch or 1, heads or 1, queries, kv_len]``, and a bias.

    The last of ``q_len`` queries is at the last of ``kv_len`` positions.
    """
    rows = slice(start, start + query.shape[2])
    bias = bias[..., rows, :].float() if bias is not None else None
    if mask is None:
        seen = torch.ones(1, 1, query.shape[2], kv_len, dtype=torch.bool, device=query.device)
        return (seen.tril(start + kv_len - q_len) if causal else seen), bias
    part = mask[..., rows, :]
    if part.dtype == torch.bool:
        return part, bias
    seen = part > torch.finfo(part.dtype).min
    added = part.float().masked_fill(~seen, 0)
    return seen, added if bias is None else added + bias


@dataclass(frozen=True)
class _Finish:
    """From scores to the output of attention: bias, softcap, mask, sinks, softmax, values."""

    seen: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    sinks: torch.Tensor | None

    def __call__(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Output ``[batch, q_heads, queries, head_dim]`` of scores ``[batch, q_heads, queries, kv_len]``."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias
        scores = scores.masked_fill(~self.seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        # A row that sees nothing (padding) gives zeros.
        weights = torch.softmax(scores, dim=-1).nan_to_num()[..., : values.shape[2]]
        batch, heads, queries, kv_len = weights.shape
        grouped = weights.reshape(batch, values.shape[1], heads // values.shape[1] * queries, kv_len)
        return (grouped @ values).view(batch, heads, queries, -1)


def _centred(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Scores less each query's mean over the keys that it sees; 0 where it sees nothing."""
    scores = scores.masked_fill(~seen, 0)
    mean = scores.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return (scores - mean).masked_fill(~seen, 0)


def _relative(sums: torch.Tensor) -> float | None:
    """The relative error of ``[2]`` sums of squares, of the error and of what is exact; None for 0 of 0."""
    error, exact = sums.tolist()
    if exact > 0:
        return math.sqrt(error / exact)
    return None if error == 0 else math.inf


def _no_errors() -> dict[str, Any]:
    names = ("key_error", "value_error", "score_error", "output_error")
    return dict.fromkeys((*names, "score_error_by_query_head", "output_error_by_query_head"))


def _part_of(progress: Progress | None, what: str, before: int, caches: int, work: int) -> Progress | None:
    """Tells the progress of scoring some caches as a part of all ``work``; ``before`` is what was done before."""
    if progress is None:
        return None

    def report(_: str, done: int, total: int) -> None:
        progress(what, before * total + done * caches, work * total)

    return report


def _notes(setup: Setup, sums: dict[int, _Sums]) -> list[str]:
    notes = []
    if setup.others:
        notes.append(f"left out, since qkv does not store them: layers {_listed(setup.others)}")
    unseen = [layer for layer in setup.layers if layer in sums and not sums[layer].has("output")]
    if unseen:
        notes.append(
            f"layers {_listed(unseen)}: no errors of scores and output, since attention there is the model's own or "
            "does not use what is cached as it is"
        )
    missing = [layer for layer in setup.layers if layer not in sums]
    if missing:
        notes.append(f"layers {_listed(missing)} were not used on this text")
    return notes


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
