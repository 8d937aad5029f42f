"""Panels of what caches cost, in time and memory, and what they save: one function for each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from qkv_eval.bench.fit import FEWEST_CONTEXTS, fit_line
from qkv_eval.report.charts import bars, lines
from qkv_eval.report.load import UNQUANTIZED, Row, Run, name_of, number
from qkv_eval.report.panel import Figure, Panel, is_named, machine_key, marked, model_key, named, rows_by, split_by
from qkv_eval.report.series import Axis, Series, Styles, short

_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_POINTS = 32
_CONTEXT = "context, tokens"


def speed(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "speed",
        "Speed",
        "Medians, with all caches in turn in one run. A ratio above 1 is faster than what it is measured against.",
        "qkv bench decode, qkv bench prefill, qkv bench kernel, qkv compare",
    )
    for kind, what in (("bench decode", "a decode step"), ("compare", "a decode step"), ("bench prefill", "a prompt")):
        time, unit = ("seconds", "s") if kind == "bench prefill" else ("ms_per_step", "ms")
        decoded = {machine_key(run) for run in runs if run.kind == "bench decode"}
        for heading, rows in rows_by(runs, (kind,), machine_key):
            if kind == "compare" and any(machine_key(run) in decoded for run, _ in rows):
                continue  # the same figure, at one context alone
            figures = []
            for batch, of_batch in split_by(rows, "batch"):
                title = f"Time of {what}, {unit}{_at_batch(batch)}"
                caption = _lines_in_words(of_batch) if kind == "bench decode" else ""
                figures += _against_context(of_batch, time, styles, _CONTEXT, title, unit, caption=caption)
                title = f"Speed against DynamicCache{_at_batch(batch)}"
                reference = (1.0, "DynamicCache")
                figures += _against_context(
                    of_batch, "ratio_to_dynamic", styles, _CONTEXT, title, _TIMES, reference, without=UNQUANTIZED
                )
                title = f"The cache's own share of a step, ms{_at_batch(batch)}"
                figures += _against_context(of_batch, "cache_ms", styles, _CONTEXT, title, "ms")
            panel.add(f"{what[2:].capitalize()}: {heading}", figures)
    for heading, found in rows_by(runs, ("bench kernel",), machine_key):
        rows = [(run, _with_query(row)) for run, row in found]
        figures = []
        for shape, of_shape in split_by(rows, "kv_heads", "q_per_kv", "head_dim", "batch"):
            kv_heads, q_per_kv, head_dim, size = ("?" if part is None else f"{part:g}" for part in shape)
            words = f", {kv_heads}x{q_per_kv}x{head_dim}, batch {size}"
            torch = [
                (run, {**row, "format": name, "ms": row.get(key)})
                for name, key in (("torch", "sdpa_ms"), ("torch, bf16", "sdpa_bf16_ms"))
                for run, row in of_shape
            ]
            first = {(run.number, row["format"], number(row.get("kv_len"))): (run, row) for run, row in torch}
            x = "tokens in the cache"
            figures += _against_context(
                [*first.values(), *of_shape], "ms", styles, x, f"Time of attention, ms{words}", "ms"
            )
            figures += _against_context(
                of_shape, "speedup", styles, x, f"Speed against torch{words}", _TIMES, reference=(1.0, "torch, fp32")
            )
            figures += _against_context(
                of_shape,
                "speedup_bf16",
                styles,
                x,
                f"Speed against torch in bf16{words}",
                _TIMES,
                reference=(1.0, "torch, bf16"),
            )
        panel.add(f"Attention alone: {heading}", figures)
    return panel


def memory(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "memory",
        "Memory",
        "What the tensors of a cache really hold, spare room included. A MB is a million bytes.",
        "qkv bench memory, qkv bench decode, qkv bench prefill, qkv compare",
    )
    # One figure for each model and batch, from the first command that measured it.
    found: dict[str, dict[tuple[str, tuple[float | None, ...]], list[Figure]]] = {}
    for kind, key, words in (
        ("bench memory", "kv_bytes", "Size of the cache"),
        ("bench decode", "kv_bytes", "Size of the cache"),
        ("compare", "kv_bytes", "Size of the cache"),
        ("bench memory", "peak_bytes", "Most memory in use for a prompt"),
        ("bench prefill", "peak_bytes", "Most memory in use for a prompt"),
    ):
        for heading, rows in rows_by(runs, (kind,), model_key):
            for batch, of_batch in split_by(rows, "batch"):
                if (words, batch) in found.setdefault(heading, {}):
                    continue
                scaled = [(run, {**row, "mb": _mega(row.get(key))}) for run, row in of_batch]
                title = f"{words}, MB{_at_batch(batch)}"
                figures = _against_context(scaled, "mb", styles, _CONTEXT, title, "MB")
                if figures:
                    found[heading][(words, batch)] = figures
    for heading, by_batch in found.items():
        panel.add(heading, [figure for figures in by_batch.values() for figure in figures])
    return panel


def redundancy(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "redundancy",
        "Why a cache",
        "The same text written without a cache, where each token reads the whole sequence again, and through caches, "
        "where it reads the newest token. Keys and values of a position depend on what stands before it alone, so "
        "computing them again gives the same.",
        "qkv bench redundancy",
    )
    for heading, found in rows_by(runs, ("bench redundancy",), machine_key):
        figures = []
        for (prompt, generated), rows in split_by(found, "prompt", "generated"):
            if prompt is None or generated is None:
                continue
            words = f", prompt {prompt:,.0f}, {generated:,.0f} new tokens"
            times: list[Series] = []
            so_far: list[Series] = []
            often: list[Series] = []
            for name, row in named(rows):
                # The first token is the whole prompt's pass for all of them.
                time = _stretches(_series_of(row, "ms")[1:])
                times.append(_points(name, time, "position {:,.0f}: {} ms"))
                count = _thinned(_series_of(row, "positions_computed"))
                so_far.append(_points(name, count, "up to position {:,.0f}: {} keys"))
                each = row.get("counts")
                each = [number(value) for value in each] if isinstance(each, list) else []
                known = [(float(place), value) for place, value in enumerate(each) if value is not None]
                often.append(_points(name, _thinned(known), "position {:,.0f}: {} times"))
            for series, title, caption in (
                (
                    times,
                    "Time of a token, ms",
                    "From the second new token on, by its position; a mark is the median of a stretch.",
                ),
                (so_far, "Keys computed so far", f"In each layer, by the position of the token.{_waste(rows)}"),
                (often, "How often the keys of a position are computed", "By position; the last token is never read."),
            ):
                if any(one.xs for one in series):
                    x = Axis("position, tokens", form=lambda value: f"{value:,.0f}")
                    y = Axis(from_zero=True)
                    figures.append(Figure(title + words, caption, lines(series, styles, x, y, title + words)))
        panel.add(heading, figures)
    return panel


def _series_of(row: Row, key: str) -> list[tuple[float, float]]:
    """The values of a row's tokens by their position."""
    tokens = row.get("tokens")
    found = []
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict):
            place, value = number(token.get("position")), number(token.get(key))
            if place is not None and value is not None:
                found.append((place, value))
    return found


