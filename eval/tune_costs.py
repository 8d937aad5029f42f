"""What ``qkv tune`` chooses from, and what each choice costs: bits, KL divergence, time of attention.

A candidate is a way to store one side of a layer, its keys or its values. Its costs are measured one by one:

- KL divergence: the predictions with this side of this layer alone stored so, against the unquantized model's, mean
  over the positions of a few windows. What comes before the layer is the same in every such pass, so a pass begins at
  the layer, from the hidden states of the unquantized pass: half the work on average. A model where that does not give
  the unquantized predictions again (layers that share keys and values, for one) gets whole passes.
- Bits: counted by a real cache that was given so many tokens, as ``QKVCache.stats()`` counts them.
- Time: attention of one query token over a cache of the candidate, in turn with one of ``int8``, as in ``qkv bench
  kernel``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

import qkv
from qkv.attention import attention
from qkv.named_caches import as_argument
from qkv_eval.bench.bandwidth import last_level_cache
from qkv_eval.bench.timing import Contestant, time_in_turn
from qkv_eval.divergence import compare_predictions
from qkv_eval.yaml_file import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDES = ("key", "value")
# What attention's time is measured against.
REFERENCE = "int8"
_FIELDS = ("format", "granularity", "group_size", "equalize")
# Tokens in one pass through a model.
_PASS_TOKENS = 2048
# Layers of a cache whose attention is timed, at most: more of small ones would take long to fill.
_MOST_TIMED = 256
# Of both sides: what the presets are made of, each with its own granularity for keys and for values.
_DEFAULT: tuple[dict[str, Any], ...] = (
    {"format": "int2_rot", "group_size": 32},
    *({"format": f"int{bits}_rot"} for bits in (2, 3, 4, 5, 6)),
    {"format": "int8"},
)
# Where these formats are not there.
_FALLBACK = ({"format": "int8"}, {"format": "fp8_e4m3"}, {"format": "fp8_e5m2"}, {"format": "none"})


# ---- candidates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A way to store the keys or the values of a layer; the fields are those of ``qkv.CacheConfig``.

    Attributes:
        side: ``key`` or ``value``.
        format, granularity, group_size: as ``key_format`` and so on; None: the format's default.
        equalize: of keys.
    """

    side: str
    format: str
    granularity: str | None = None
    group_size: int | None = None
    equalize: bool | None = None

    @property
    def name(self) -> str:
        """What tables show: ``int4-channel64``."""
        grain = "" if self.granularity is None else f"-{self.granularity}"
        size = "" if self.group_size is None else f"{'' if grain else '-'}{self.group_size}"
        equalized = {None: "", True: "-equalized", False: "-plain"}[self.equalize]
        return f"{self.format}{grain}{size}{equalized}"

    def changes(self) -> dict[str, Any]:
        """The fields of ``CacheConfig`` that make a layer store this side so, all of them given."""
        names = {f"{self.side}_{name}": getattr(self, name) for name in _FIELDS[:3]}
        return names | ({"equalize": self.equalize} if self.side == "key" else {})


EXACT = {side: Candidate(side, "none") for side in SIDES}


def read_candidates(path: str | Path) -> dict[str, tuple[Candidate, ...]]:
    """Reads candidates from a YAML file with two lists, ``keys`` and ``values``, of mappings such as ``{format: int4,
    granularity: channel, group_size: 64}``.

    Raises:
        ValueError: the file is missing or no YAML, a list is missing or empty, a field or a format is unknown, or a
            value is not allowed. The message names the file.
    """
    content = read_yaml(path, "candidates")
    try:
        if not isinstance(content, Mapping) or set(content) != {"keys", "values"}:
            raise ValueError("candidates are two lists, keys and values")
        return {side: _checked(side, content[f"{side}s"]) for side in SIDES}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(side: str, items: Any) -> tuple[Candidate, ...]:
    if not isinstance(items, list) or not items:
        raise ValueError(f"{side}s is missing or empty; give a list such as [{{format: int8}}]")
    found: dict[Candidate, None] = {}
    for number, item in enumerate(items):
        where = f"{side}s[{number}]"
        known = _FIELDS if side == "key" else _FIELDS[:3]
        if not isinstance(item, Mapping) or "format" not in item:
            raise ValueError(f"{where} must map {', '.join(known)} to values, format at least; found {item!r}")
        unknown = [key for key in item if key not in known]
        if unknown:
            raise ValueError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(known)}")
        if item["format"] not in qkv.formats():
            raise ValueError(
                f"{where}: unknown format {item['format']!r}; use one of {', '.join(map(str, qkv.formats()))}"
            )
        candidate = Candidate(side, **item)
        try:
            qkv.CacheConfig(**candidate.changes())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found[candidate] = None
    return tuple(found)


