"""Panels of what caches do to predictions and answers: one function for each."""

from __future__ import annotations

from collections.abc import Sequence

from qkv_eval.report.charts import Dots, dot_rows, front, lines
from qkv_eval.report.heat import Line, heat_map
from qkv_eval.report.load import NOISE_FLOOR, UNQUANTIZED, Run, number
from qkv_eval.report.panel import (
    NEGLIGIBLE,
    Figure,
    Panel,
    floored,
    is_named,
    marked,
    model_key,
    named,
    noise_in_words,
    number_first,
    ordered,
    plus_minus,
    rows_by,
    text_key,
)
from qkv_eval.report.series import Axis, Series, Styles, short

_BIT_TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


def quality(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "quality",
        "Quality against bits per value",
        "Each mark is a cache: what it stores for a number, scales and all, against what it does to the model's "
        "predictions. Lower and further left is better. The dashed line is the Pareto front: no other cache is "
        "better in both; the names on it are bold.",
        "qkv eval ppl, qkv compare",
    )
    for heading, rows in rows_by(runs, ("eval ppl", "compare"), text_key):
        kld, change = [], []
        for name, row in named(rows):
            if is_named(name, NOISE_FLOOR):
                continue
            bits, divergence = number(row.get("bits_per_value")), number(row.get("kld_mean"))
            moved, error = number(row.get("dppl_percent")), number(row.get("dppl_percent_stderr"))
            if bits is None or bits <= 0:
                continue
            tip = f"{name}: {bits:.2f} bits per value"
            if divergence is not None:
                kld.append(Series(name, [bits], [floored(divergence)], [None], [f"{tip}, KL {short(divergence)} nats"]))
            if moved is not None:
                change.append(
                    Series(name, [bits], [moved], [error], [f"{tip}, perplexity {moved:+.3f} %{plus_minus(error)}"])
                )
        x = Axis("bits per value", log=True, base=2, ticks=_BIT_TICKS, form=lambda value: f"{value:g}")
        figures = []
        if kld:
            caption = "Mean KL divergence of the next-token predictions from those with the unquantized cache, in nats."
            caption += noise_in_words(rows)
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


def tails(runs: Sequence[Run], styles: Styles) -> Panel:
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
    for heading, rows in rows_by(runs, ("eval ppl",), text_key):
        dots = []
        for name, row in named(rows):
            found = [(number(row.get(key)), words, marker) for key, words, marker in marks]
            places = [
                (floored(value), marker, f"{name}, {words}: {short(value)}")
                for value, words, marker in found
                if value is not None
            ]
            if is_named(name, NOISE_FLOOR) or len(places) < 2 or max(value for value, _, _ in places) <= NEGLIGIBLE:
                continue
            mean = number(row.get("kld_mean"))
            span = (min(value for value, _, _ in places), max(value for value, _, _ in places))
            if mean is not None:
                places.append((floored(mean), "D", f"{name}, mean: {short(mean)}"))
            dots.append(Dots("", name, tuple(places), span))
        if dots:
            x = Axis("KL divergence of a prediction, nats", log=True, zero=True, tenfolds=8)
            chart = dot_rows(dots, styles, x, "Distribution of the KL divergence of single predictions, by cache")
            panel.add(heading, [Figure("", noise_in_words(rows), chart)])
    return panel


def positions(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "positions",
        "Drift by position",
        "Whether errors grow with what has been read: the predictions of a window, in stretches of their position in "
        "it. A point stands in the middle of its stretch.",
        "qkv eval ppl",
    )
    for heading, rows in rows_by(runs, ("eval ppl",), text_key):
        kld: list[Series] = []
        same: list[Series] = []
        for name, row in named(rows):
            if is_named(name, NOISE_FLOOR):
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
                    one.add((begin + end) / 2, floored(divergence), f"{where}: KL {short(divergence)} nats")
                if top is not None:
                    other.add((begin + end) / 2, max(100 - top, 0.0), f"{where}: {100 - top:.2f} % are others")
            if any(value > NEGLIGIBLE for value in one.ys):
                kld.append(one)
                same.append(other)
        x = Axis("position in the window, tokens", form=lambda value: f"{value:,.0f}")
        figures = []
        if kld:
            chart = lines(kld, styles, x, Axis(log=True, zero=True), "KL divergence by position in the window")
            caption = f"Mean over the predictions of a stretch, all windows.{noise_in_words(rows)}"
            figures.append(Figure("KL divergence, nats", caption, chart))
        if any(one.xs for one in same):
            chart = lines(
                same, styles, x, Axis(log=True, zero=True), "Predictions with another likeliest token, by position"
            )
            caption = "Predictions whose likeliest token is not that of the unquantized cache."
            figures.append(Figure("Another likeliest token, %", caption, chart))
        panel.add(heading, figures)
    return panel


def recall(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "recall",
        "Recall by depth",
        "Whether the model still finds in its cache what it read. Across: how far into the text it stood (0 % is the "
        "beginning), for each length of context; the number is the share of answers that are right in every token.",
        "qkv eval recall",
    )
    for heading, rows in rows_by(runs, ("eval recall",), model_key):
        tasks = list(dict.fromkeys(str(row.get("task", "")) for _, row in rows))
        figures = []
        for task in tasks:
            of_task = [(run, row) for run, row in rows if str(row.get("task", "")) == task]
            # A depth beyond 1 can only be a percentage.
            percent = any((number(row.get("depth")) or 0) > 1 for _, row in of_task)
            has_depth = any(number(row.get("depth")) is not None for _, row in of_task)
            cells: dict[tuple[Line, Line], float] = {}
            for name, row in marked(of_task, lambda row: (row.get("context"), row.get("depth"))):
                value, context, depth = (number(row.get(key)) for key in ("exact_match", "context", "depth"))
                if value is None or context is None:
                    continue
                where = "all" if depth is None else f"{depth * (1 if percent else 100):g}%"
                column = (f"{context:,.0f} tokens", where) if has_depth else ("", f"{context:,.0f}")
                cells[(("", name), column)] = 100 * value
            if not cells:
                continue
            across = sorted({column for _, column in cells}, key=lambda c: (number_first(c[0]), number_first(c[1])))
            chart = heat_map(
                ordered(row for row, _ in cells),
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


def tasks(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "tasks",
        "Tasks of lm-eval",
        "How far each cache moves the result of a task from that of the unquantized cache in the same run, in the "
        "task's own units. The line through a mark is one standard error to each side.",
        "qkv eval lm",
    )
    for heading, rows in rows_by(runs, ("eval lm",), model_key):
        dots = []
        for name, row in marked(rows, lambda row: (row.get("task"), row.get("metric"))):
            drift, value, baseline = (number(row.get(key)) for key in ("drift", "value", "baseline"))
            if drift is None and value is not None and baseline is not None:
                drift = value - baseline
            if drift is None or is_named(name, UNQUANTIZED):
                continue
            error = number(row.get("drift_stderr")) or number(row.get("stderr"))
            group = f"{row.get('task')} {row.get('metric')}"
            tip = f"{group}, {name}: {drift:+.4g}{plus_minus(error)}"
            span = (drift - error, drift + error) if error is not None else None
            dots.append(Dots(group, name, ((drift, styles.of(name).marker, tip),), span))
        dots.sort(key=lambda row: row.group)
        if dots:
            x = Axis("change of the result", form=lambda value: f"{value:+.3g}" if value else "0")
            chart = dot_rows(dots, styles, x, "Change of the results of tasks, by cache", reference=0.0)
            panel.add(heading, [Figure("", "", chart)])
    return panel
