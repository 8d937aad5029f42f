"""What the page draws from which rows: one function for each panel."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkv_eval.bench.fit import FEWEST_CONTEXTS, fit_line
from qkv_eval.report.charts import (
    Axis,
    Chart,
    Dots,
    Line,
    Series,
    Styles,
    bars,
    dot_rows,
    front,
    heat_map,
    lines,
    short,
)
from qkv_eval.report.load import NOISE_FLOOR, UNQUANTIZED, Row, Run, name_of, number

_NEGLIGIBLE = 1e-9  # nats: a divergence below it is rounding, on either side of 0
_TIMES = "\N{MULTIPLICATION SIGN}"
_BIT_TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading and what it shows."""

    title: str
    caption: str
    chart: Chart


@dataclass
class Panel:
    """A part of the page: figures with a legend.

    Attributes:
        name: for links.
        title: its heading.
        lead: what is drawn.
        needs: the commands whose results it draws.
        parts: pairs of a heading, empty if there is but one, and its figures.
    """

    name: str
    title: str
    lead: str
    needs: str
    parts: list[tuple[str, list[Figure]]] = field(default_factory=list)

    def add(self, heading: str, figures: Sequence[Figure]) -> None:
        """Adds figures, if there are any."""
        if figures:
            self.parts.append((heading, list(figures)))

    @property
    def names(self) -> list[str]:
        """The caches in its figures, each once."""
        return list(
            dict.fromkeys(name for _, figures in self.parts for figure in figures for name in figure.chart.names)
        )


def make_panels(runs: Sequence[Run], styles: Styles) -> list[Panel]:
    """Draws all panels; one without data has no parts."""
    drawn = (_quality, _tails, _positions, _layers, _tuning, _recall, _tasks, _speed, _memory, _redundancy)
    return [draw(runs, styles) for draw in drawn]


# ---- quality --------------------------------------------------------------------------------------------------------


def _quality(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "quality",
        "Quality against bits per value",
        "Each mark is a cache: what it stores for a number, scales and all, against what it does to the model's "
        "predictions. Lower and further left is better. The dashed line is the Pareto front: no other cache is "
        "better in both; the names on it are bold.",
        "qkv eval ppl, qkv compare",
    )
    for heading, rows in _by(runs, ("eval ppl", "compare"), _text_key):
        kld, change = [], []
        for name, row in _named(rows):
            if _is(name, NOISE_FLOOR):
                continue
            bits, divergence = number(row.get("bits_per_value")), number(row.get("kld_mean"))
            moved, error = number(row.get("dppl_percent")), number(row.get("dppl_percent_stderr"))
            if bits is None or bits <= 0:
                continue
            tip = f"{name}: {bits:.2f} bits per value"
            if divergence is not None:
                kld.append(
                    Series(name, [bits], [_floored(divergence)], [None], [f"{tip}, KL {short(divergence)} nats"])
                )
            if moved is not None:
                change.append(Series(name, [bits], [moved], [error], [f"{tip}, perplexity {moved:+.3f} %{_pm(error)}"]))
        x = Axis("bits per value", log=True, base=2, ticks=_BIT_TICKS, form=lambda value: f"{value:g}")
        figures = []
        if kld:
            caption = "Mean KL divergence of the next-token predictions from those with the unquantized cache, in nats."
            caption += _noise(rows)
            chart = front(kld, styles, x, Axis(log=True, zero=True), "Mean KL divergence against bits per value")
            figures.append(Figure("KL divergence, nats", caption, chart))
        if change:
            caption = (
                "Change of the perplexity, in percent of that with the unquantized cache; bars: one standard error."
            )
            y = Axis(signed=True, form=lambda value: f"{value:+.3g}" if value else "0")
            chart = front(change, styles, x, y, "Change of the perplexity against bits per value", draw_front=False)
            figures.append(Figure("Change of the perplexity, %", caption, chart))
        panel.add(heading, figures)
    return panel