def default_candidates(head_dims: Iterable[int]) -> dict[str, tuple[Candidate, ...]]:
    """The candidates where none are given: of those meant, the ones whose format there is.

    Args:
        head_dims: of the model's values; groups of channels divide all of them.
    """
    common = math.gcd(*head_dims)
    found = {}
    for side in SIDES:
        candidates: dict[Candidate, None] = {}
        meant = [item for item in _DEFAULT if item["format"] in qkv.formats()]
        for item in meant if len(meant) > 1 else [item for item in _FALLBACK if item["format"] in qkv.formats()]:
            size: Any = item.get("group_size")
            if size is not None and side == "value":
                size = next(n for n in range(min(size, common), 0, -1) if common % n == 0)
            candidates[Candidate(side, **(item | {"group_size": size}))] = None
        found[side] = tuple(candidates)
    return found


# ---- bits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """What layers of a model have in common that store the same numbers of tokens in the same shape.

    Attributes:
        kv_heads, key_dim, value_dim: of the keys and values, ``[batch, kv_heads, tokens, dim]``.
        kind: the layer of transformers' ``DynamicCache``.
        window: tokens of a sliding window; None: all are kept.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    kind: str
    window: int | None

    def width(self, side: str) -> int:
        """Numbers that one token has on this side."""
        return self.kv_heads * (self.key_dim if side == "key" else self.value_dim)


def resolved(config: qkv.CacheConfig, layer: int) -> qkv.CacheConfig:
    """The set-up of one layer with everything said for each side; equal for layers that are stored alike."""
    own = config.for_layer(layer)
    sides = {f"{side}_{name}": side_value(own, side, name) for side in SIDES for name in _FIELDS[:3]}
    return replace(own, format="none", granularity=None, group_size=None, layers={}, **sides)


def side_value(config: qkv.CacheConfig, side: str, name: str) -> Any:
    """``format``, ``granularity`` or ``group_size`` of one side of a set-up."""
    own = getattr(config, f"{side}_{name}")
    return getattr(config, name) if own is None else own