def _stretches(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Makes one point of each stretch of several, so that a line of many has as many as can be seen."""
    size = max(-(-len(points) // _MOST_POINTS), 1)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(statistics.mean(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leaves points out, neither the first nor the last."""
    size = max(-(-len(points) // _MOST_POINTS), 1)
    return [point for i, point in enumerate(points) if i == 0 or (len(points) - 1 - i) % size == 0]


def _points(name: str, points: Sequence[tuple[float, float]], tip: str) -> Series:
    series = Series(name)
    for x, y in points:
        series.add(x, y, f"{name}, {tip.format(x, short(y))}")
    return series


def _waste(rows: Sequence[tuple[Run, Row]]) -> str:
    """How often keys were computed in the mean, in words, of the rows in which it is not once."""
    found = {name: factor for name, row in named(rows) if (factor := number(row.get("factor"))) is not None}
    words = [f"{name} {short(factor)} times" for name, factor in found.items() if factor > 1]
    return f" In the mean each was computed: {', '.join(words)}; otherwise once." if words else ""


def _against_context(
    rows: Sequence[tuple[Run, Row]],
    key: str,
    styles: Styles,
    x: str,
    title: str,
    unit: str,
    reference: tuple[float, str] | None = None,
    without: str = "",
    caption: str = "",
) -> list[Figure]:
    """Draws a figure of each cache against the context: lines, or bars where there is one context alone."""
    series: dict[str, Series] = {}
    for name, row in marked(rows, _context_of):
        value, context = number(row.get(key)), _context_of(row)
        if value is None or context is None or context <= 0 or is_named(name, without):
            continue
        spread = number(row.get("spread")) if key.startswith("ms") else None
        tip = f"{name}, {context:,.0f} tokens: {short(value)} {unit}"
        tip += "" if spread is None else f", middle half of the timings {spread:.0%} wide"
        series.setdefault(name, Series(name)).add(context, value, tip)
    if not series:
        return []
    contexts = sorted({context for one in series.values() for context in one.xs})
    if len(contexts) == 1:
        drawn = [(name, one.ys[0], one.tips[0]) for name, one in series.items()]
        axis = Axis(f"{unit}, at {contexts[0]:,.0f} tokens", form=short)
        chart = bars(drawn, styles, axis, title, reference=reference and reference[0])
    else:
        values = [value for one in series.values() for value in one.ys]
        is_wide_range = min(values) > 0 and max(values) > 20 * min(values)
        ticks = tuple(contexts[:: -(-len(contexts) // 8)])
        across = Axis(x, log=True, base=2, ticks=ticks, form=lambda value: f"{value:,.0f}")
        up = Axis(log=is_wide_range, from_zero=not is_wide_range)
        chart = lines(series.values(), styles, across, up, title, reference=reference)
    return [Figure(title, caption, chart)]


def _lines_in_words(rows: Sequence[tuple[Run, Row]]) -> str:
    """What 1,000 tokens more add to a step, of the caches with contexts enough to tell a line from a curve."""
    points: dict[str, dict[float, float]] = {}
    for name, row in marked(rows, _context_of):
        value, context = number(row.get("ms_per_step")), _context_of(row)
        if value is not None and value > 0 and context is not None:
            points.setdefault(name, {})[context] = value
    words = []
    for name, of_name in points.items():
        if len(of_name) >= FEWEST_CONTEXTS:
            line = fit_line(list(of_name), list(of_name.values()))
            fit = "" if line["r2"] is None else f" (r\N{SUPERSCRIPT TWO} {line['r2']:.4f})"
            words.append(f"{name} {short(1000 * float(line['slope'] or 0.0))} ms{fit}")
    return f"By a straight line through its points, 1,000 tokens more add: {', '.join(words)}." if words else ""


def _context_of(row: Row) -> float | None:
    return number(row.get("context", row.get("kv_len")))


def _with_query(row: Row) -> Row:
    """A row of attention alone under a name that says the type of its query, if that is not float32."""
    return {**row, "format": f"{name_of(row)}, bf16"} if row.get("dtype") == "bfloat16" else row


def _mega(value: Any) -> float | None:
    size = number(value)
    return None if size is None else size / 1e6


def _at_batch(batch: tuple[float | None, ...]) -> str:
    return "" if batch[0] is None else f", batch {batch[0]:g}"
