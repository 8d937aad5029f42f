"""``qkv calibrate``: static scales per head, and equalizing vectors, from a text.

The model runs over windows of a text unquantized, and the keys and values that it caches (after rotary embedding) are
looked at on the way; nothing of them is kept. For the keys and for the values of each layer and head a scale is chosen:
numbers up to ``range = scale * largest code`` can be stored, and those beyond it saturate.

- ``maximum``: the range is the largest magnitude of the text. Nothing of the text saturates.
- ``percentile``: the range is the smallest that holds so many per cent of the magnitudes. It is read from a histogram
  and up to 0.8% too large.
- ``error``: the range is the one, of a grid of ranges ``largest magnitude * 2**(k / 16)``, at which storing does the
  least squared error to the text's numbers. The error is that of the real store, over a histogram.

A histogram has 128 bins for each factor of two (the upper 16 bits of a float32), for magnitudes down to 2**-32 of the
layer's largest, so memory does not grow with the text.

With ``equalize``, keys are stored as ``(key - centre) / multiplier``: the centre of a channel is its mean over the
text, the multiplier its largest distance from it to the power 0.7, with a geometric mean of 1 over the channels of a
head. The first tokens of each window have no part in the centre, since their keys are unlike all others (attention
sinks); they have one in the multiplier, since the range has to hold them too. Scales of keys are then for keys so
transformed, and their range is ``head_room`` times what the method finds: with all channels alike, any of them can go
beyond what it was in the text, and on another text many do (on SmolLM2-135M by up to 1.8 times; without equalizing, a
few large channels set the range, and they are much the same everywhere). All of that takes a second run over the text,
since the vectors must be known first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

import qkv
from qkv.named_caches import as_argument
from qkv_eval.peers import Progress
from qkv_eval.perplexity import check_context
from qkv_eval.text import Text, cut_windows, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FORMATS = ("int8", "fp8_e4m3", "fp8_e5m2")
METHODS = ("maximum", "percentile", "error")
# First tokens of a window that have no part in the centre of keys.
ATTENTION_SINKS = 4
# What the distances of channels are raised to, and the part of the largest one that a channel at rest counts as.
POWER = 0.7
_LEAST_DISTANCE = 2.0**-12
# Tokens in one pass through a model.
_PASS_TOKENS = 2048
# Bins of a histogram for each factor of two, how far down they reach, and the points that stand for the numbers of one.
_BINS, _OCTAVES, _POINTS = 128, 32, 4
# The grid of ranges for the least error, in steps of 2**(1 / 16): from 2**-8 of the largest magnitude to twice it.
_GRID = tuple(2.0 ** (k / 16) for k in range(-128, 17))

See = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class CalibrateSettings:
    """What scales to find, and on which text.

    Attributes:
        format: one of ``FORMATS``.
        method: one of ``METHODS``.
        percentile: per cent of the magnitudes of a head that its range holds (``percentile``).
        text: a text file, or None for the embedded text.
        window: tokens in a window.
        limit: windows at most; None: all of the text.
        equalize: whether to make equalizing vectors.
        head_room: what the range of equalized keys is multiplied by.
        sink_tokens: first tokens of each window that do not count, for a cache that keeps them exact.
    """

    format: str = "int8"
    method: str = "maximum"
    percentile: float = 99.9
    text: str | None = None
    window: int = 2048
    limit: int | None = 8
    equalize: bool = False
    head_room: float = 1.5
    sink_tokens: int = 0


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: CalibrateSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Finds scales for the layers that qkv stores; the module says how. Leaves the model plain.

    Returns:
        ``scales``, tensors by name as ``QKVCache(scales=...)`` takes them: ``layers.<i>.key_scale`` and
        ``.value_scale``, float32 ``[kv_heads]``, and with ``equalize`` ``.key_centre`` and ``.key_multiplier``, float32
        ``[kv_heads, key_dim]``; ``about``, how they were found, for :func:`qkv.scales.save_scales`; ``rows``, one for
        each layer and head with ``layer, head``, ``key_scale, value_scale``, ``key_largest, value_largest`` (largest
        magnitudes, of keys as they are encoded) and ``key_range, value_range`` (what can be stored, as a part of these;
        below 1 numbers saturate); ``text`` (name, SHA-256, windows); and ``notes``.

    Raises:
        ValueError: settings that are not allowed, a text that is too short, a window beyond the model's limit, an
            encoder-decoder model, a model of which qkv stores no layer, or keys and values that are not finite.
    """
    check_settings(settings)
    check_context(model, settings.window)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder, and calibration runs decoders over a text only")
    ours, others = _layers(model, settings.format)
    text = load_text(settings.text)
    windows = cut_windows(tokenizer, text, settings.window, settings.limit)
    vectors = _find_vectors(model, windows, ours, settings, progress) if settings.equalize else {}
    found = _measure(model, windows, ours, vectors, settings, progress)
    largest_code = float(_stored(settings.format, torch.full((1, 1), 1e30), torch.ones(1)))
    used = [layer for layer in ours if (layer, "key") in found]
    scales: dict[str, torch.Tensor] = {}
    rows: list[dict[str, Any]] = []
    for done, layer in enumerate(used):
        if progress is not None:
            progress("choosing scales", done, len(used))
        heads: list[dict[str, Any]] = [{"layer": layer, "head": i} for i in range(len(found[layer, "key"].largest))]
        for side in ("key", "value"):
            seen = found[layer, side]
            scale = _choose(seen, settings, largest_code)
            if side == "key" and layer in vectors:
                scale = scale * settings.head_room
            scales[f"layers.{layer}.{side}_scale"] = scale
            for row, one, largest in zip(heads, scale.tolist(), seen.largest.tolist(), strict=True):
                ratio = one * largest_code / largest if largest > 0 else None
                row |= {f"{side}_scale": one, f"{side}_largest": largest, f"{side}_range": ratio}
        rows += heads
        if layer in vectors:
            scales[f"layers.{layer}.key_centre"], scales[f"layers.{layer}.key_multiplier"] = vectors[layer]
    if progress is not None:
        progress("choosing scales", len(used), len(used))
    return {
        "scales": scales,
        "about": _about(settings, text, len(windows)),
        "rows": rows,
        "text": {"name": text.name, "sha256": text.sha256, "windows": len(windows), "window": settings.window},
        "notes": _notes(settings, len(windows), ours, others, used),
    }