def _tails(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "tails",
        "KL divergence of single predictions",
        "A small mean can hide a few predictions that moved far. For each cache, along the line from left to right: "
        "the median, 99 % and 99.9 % of all predictions, and the largest; the diamond is the mean. Nats, logarithmic.",
        "qkv eval ppl",
    )
    marks = (
        ("kld_median", "median", "|"),
        ("kld_p99", "99 %", "o"),
        ("kld_p999", "99.9 %", "o"),
        ("kld_max", "max", "|"),
    )
    for heading, rows in _by(runs, ("eval ppl",), _text_key):
        dots = []
        for name, row in _named(rows):
            found = [(number(row.get(key)), words, marker) for key, words, marker in marks]
            places = [
                (_floored(value), marker, f"{name}, {words}: {short(value)}")
                for value, words, marker in found
                if value is not None
            ]
            if _is(name, NOISE_FLOOR) or len(places) < 2 or max(value for value, _, _ in places) <= _NEGLIGIBLE:
                continue
            mean = number(row.get("kld_mean"))
            span = (min(value for value, _, _ in places), max(value for value, _, _ in places))
            if mean is not None:
                places.append((_floored(mean), "D", f"{name}, mean: {short(mean)}"))
            dots.append(Dots("", name, tuple(places), span))
        if dots:
            x = Axis("KL divergence of a prediction, nats", log=True, zero=True, tenfolds=8)
            chart = dot_rows(dots, styles, x, "Distribution of the KL divergence of single predictions, by cache")
            panel.add(heading, [Figure("", _noise(rows), chart)])
    return panel


def _positions(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "positions",
        "Drift by position",
        "Whether errors grow with what has been read: the predictions of a window, in stretches of their position in "
        "it. A point stands in the middle of its stretch.",
        "qkv eval ppl",
    )
    for heading, rows in _by(runs, ("eval ppl",), _text_key):
        kld: list[Series] = []
        same: list[Series] = []
        for name, row in _named(rows):
            if _is(name, NOISE_FLOOR):
                continue
            one, other = Series(name), Series(name)
            stretches = row.get("by_position")
            for stretch in stretches if isinstance(stretches, list) else ():
                if not isinstance(stretch, dict):
                    continue
                begin, end = number(stretch.get("from")), number(stretch.get("to"))
                if begin is None or end is None:
                    continue
                where = f"{name}, positions {begin:g} to {end:g}"
                divergence, top = number(stretch.get("kld_mean")), number(stretch.get("same_top_percent"))
                if divergence is not None:
                    one.add((begin + end) / 2, _floored(divergence), f"{where}: KL {short(divergence)} nats")
                if top is not None:
                    other.add((begin + end) / 2, max(100 - top, 0.0), f"{where}: {100 - top:.2f} % are others")
            if any(value > _NEGLIGIBLE for value in one.ys):
                kld.append(one)
                same.append(other)
        x = Axis("position in the window, tokens", form=lambda value: f"{value:,.0f}")
        figures = []
        if kld:
            chart = lines(kld, styles, x, Axis(log=True, zero=True), "KL divergence by position in the window")
            caption = f"Mean over the predictions of a stretch, all windows.{_noise(rows)}"
            figures.append(Figure("KL divergence, nats", caption, chart))
        if any(one.xs for one in same):
            chart = lines(
                same, styles, x, Axis(log=True, zero=True), "Predictions with another likeliest token, by position"
            )
            caption = "Predictions whose likeliest token is not that of the unquantized cache."
            figures.append(Figure("Another likeliest token, %", caption, chart))
        panel.add(heading, figures)
    return panel


_LAYER_MEASURES = (
    (
        "kld_alone",
        "What a layer alone does",
        "nats",
        "KL divergence of the predictions with this layer quantized alone.",
    ),
    ("output_error", "Error of the attention output", "", "Relative error of the output of attention."),
    ("score_error", "Error of the scores", "", "Relative error of the scores, query times key."),
    ("key_error", "Error of the keys", "", "Relative error of the stored keys."),
    ("value_error", "Error of the values", "", "Relative error of the stored values."),
)


def _layers(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "layers",
        "Layers and heads",
        "Where in the model the error comes from. A cell is a layer (across) and a key/value head (down); the colours "
        "of a map are on one scale for all its caches, so that these compare.",
        "qkv eval layers",
    )
    for heading, rows in _by(runs, ("eval layers",), _text_key):
        figures = []
        for key, title, unit, caption in _LAYER_MEASURES:
            cells: dict[tuple[Line, Line], float] = {}
            by_head = [row for _, row in rows if row.get("head") is not None and number(row.get(key)) is not None]
            has_heads = {name_of(row) for row in by_head}
            for name, row in _marked(rows, lambda row: (row.get("layer"), row.get("head"))):
                if row.get("head") is None and name_of(row) in has_heads:
                    continue  # a layer as a whole, of which the heads are there
                value, layer = number(row.get(key)), row.get("layer")
                if value is not None and layer is not None:
                    cells[((name, _head(row.get("head"))), ("", str(layer)))] = max(value, 0.0)
            cells = _one_row_if_heads_agree(cells)
            if not cells:
                continue
            down = _ordered(row for row, _ in cells)
            across = sorted({column for _, column in cells}, key=lambda column: _number_first(column[1]))
            chart = heat_map(down, across, cells, f"{title}, by layer and head", log=True, label="layer", unit=unit)
            figures.append(Figure(title + (f", {unit}" if unit else ""), caption, chart))
        panel.add(heading, figures)
    return panel


