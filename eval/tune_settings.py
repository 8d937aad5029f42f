"""What ``qkv tune`` is asked for, and the parts of the text that it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qkv_eval.text import Text, cut_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