class Ledger:
    """Counts what set-ups store, by a real cache for each kind of layer.

    Args:
        model: a causal language model.
        context: tokens that are stored.

    Attributes:
        layers: the layers that qkv stores, with their geometry.

    Raises:
        ValueError: qkv stores no layer of the model.
    """

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self._model_config, self.context, self._dtype = model.config, context, model.dtype
        self.layers = _geometries(model)
        if not self.layers:
            raise ValueError(f"qkv stores no layer of {type(model).__name__}: there is nothing to tune")
        self._counted: dict[Any, tuple[int, int]] = {}

    def count(self, config: qkv.CacheConfig, layer: int) -> tuple[int, int]:
        """The bits that a layer stores for ``context`` tokens, and the numbers of keys and values they are for.

        Raises:
            ValueError: the set-up does not go with the layer.
        """
        geometry, own = self.layers[layer], resolved(config, layer)
        if (geometry, own) not in self._counted:
            cache = qkv.QKVCache(self._model_config, own)
            generator = torch.Generator().manual_seed(0)
            keys, values = (
                torch.randn(1, geometry.kv_heads, self.context, dim, generator=generator).to(self._dtype)
                for dim in (geometry.key_dim, geometry.value_dim)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", qkv.SlowPathWarning)  # nothing attends here, so no path is slow
                for part in (slice(self.context - 1), slice(self.context - 1, None)):  # a step: a window moves with it
                    if keys[:, :, part].shape[2]:
                        cache.update(keys[:, :, part], values[:, :, part], layer)
            stats = cache.stats()
            numbers = stats["layers"][layer]["tokens"] * (geometry.width("key") + geometry.width("value"))
            self._counted[geometry, own] = round(stats["bits_per_value"] * numbers), numbers
        return self._counted[geometry, own]

    def side(self, candidate: Candidate, layer: int, base: qkv.CacheConfig) -> int:
        """The bits that one side of a layer stores, the other side left exact."""
        geometry, other = self.layers[layer], SIDES[candidate.side == "key"]
        config = replace(base, **EXACT[other].changes(), **candidate.changes())
        bits, numbers = self.count(config, layer)
        tokens = numbers // (geometry.width("key") + geometry.width("value"))
        return bits - tokens * geometry.width(other) * torch.finfo(self._dtype).bits

    def total(self, config: qkv.CacheConfig) -> tuple[int, int]:
        """The bits that all layers store, and the numbers they are for."""
        counts = [self.count(config, layer) for layer in self.layers]
        return sum(bits for bits, _ in counts), sum(numbers for _, numbers in counts)

    def bits_per_value(self, config: qkv.CacheConfig) -> float:
        """As ``QKVCache.stats()`` has it after ``context`` tokens."""
        bits, numbers = self.total(config)
        return bits / numbers


@torch.inference_mode()
def _geometries(model: PreTrainedModel) -> dict[int, Geometry]:
    stored = [row["layer"] for row in qkv.QKVCache(model.config).stats()["layers"] if row["backend"] != "untouched"]
    plain = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), **as_argument(plain), use_cache=True)
    found = {}
    for index in stored:
        layer: Any = plain.layers[index]
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:  # of another layer's keys and values there are none
            sizes = (keys.shape[1], keys.shape[3], values.shape[3])
            found[index] = Geometry(*sizes, type(layer).__name__, getattr(layer, "sliding_window", None))
    return found


# ---- divergence -----------------------------------------------------------------------------------------------------