_FRONT = (
    ("kld_predicted", "tuned, predicted"),
    ("kld_validation", "tuned, validation text"),
    ("kld_held_out", "tuned, held-out text"),
)


def _tuning(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "tuning",
        "Tuned layer by layer",
        "What each way to store the keys or the values of one layer does to predictions, everything else unquantized; "
        "and what the best choice for all layers does under a budget of bits.",
        "qkv tune",
    )
    for run in runs:
        if run.kind != "tune":
            continue
        figures = []
        series = [_front_of(run.front, key, name) for key, name in _FRONT]
        uniform = Series("uniform, held-out text")
        for row in sorted(run.verified, key=lambda row: number(row.get("bits_per_value")) or 0.0):
            bits, divergence = number(row.get("bits_per_value")), number(row.get("kld_mean"))
            if row.get("kind") == "uniform" and bits is not None and divergence is not None:
                tip = f"{name_of(row)}: {bits:.2f} bits per value, KL {short(divergence)} nats"
                uniform.add(bits, _floored(divergence), tip)
        series = [one for one in (*series, uniform) if one.xs]
        if series:
            x = Axis("bits per value", form=lambda value: f"{value:g}")
            y = Axis(log=True, zero=True)
            chart = lines(series, styles, x, y, "KL divergence of the best choice by its budget")
            caption = (
                "Of each budget the best choice: as predicted by the sum of its parts, and as measured; beside it one "
                "candidate for all keys and one for all values."
            )
            figures.append(Figure("KL divergence by budget, nats", caption, chart))
        for key, title, only_chosen, caption in (
            ("bits_per_value", "What was chosen, bits per value", True, "Of the keys and of the values of each layer."),
            (
                "kld",
                "What a candidate does, nats",
                False,
                "KL divergence with this side of this layer alone stored so.",
            ),
        ):
            cells: dict[tuple[Line, Line], float] = {}
            for row in run.rows:
                value, layer, side = number(row.get(key)), row.get("layer"), f"{row.get('side')}s"
                if value is None or layer is None or (only_chosen and row.get("chosen") is not True):
                    continue
                line = ("", side) if only_chosen else (side, name_of(row))
                cells[(line, ("", str(layer)))] = max(value, 0.0)
            if cells:
                across = sorted({column for _, column in cells}, key=lambda column: _number_first(column[1]))
                chart = heat_map(
                    list(dict.fromkeys(line for line, _ in cells)),
                    across,
                    cells,
                    f"{title}, by layer",
                    log=not only_chosen,
                    label="layer",
                    written=only_chosen,
                )
                figures.append(Figure(title, caption, chart))
        panel.add(_text_key(run), figures)
    return panel


def _front_of(rows: Sequence[Row], key: str, name: str) -> Series:
    series = Series(name)
    for row in rows:
        budget, divergence = number(row.get("budget")), number(row.get(key))
        if budget is not None and divergence is not None:
            series.add(
                budget, _floored(divergence), f"{name}, {budget:.2f} bits per value: KL {short(divergence)} nats"
            )
    return series