def _find_vectors(
    model: PreTrainedModel,
    windows: torch.Tensor,
    layers: Collection[int],
    settings: CalibrateSettings,
    progress: Progress | None,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Centre and multiplier of keys, float32 ``[kv_heads, key_dim]`` each, by layer."""
    channels: dict[int, _Channels] = {}
    sinks = max(0, ATTENTION_SINKS - settings.sink_tokens)

    def see(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer in layers:
            counted = _counted(keys, settings.sink_tokens, layer, "keys")
            channels.setdefault(layer, _Channels()).add(counted, sinks)

    _run_over(model, windows, see, "equalizing", progress)
    return {layer: seen.vectors() for layer, seen in channels.items()}


def _measure(
    model: PreTrainedModel,
    windows: torch.Tensor,
    layers: Collection[int],
    vectors: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    settings: CalibrateSettings,
    progress: Progress | None,
) -> dict[tuple[int, str], _Magnitudes]:
    """How large keys and values are as they are encoded, by layer and ``key`` or ``value``."""
    found: dict[tuple[int, str], _Magnitudes] = {}

    def see(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer not in layers:
            return
        for side, numbers in (("key", keys), ("value", values)):
            counted = _counted(numbers, settings.sink_tokens, layer, f"{side}s")
            if side == "key" and layer in vectors:
                centre, multiplier = (vector.to(counted.device).unsqueeze(1) for vector in vectors[layer])
                counted = (counted - centre) / multiplier
            seen = found.setdefault((layer, side), _Magnitudes(with_histogram=settings.method != "maximum"))
            seen.add(counted)

    _run_over(model, windows, see, "calibrating", progress)
    return found


class _Channels:
    """The extremes and the mean of each channel of the keys of one layer."""

    def __init__(self) -> None:
        self._low = self._high = self._sum = torch.zeros(())
        self._count = 0

    def add(self, keys: torch.Tensor, sinks: int) -> None:
        """Takes in keys ``[batch, heads, tokens, dim]``, float32; the first ``sinks`` tokens not for the mean."""
        others = keys[:, :, sinks:]
        low, high, total = keys.amin((0, 2)), keys.amax((0, 2)), others.sum((0, 2), dtype=torch.float64)
        if self._count == 0:
            self._low, self._high, self._sum = low, high, total
        else:
            self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)
            self._sum = self._sum + total
        self._count += others.shape[0] * others.shape[2]

    def vectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and multiplier, float32 ``[heads, dim]`` each, on the CPU."""
        centre = (self._sum / self._count).float()
        distance = torch.maximum(self._high.double() - centre.double(), centre.double() - self._low.double())
        return centre.cpu(), _multiplier(distance).cpu()


def _multiplier(distance: torch.Tensor) -> torch.Tensor:
    """What channels are divided by, float32 ``[heads, dim]``, for their largest distances from the centre, float64."""
    top = distance.amax(dim=-1, keepdim=True)
    logarithm = torch.where(top > 0, torch.maximum(distance, top * _LEAST_DISTANCE), 1.0).log()
    return (POWER * (logarithm - logarithm.mean(dim=-1, keepdim=True))).exp().float()


class _Magnitudes:
    """How large the numbers of each head of one layer are: the largest, and on demand a histogram of all.

    A bin is what magnitudes have in common in the upper 16 bits of their float32.

    Attributes:
        largest: float32 ``[heads]``, on the CPU.
        first: the bin that column 0 of :attr:`counts` is; what lies below is counted in it.
        counts: int64 ``[heads, bins]``, on the CPU.
    """

    def __init__(self, with_histogram: bool) -> None:
        self.largest = torch.zeros(())
        self.first = 0
        self.counts: torch.Tensor | None = None
        self._with_histogram = with_histogram

    def add(self, numbers: torch.Tensor) -> None:
        """Takes in ``[batch, heads, tokens, dim]``, float32 and finite."""
        magnitudes = numbers.abs().transpose(0, 1).flatten(1)
        self.largest = torch.maximum(self.largest, magnitudes.amax(1).cpu())
        if self._with_histogram:
            self._count(magnitudes)

    def _count(self, magnitudes: torch.Tensor) -> None:
        bins = magnitudes.view(torch.int32) >> 16
        top = int(self.largest.view(torch.int32).max()) >> 16
        bins = bins.clamp(min=max(0, top - _BINS * _OCTAVES))
        low, high = int(bins.min()), int(bins.max())
        heads = len(bins)
        if self.counts is None:
            self.first, self.counts = low, torch.zeros(heads, high - low + 1, dtype=torch.int64)
        behind = self.first + self.counts.shape[1]
        self.counts = pad(self.counts, (max(0, self.first - low), max(0, high + 1 - behind)))
        self.first = min(self.first, low)
        width = self.counts.shape[1]
        places = bins - self.first + width * torch.arange(heads, device=bins.device).unsqueeze(1)
        self.counts += places.flatten().bincount(minlength=heads * width).view(heads, width).cpu()

    def at_percentile(self, percentile: float) -> torch.Tensor:
        """The smallest magnitudes ``[heads]`` that so many per cent do not exceed, up to the width of a bin larger."""
        assert self.counts is not None
        below = self.counts.cumsum(1)
        wanted = torch.ceil(below[:, -1:].double() * (percentile / 100))
        at = (below < wanted).sum(1)
        return torch.minimum(self._edge(at + 1), self.largest)

    def points(self, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Magnitudes that stand for those of a head, float32 ``[n]``, and how many each stands for, float64 ``[n]``.

        They lie evenly over each bin, since a bin may be wider than the step between two codes.
        """
        assert self.counts is not None
        at = self.counts[head].nonzero().squeeze(1)
        low, high = self._edge(at).unsqueeze(1), self._edge(at + 1).clamp(max=float(self.largest[head])).unsqueeze(1)
        points = low + (high - low) * ((torch.arange(_POINTS) + 0.5) / _POINTS)
        counts = self.counts[head, at].double().unsqueeze(1).expand_as(points) / _POINTS
        return points.flatten(), counts.flatten()

    def _edge(self, at: torch.Tensor) -> torch.Tensor:
        """The smallest magnitude in the bins of columns ``at``."""
        return ((at + self.first) << 16).to(torch.int32).view(torch.float32)


class _Recorder(DynamicCache):
    """A ``DynamicCache`` that shows the keys and values that it is given."""

    def __init__(self, config: PreTrainedConfig, see: See) -> None:
        super().__init__(config=config)
        self._see = see

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._see(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _run_over(model: PreTrainedModel, windows: torch.Tensor, see: See, what: str, progress: Progress | None) -> None:
    """Runs a model over windows ``[windows, tokens]``, each of them in one pass, and shows what it caches."""
    qkv.disable(model)
    rows = max(1, _PASS_TOKENS // windows.shape[1])
    with torch.inference_mode():
        for start in range(0, len(windows), rows):
            if progress is not None:
                progress(what, start, len(windows))
            group = windows[start : start + rows].to(model.device)
            # What is predicted is of no interest here, and the vocabulary would take most of the memory.
            model.base_model(input_ids=group, **as_argument(_Recorder(model.config, see)), use_cache=True)
    if progress is not None:
        progress(what, len(windows), len(windows))


def _counted(numbers: torch.Tensor, skipped: int, layer: int, side: str) -> torch.Tensor:
    """The tokens that count of ``[batch, heads, tokens, dim]``, float32."""
    counted = numbers[:, :, skipped:].float()
    if not bool(counted.isfinite().all()):
        raise ValueError(f"layer {layer} has {side} that are not finite; load the model in float32 or bfloat16")
    return counted


def _choose(seen: _Magnitudes, settings: CalibrateSettings, largest_code: float) -> torch.Tensor:
    """Scales, float32 ``[heads]``."""
    top = seen.largest
    if settings.method == "percentile":
        top = seen.at_percentile(settings.percentile)
    # Heads of zeros alone store zeros under any scale.
    scales = (top / largest_code).clamp(min=torch.finfo(torch.float32).tiny)
    if settings.method == "error":
        for head, largest in enumerate(seen.largest.tolist()):
            if largest > 0:
                scales[head] = _least_error(settings.format, *seen.points(head), scales[head])
    return scales


def _least_error(format: str, points: torch.Tensor, counts: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The scale of the grid around that for the largest magnitude, ``exact``, at which storing errs least."""
    candidates = exact * torch.tensor(_GRID)
    stored = _stored(format, points.expand(len(candidates), -1), candidates)
    errors = (stored.double() - points.double()).square() @ counts
    return candidates[errors.argmin()]


def _stored(format: str, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers ``[heads, n]`` as values are stored in a format under scales ``[heads]``, float32."""
    heads, n = numbers.shape
    width = min(n, 64)
    tokens = math.ceil(n / width)
    values = pad(numbers, (0, tokens * width - n)).view(1, heads, tokens, width)
    cache = qkv.QKVCache(
        None, key_format="none", value_format=format, equalize=False, scales={"layers.0.value_scale": scales}
    )
    cache.update(values.new_zeros(1, heads, tokens, 1), values, 0)
    return cache.view(0).decode()[1].reshape(heads, -1)[:, :n]


def _layers(model: PreTrainedModel, format: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers that qkv stores, and those that it leaves as they are."""
    stats = qkv.QKVCache(model.config, format).stats()["layers"]
    ours = tuple(row["layer"] for row in stats if row["backend"] != "untouched")
    if not ours:
        raise ValueError(f"qkv stores no layer of {type(model).__name__}: there is nothing to calibrate")
    return ours, tuple(row["layer"] for row in stats if row["backend"] == "untouched")


def check_settings(settings: CalibrateSettings) -> None:
    """Raises ``ValueError`` for settings that are not allowed, whatever the model."""
    for name, value, allowed in (("format", settings.format, FORMATS), ("method", settings.method, METHODS)):
        if value not in allowed:
            raise ValueError(f"there is no {name} {value!r} to calibrate; use one of {', '.join(allowed)}")
    if not 0 < settings.percentile <= 100:
        raise ValueError(f"percentile={settings.percentile:g} must be above 0 and at most 100")
    if not 1 <= settings.head_room < math.inf:
        raise ValueError(f"head_room={settings.head_room:g} must be at least 1")
    if settings.sink_tokens < 0:
        raise ValueError(f"sink_tokens={settings.sink_tokens} must be at least 0")
    skipped = max(settings.sink_tokens, ATTENTION_SINKS if settings.equalize else 0)
    if settings.window <= skipped:
        raise ValueError(
            f"window={settings.window} leaves nothing: the first {skipped} tokens of each window do not count; use "
            "longer windows"
        )


def _about(settings: CalibrateSettings, text: Text, windows: int) -> dict[str, str]:
    """How scales were found, as metadata; no paths, since files of scales are passed on."""
    return {
        "method": settings.method + (f" {settings.percentile:g}" if settings.method == "percentile" else ""),
        "equalized": f"head room {settings.head_room:g}" if settings.equalize else "no",
        "text": text.name,
        "text_sha256": text.sha256,
        "tokens": str(windows * (settings.window - settings.sink_tokens)),
        "window": str(settings.window),
        "sink_tokens": str(settings.sink_tokens),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _notes(
    settings: CalibrateSettings, windows: int, ours: Sequence[int], others: Sequence[int], used: Sequence[int]
) -> list[str]:
    notes = []
    if settings.limit is not None and windows < settings.limit:
        notes.append(f"the text gives {windows} windows of {settings.window} tokens")
    if others:
        notes.append(f"left out, since qkv does not store them: layers {_listed(others)}")
    unused = [layer for layer in ours if layer not in used]
    if unused:
        notes.append(f"layers {_listed(unused)} were not used on this text and have no scales")
    return notes


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
