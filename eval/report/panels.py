"""All panels of the page, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from qkv_eval.report.cost_panels import memory, redundancy, speed
from qkv_eval.report.layer_panels import layers, tuning
from qkv_eval.report.load import Run
from qkv_eval.report.panel import Panel
from qkv_eval.report.quality_panels import positions, quality, recall, tails, tasks
from qkv_eval.report.series import Styles


def make_panels(runs: Sequence[Run], styles: Styles) -> list[Panel]:
    """Draws all panels; one without data has no parts."""
    drawn = (quality, tails, positions, layers, tuning, recall, tasks, speed, memory, redundancy)
    return [draw(runs, styles) for draw in drawn]