def _recall(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "recall",
        "Recall by depth",
        "Whether the model still finds in its cache what it read. Across: how far into the text it stood (0 % is the "
        "beginning), for each length of context; the number is the share of answers that are right in every token.",
        "qkv eval recall",
    )
    for heading, rows in _by(runs, ("eval recall",), _model_key):
        tasks = list(dict.fromkeys(str(row.get("task", "")) for _, row in rows))
        figures = []
        for task in tasks:
            of_task = [(run, row) for run, row in rows if str(row.get("task", "")) == task]
            # A depth beyond 1 can only be a percentage.
            percent = any((number(row.get("depth")) or 0) > 1 for _, row in of_task)
            has_depth = any(number(row.get("depth")) is not None for _, row in of_task)
            cells: dict[tuple[Line, Line], float] = {}
            for name, row in _marked(of_task, lambda row: (row.get("context"), row.get("depth"))):
                value, context, depth = (number(row.get(key)) for key in ("exact_match", "context", "depth"))
                if value is None or context is None:
                    continue
                where = "all" if depth is None else f"{depth * (1 if percent else 100):g}%"
                column = (f"{context:,.0f} tokens", where) if has_depth else ("", f"{context:,.0f}")
                cells[(("", name), column)] = 100 * value
            if not cells:
                continue
            across = sorted({column for _, column in cells}, key=lambda c: (_number_first(c[0]), _number_first(c[1])))
            chart = heat_map(
                _ordered(row for row, _ in cells),
                across,
                cells,
                f"Recall, {task}",
                limits=(0.0, 100.0),
                form=lambda value: f"{value:.0f}",
                label="depth of what is asked for" if has_depth else "context, tokens",
                unit="% right",
                written=True,
                less_is_strong=True,
            )
            asked = sorted({int(n) for _, row in of_task if (n := number(row.get("n"))) is not None})
            caption = f"{' or '.join(map(str, asked))} answers in each cell." if asked else ""
            if not has_depth:
                caption = "Share of the tokens of a copied sequence that are foretold; what is asked for is everywhere."
            figures.append(Figure(task.replace("_", " ") or "Right answers, %", caption, chart))
        panel.add(heading, figures)
    return panel


def _tasks(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "tasks",
        "Tasks of lm-eval",
        "How far each cache moves the result of a task from that of the unquantized cache in the same run, in the "
        "task's own units. The line through a mark is one standard error to each side.",
        "qkv eval lm",
    )
    for heading, rows in _by(runs, ("eval lm",), _model_key):
        dots = []
        for name, row in _marked(rows, lambda row: (row.get("task"), row.get("metric"))):
            drift, value, baseline = (number(row.get(key)) for key in ("drift", "value", "baseline"))
            if drift is None and value is not None and baseline is not None:
                drift = value - baseline
            if drift is None or _is(name, UNQUANTIZED):
                continue
            error = number(row.get("drift_stderr")) or number(row.get("stderr"))
            group = f"{row.get('task')} {row.get('metric')}"
            tip = f"{group}, {name}: {drift:+.4g}{_pm(error)}"
            span = (drift - error, drift + error) if error is not None else None
            dots.append(Dots(group, name, ((drift, styles.of(name).marker, tip),), span))
        dots.sort(key=lambda row: row.group)
        if dots:
            x = Axis("change of the result", form=lambda value: f"{value:+.3g}" if value else "0")
            chart = dot_rows(dots, styles, x, "Change of the results of tasks, by cache", reference=0.0)
            panel.add(heading, [Figure("", "", chart)])
    return panel


# ---- cost -----------------------------------------------------------------------------------------------------------


def _speed(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "speed",
        "Speed",
        "Medians, with all caches in turn in one run. A ratio above 1 is faster than what it is measured against.",
        "qkv bench decode, qkv bench prefill, qkv bench kernel, qkv compare",
    )
    for kind, what in (("bench decode", "a decode step"), ("compare", "a decode step"), ("bench prefill", "a prompt")):
        time, unit = ("seconds", "s") if kind == "bench prefill" else ("ms_per_step", "ms")
        decoded = {_machine_key(run) for run in runs if run.kind == "bench decode"}
        for heading, rows in _by(runs, (kind,), _machine_key):
            if kind == "compare" and any(_machine_key(run) in decoded for run, _ in rows):
                continue  # the same figure, at one context alone
            figures = []
            for batch, of_batch in _split(rows, "batch"):
                figures += _against_context(
                    of_batch,
                    time,
                    styles,
                    Axis("context, tokens"),
                    f"Time of {what}, {unit}{_at_batch(batch)}",
                    unit,
                    caption=_lines_in_words(of_batch) if kind == "bench decode" else "",
                )
                figures += _against_context(
                    of_batch,
                    "ratio_to_dynamic",
                    styles,
                    Axis("context, tokens"),
                    f"Speed against DynamicCache{_at_batch(batch)}",
                    _TIMES,
                    reference=(1.0, "DynamicCache"),
                    without=UNQUANTIZED,
                )
                figures += _against_context(
                    of_batch,
                    "cache_ms",
                    styles,
                    Axis("context, tokens"),
                    f"The cache's own share of a step, ms{_at_batch(batch)}",
                    "ms",
                )
            panel.add(f"{what[2:].capitalize()}: {heading}", figures)
    for heading, found in _by(runs, ("bench kernel",), _machine_key):
        rows = [(run, _with_query(row)) for run, row in found]
        figures = []
        for shape, of_shape in _split(rows, "kv_heads", "q_per_kv", "head_dim", "batch"):
            kv_heads, q_per_kv, head_dim, size = ("?" if part is None else f"{part:g}" for part in shape)
            words = f", {kv_heads}x{q_per_kv}x{head_dim}, batch {size}"
            torch = [
                (run, {**row, "format": name, "ms": row.get(key)})
                for name, key in (("torch", "sdpa_ms"), ("torch, bf16", "sdpa_bf16_ms"))
                for run, row in of_shape
            ]
            first = {(run.number, row["format"], number(row.get("kv_len"))): (run, row) for run, row in torch}
            x = Axis("tokens in the cache")
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


