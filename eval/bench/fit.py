"""Whether the time of a step is a straight line over the context: least squares, and how far points lie from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Through two points there is always a line; it would say nothing.
FEWEST_CONTEXTS = 3


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float | None]:
    """Fits ``y = intercept + slope * x`` by least squares.

    Returns:
        ``slope``, ``intercept``; ``r2``, the share of the variance of y that the line explains, or None where y does
        not vary; ``max_deviation``, the largest distance of a point from the line, in units of y;
        ``max_deviation_percent``, the largest one of its own point's y, and ``at``, the x of that point.

    Raises:
        ValueError: fewer than two different x, or not as many y.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.shape != y.shape or len(np.unique(x)) < 2:
        raise ValueError(f"a line needs two different x with a y each, not {len(x)} x and {len(y)} y")
    slope, intercept = np.polyfit(x, y, 1)
    off = np.abs(y - (intercept + slope * x))
    total = float(((y - y.mean()) ** 2).sum())
    relative = 100 * off / np.abs(y)
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r2": 1 - float((off**2).sum()) / total if total > 0 else None,
        "max_deviation": float(off.max()),
        "max_deviation_percent": float(relative.max()),
        "at": float(x[relative.argmax()]),
    }


def fit_steps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fits the time of a step over the context, for each cache and batch with at least three contexts.

    Args:
        rows: as ``bench decode`` makes them.

    Returns:
        For each, ``cache, batch, contexts`` (how many), ``first_context, last_context, us_per_1000_tokens`` (the
        slope: microseconds for 1,000 tokens more in each sequence, divided by the sequences), ``intercept_ms, r2,
        max_deviation_ms, max_deviation_percent`` and ``worst_context``, where the last of these is.
    """
    points: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        points.setdefault((row["cache"], row["batch"]), {})[row["context"]] = row["ms_per_step"]
    fits = []
    for (cache, batch), by_context in points.items():
        if len(by_context) < FEWEST_CONTEXTS:
            continue
        line = fit_line(list(by_context), list(by_context.values()))
        fits.append(
            {
                "cache": cache,
                "batch": batch,
                "contexts": len(by_context),
                "first_context": min(by_context),
                "last_context": max(by_context),
                "us_per_1000_tokens": 1e6 * float(line["slope"] or 0.0) / batch,
                "intercept_ms": line["intercept"],
                "r2": line["r2"],
                "max_deviation_ms": line["max_deviation"],
                "max_deviation_percent": line["max_deviation_percent"],
                "worst_context": int(line["at"] or 0),
            }
        )
    return fits
