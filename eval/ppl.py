"""``qkv eval ppl``: perplexity and divergence of caches over a text, with the noise floor beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.named_caches import as_argument
from qkv_eval.faithful import check_cache
from qkv_eval.held import bits_per_value
from qkv_eval.peers import Progress, attend_as_meant, with_baseline
from qkv_eval.perplexity import NOISE_FLOOR, SCORINGS, by_position, check_context, score_caches, summarize
from qkv_eval.text import Text, cut_windows, load_dataset_text, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv.named_caches import NamedCache


@dataclass(frozen=True)
class PplSettings:
    """What to score, and how.

    Attributes:
        formats: caches beside ``dynamic``.
        text: a text file; None: the embedded text, or ``dataset``.
        dataset: a data set by name, see ``qkv_eval.text.load_dataset_text``.
        window: tokens that a prediction can look back on, at most.
        stride: tokens from one window to the next; of an overlapping window only what is new is counted. None: windows
            do not overlap.
        limit: windows at most; None: the whole text.
        scoring: ``auto``, ``chunked``, ``stepwise`` or ``prefill-exact``, see ``qkv_eval.perplexity``.
        chunk: tokens in one pass.
    """

    formats: tuple[str, ...] = ("none", "int8", "fp8_e4m3")
    text: str | None = None
    dataset: str | None = None
    window: int = 2048
    stride: int | None = None
    limit: int | None = 8
    scoring: str = "auto"
    chunk: int = 256
    noise_floor: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"unknown scoring {self.scoring!r}; use one of {', '.join(SCORINGS)}")
        if self.text is not None and self.dataset is not None:
            raise ValueError("give a text file or a data set, not both")
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} is no number of tokens; use 1 or more")


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: PplSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores a text through each cache, and measures it against the unquantized cache of the same run.

    Returns:
        ``rows``: one for each cache, the first ``dynamic`` and the second the noise floor, with ``format, scoring,
        tokens, ppl, ppl_stderr, dppl_percent, dppl_percent_stderr, kld_mean, kld_median, kld_p99, kld_p999, kld_max,
        same_top_percent, bits_per_value, seconds, seconds_ratio`` (its passes' time over the unquantized cache's) and
        ``by_position`` (see ``qkv_eval.perplexity.by_position``). ``text``: name, SHA-256 and windows. ``notes``:
        lines that a reader of the figures should know.

    Raises:
        ValueError: an unknown cache or scoring, a text that is too short, windows beyond the model's limit, or a
            scoring that would flatter a cache.
    """
    caches = with_baseline(settings.formats)
    check_context(model, settings.window)
    text = load_dataset_text(settings.dataset) if settings.dataset is not None else load_text(settings.text)
    windows = cut_windows(tokenizer, text, settings.window, settings.limit, settings.stride)
    scores = score_caches(
        model,
        windows,
        caches,
        chunk=settings.chunk,
        scoring=settings.scoring,
        noise_floor=settings.noise_floor,
        progress=progress,
    )
    baseline = scores[caches[0].name]
    counted = _counted(windows, settings, baseline.losses.shape[1])
    bits = _bits_per_value(model, windows[:1], caches)
    rows = []
    for name, found in scores.items():
        figures = summarize(found, baseline, counted)
        figures["bits_per_value"] = bits.get(name, bits[caches[0].name])
        figures["seconds_ratio"] = found.seconds / baseline.seconds
        rows.append({"format": name, **figures, "by_position": by_position(found, baseline, counted)})
    return {
        "rows": rows,
        "text": {"name": text.name, "sha256": text.sha256, "windows": len(windows), "window": settings.window},
        "notes": _notes(model, caches, rows, windows, text, settings),
    }


def _counted(windows: torch.Tensor, settings: PplSettings, positions: int) -> torch.Tensor:
    """Which predictions count, bool ``[windows, positions]``: of a window that overlaps, those of its new tokens."""
    counted = torch.ones(len(windows), positions, dtype=torch.bool)
    if settings.stride is not None:
        counted[1:, : max(0, positions - settings.stride)] = False
    return counted


@torch.inference_mode()
def _bits_per_value(model: PreTrainedModel, window: torch.Tensor, caches: list[NamedCache]) -> dict[str, float]:
    """Bits per number of keys and values when a window is stored."""
    found: dict[str, float] = {}
    values = 0
    for cache in caches:
        attend_as_meant(model, cache)
        made = cache.make(model.config)
        model(input_ids=window, **as_argument(made), use_cache=True, logits_to_keep=1)
        if not values:  # of the first, which is unquantized and tells how many numbers there are
            kept = [x for layer in made.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
            values = sum(x.numel() for x in kept if isinstance(x, torch.Tensor))
        found[cache.name] = bits_per_value(made, values)
    return found


def _notes(
    model: PreTrainedModel,
    caches: list[NamedCache],
    rows: list[dict[str, Any]],
    windows: torch.Tensor,
    text: Text,
    settings: PplSettings,
) -> list[str]:
    notes = []
    if settings.limit is not None and len(windows) < settings.limit:
        notes.append(
            f"the text {text.name!r} gives {len(windows)} windows of {settings.window} tokens, not {settings.limit}"
        )
    if settings.scoring == "prefill-exact":
        notes.append(
            "prefill-exact: no prediction was made from stored values; these figures say nothing about the caches"
        )
        return notes
    scoring = {row["format"]: row["scoring"] for row in rows}
    for cache in caches:
        if scoring[cache.name] == "stepwise" and not (verdict := check_cache(model, cache)).faithful:
            notes.append(
                f"{cache.name}: a pass over several tokens does not see what this cache stores (tried out: "
                f"{verdict.difference:.0%} of its error does not show), so it was scored token by token"
            )
    return notes


__all__ = ["NOISE_FLOOR", "PplSettings", "run"]