def _memory(runs: Sequence[Run], styles: Styles) -> Panel:
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
        for heading, rows in _by(runs, (kind,), _model_key):
            for batch, of_batch in _split(rows, "batch"):
                if (words, batch) in found.setdefault(heading, {}):
                    continue
                scaled = [(run, {**row, "mb": _mega(row.get(key))}) for run, row in of_batch]
                x, title = Axis("context, tokens"), f"{words}, MB{_at_batch(batch)}"
                figures = _against_context(scaled, "mb", styles, x, title, "MB")
                if figures:
                    found[heading][(words, batch)] = figures
    for heading, by_batch in found.items():
        panel.add(heading, [figure for figures in by_batch.values() for figure in figures])
    return panel


def _redundancy(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "redundancy",
        "Why a cache",
        "The same text written without a cache, where each token reads the whole sequence again, and through caches, "
        "where it reads the newest token. Keys and values of a position depend on what stands before it alone, so "
        "computing them again gives the same.",
        "qkv bench redundancy",
    )
    for heading, found in _by(runs, ("bench redundancy",), _machine_key):
        figures = []
        for (prompt, generated), rows in _split(found, "prompt", "generated"):
            if prompt is None or generated is None:
                continue
            words = f", prompt {prompt:,.0f}, {generated:,.0f} new tokens"
            times: list[Series] = []
            so_far: list[Series] = []
            often: list[Series] = []
            for name, row in _named(rows):
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


_MOST_POINTS = 32


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
    found = {name: factor for name, row in _named(rows) if (factor := number(row.get("factor"))) is not None}
    words = [f"{name} {short(factor)} times" for name, factor in found.items() if factor > 1]
    return f" In the mean each was computed: {', '.join(words)}; otherwise once." if words else ""


def _against_context(
    rows: Sequence[tuple[Run, Row]],
    key: str,
    styles: Styles,
    x: Axis,
    title: str,
    unit: str,
    reference: tuple[float, str] | None = None,
    without: str = "",
    caption: str = "",
) -> list[Figure]:
    """Draws a figure of each cache against the context: lines, or bars where there is one context alone."""
    series: dict[str, Series] = {}
    for name, row in _marked(rows, _context_of):
        value, context = number(row.get(key)), _context_of(row)
        if value is None or context is None or context <= 0 or _is(name, without):
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
        across = Axis(x.label, log=True, base=2, ticks=ticks, form=lambda value: f"{value:,.0f}")
        up = Axis(log=is_wide_range, from_zero=not is_wide_range)
        chart = lines(series.values(), styles, across, up, title, reference=reference)
    return [Figure(title, caption, chart)]


def _lines_in_words(rows: Sequence[tuple[Run, Row]]) -> str:
    """What 1,000 tokens more add to a step, of the caches with contexts enough to tell a line from a curve."""
    points: dict[str, dict[float, float]] = {}
    for name, row in _marked(rows, _context_of):
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


# ---- which rows belong together -------------------------------------------------------------------------------------


def _by(
    runs: Sequence[Run], kinds: Sequence[str], key: Callable[[Run], str]
) -> Iterator[tuple[str, list[tuple[Run, Row]]]]:
    """Yields a heading and the rows of the runs that may stand in one drawing."""
    groups: dict[str, list[tuple[Run, Row]]] = {}
    for kind in kinds:
        for run in runs:
            if run.kind == kind:
                groups.setdefault(key(run), []).extend((run, row) for row in run.rows)
    yield from groups.items()