class Passes:
    """Passes over a few windows with one layer changed; use it as a context manager, which leaves the model plain.

    Args:
        model: a causal language model.
        windows: int64 ``[windows, tokens]``.
        skip: positions at the start of each window that are not looked at.

    Attributes:
        resumes: whether a pass begins at the layer that is changed.
    """

    def __init__(self, model: PreTrainedModel, windows: torch.Tensor, skip: int) -> None:
        self._model, self._skip = model, skip
        self._groups = windows.split(max(1, _PASS_TOKENS // windows.shape[1]))
        self._layers = _decoder_layers(model)
        self._exact: list[torch.Tensor] = []
        self._hidden: list[list[torch.Tensor]] = []
        self.resumes = False

    def __enter__(self) -> Passes:
        qkv.enable(self._model)
        try:
            self._begin()
        except BaseException:
            qkv.disable(self._model)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        qkv.disable(self._model)

    @torch.inference_mode()
    def divergence(self, config: qkv.CacheConfig, layer: int) -> torch.Tensor:
        """KL(unquantized || this) in nats, float32 ``[windows, tokens - skip]``.

        Args:
            config: a set-up that stores ``layer`` in some way and all other layers exactly.
            layer: where the pass may begin.
        """
        found = []
        for number, group in enumerate(self._groups):
            with self._from(layer if self.resumes else 0, number):
                logits = self._logits(group, config)
            found.append(compare_predictions(self._exact[number], logits)[0])
        return torch.cat(found)

    def _logits(self, group: torch.Tensor, config: qkv.CacheConfig) -> torch.Tensor:
        cache = qkv.QKVCache(self._model.config, config)
        tokens = group.to(self._model.device)
        # The last position is looked at too: a divergence needs no token that follows.
        kept = group.shape[1] - self._skip
        logits = self._model(input_ids=tokens, **as_argument(cache), use_cache=True, logits_to_keep=kept).logits
        return logits[:, -kept:]

    @torch.inference_mode()
    def _begin(self) -> None:
        """The unquantized passes, with the hidden states before each layer, and a trial of going on from them."""
        exact = qkv.CacheConfig("none")
        for group in self._groups:
            with _recorded(self._layers) as hidden:
                self._exact.append(self._logits(group, exact))
            self._hidden.append(hidden)
        count = len(self._layers)
        if count < 2 or any(len(hidden) != count for hidden in self._hidden):
            return
        self.resumes = True
        for layer in {1, count // 2, count - 1}:
            try:
                with self._from(layer, 0):
                    logits = self._logits(self._groups[0], exact)
            except Exception:  # whatever a model does with what comes out of its layers
                self.resumes = False
            else:
                self.resumes &= torch.equal(logits, self._exact[0])
            if not self.resumes:
                self._hidden = []
                return

    @contextmanager
    def _from(self, layer: int, group: int) -> Iterator[None]:
        """Lets all decoder layers before ``layer`` hand on what it gets in the unquantized pass."""
        if layer == 0:
            yield
            return
        state = self._hidden[group][layer]
        skipped = [(module, vars(module).get("forward")) for module in self._layers[:layer]]
        for module, _ in skipped:
            module.forward = lambda *_, **__: state  # of this module alone, in front of its class's
        try:
            yield
        finally:
            for module, own in skipped:
                del module.forward
                if own is not None:
                    module.forward = own


def _decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The modules of the decoder's layers in their order, or none where it is not plain which they are."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0]) if len(lists) == 1 else []


@contextmanager
def _recorded(layers: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Notes the hidden states that come into each layer; too few or too many where they are not called in turn."""
    states: list[torch.Tensor] = []

    def note(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        state = arguments[0] if arguments else named.get("hidden_states")
        if isinstance(state, torch.Tensor) and module is layers[len(states) % len(layers)]:
            states.append(state)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


# ---- time -----------------------------------------------------------------------------------------------------------


def measure_time(
    geometry: Geometry,
    q_per_kv: int,
    context: int,
    config: qkv.CacheConfig,
    rounds: int = 15,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Times attention of one query token over a set-up, in turn with ``REFERENCE``; fp32, one sequence.

    Returns:
        Seconds for a layer of the set-up and of the reference (medians), and the larger of their spreads (see
        ``qkv_eval.bench.timing``).
    """
    tokens = min(context, geometry.window or context)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, geometry.kv_heads * q_per_kv, 1, geometry.key_dim, generator=generator)
    setups = {"other": config, "reference": qkv.CacheConfig(REFERENCE, sink_tokens=config.sink_tokens)}
    contestants, counts = [], {}
    for name, setup in setups.items():
        cache = qkv.QKVCache(None, setup)
        count, layer = 2, 0
        while layer < count:
            keys, values = (
                torch.randn(1, geometry.kv_heads, tokens, dim, generator=generator)
                for dim in (geometry.key_dim, geometry.value_dim)
            )
            cache.update(keys, values, layer)
            layer += 1
            if layer == 1:  # as many as no processor's cache holds
                count = min(max(2, math.ceil(2 * last_level_cache() / cache.nbytes())), _MOST_TIMED)
        views = [cache.view(i) for i in range(count)]
        counts[name] = count
        contestants.append(Contestant(name, partial(_attend_to_all, query, views)))
    timings = time_in_turn(contestants, rounds)
    ours, reference = (timings[name].median / counts[name] for name in setups)
    return ours, reference, max(timing.spread for timing in timings.values())


def _attend_to_all(query: torch.Tensor, views: Sequence[Any]) -> None:
    for view in views:
        attention(query, view)


def query_heads_per_kv(model: PreTrainedModel, geometry: Geometry) -> int:
    """Query heads that share a kv head."""
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", geometry.kv_heads)
    return max(1, heads // geometry.kv_heads)