def _model_key(run: Run) -> str:
    return run.model or "no model"


def _text_key(run: Run) -> str:
    text = run.meta.get("text")
    if not isinstance(text, dict):
        return _model_key(run)
    window = f" in windows of {text['window']} tokens" if "window" in text else ""
    return f"{_model_key(run)}: {text.get('name')}{window}"


def _machine_key(run: Run) -> str:
    machine = [str(run.meta[key]) for key in ("device", "processor") if run.meta.get(key)]
    threads = run.meta.get("threads")
    if threads is not None:
        machine.append(f"{threads} thread{'s' if threads != 1 else ''}")
    return ", ".join(part for part in (run.model, *machine) if part)


def _named(rows: Sequence[tuple[Run, Row]]) -> list[tuple[str, Row]]:
    return _marked(rows, lambda row: None)


def _marked(rows: Sequence[tuple[Run, Row]], place: Callable[[Row], Any]) -> list[tuple[str, Row]]:
    """Returns each row with the name of its cache, which says the run as well where runs would be mixed up."""
    runs_at: dict[tuple[str, str], set[int]] = {}
    for run, row in rows:
        runs_at.setdefault((name_of(row), repr(place(row))), set()).add(run.number)
    several = {name for (name, _), found in runs_at.items() if len(found) > 1}
    names = [(run, name_of(row)) for run, row in rows]
    shown = [f"{name} · run {run.number}" if name in several else name for run, name in names]
    return [(name, row) for name, (_, row) in zip(shown, rows, strict=True)]


def _split(
    rows: Sequence[tuple[Run, Row]], *keys: str
) -> Iterator[tuple[tuple[float | None, ...], list[tuple[Run, Row]]]]:
    groups: dict[tuple[float | None, ...], list[tuple[Run, Row]]] = {}
    for run, row in rows:
        groups.setdefault(tuple(number(row.get(key)) for key in keys), []).append((run, row))
    yield from sorted(groups.items(), key=lambda item: [part or 0.0 for part in item[0]])


def _head(value: Any) -> str:
    return "all heads" if value is None else f"head {value}"


def _one_row_if_heads_agree(cells: dict[tuple[Line, Line], float]) -> dict[tuple[Line, Line], float]:
    """Makes one row of the heads of a cache where they all have the same figures, as what a layer alone does."""
    found: dict[str, dict[str, set[float]]] = {}
    for ((name, _), (_, layer)), value in cells.items():
        found.setdefault(name, {}).setdefault(layer, set()).add(value)
    if any(len(values) > 1 for layers in found.values() for values in layers.values()):
        return cells
    return {
        (("", name), ("", layer)): values.pop() for name, layers in found.items() for layer, values in layers.items()
    }


def _ordered(rows: Iterable[Line]) -> list[Line]:
    """Groups in the order in which they come, and the lines of each by their number."""
    groups: dict[str, dict[str, None]] = {}
    for group, name in rows:
        groups.setdefault(group, {})[name] = None
    ordered = []
    for group, names in groups.items():
        by_number = sorted(names, key=_number_first) if group else list(names)
        ordered += [(group, name) for name in by_number]
    return ordered


def _number_first(text: str) -> tuple[float, str]:
    digits = "".join(itertools.takewhile(lambda c: c.isdigit() or c in ".,-", text.removeprefix("head "))).replace(
        ",", ""
    )
    try:
        return float(digits), text
    except ValueError:
        return float("inf"), text


def _floored(value: float) -> float:
    return value if value > _NEGLIGIBLE else 0.0


def _is(name: str, cache: str) -> bool:
    return name.partition(" · ")[0] == cache


def _noise(rows: Sequence[tuple[Run, Row]]) -> str:
    """What rounding alone does, in words, if it was measured."""
    found = [number(row.get("kld_mean")) for _, row in rows if name_of(row) == NOISE_FLOOR]
    floors = [floor for floor in found if floor is not None]
    if not floors:
        return ""
    mean = short(max(floors)) if max(floors) > _NEGLIGIBLE else f"less than {short(_NEGLIGIBLE)}"
    return f" The unquantized cache against itself, computed in another order: {mean} in the mean."


def _pm(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2g}"
