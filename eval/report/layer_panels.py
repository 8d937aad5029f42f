"""Panels of single layers: what each costs, and what was chosen for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qkv_eval.report.charts import lines
from qkv_eval.report.heat import Line, heat_map
from qkv_eval.report.load import Row, Run, name_of, number
from qkv_eval.report.panel import Figure, Panel, floored, marked, number_first, ordered, rows_by, text_key
from qkv_eval.report.series import Axis, Series, Styles, short

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


def layers(runs: Sequence[Run], styles: Styles) -> Panel:
    panel = Panel(
        "layers",
        "Layers and heads",
        "Where in the model the error comes from. A cell is a layer (across) and a key/value head (down); the colours "
        "of a map are on one scale for all its caches, so that these compare.",
        "qkv eval layers",
    )
    for heading, rows in rows_by(runs, ("eval layers",), text_key):
        figures = []
        for key, title, unit, caption in _LAYER_MEASURES:
            cells: dict[tuple[Line, Line], float] = {}
            by_head = [row for _, row in rows if row.get("head") is not None and number(row.get(key)) is not None]
            has_heads = {name_of(row) for row in by_head}
            for name, row in marked(rows, lambda row: (row.get("layer"), row.get("head"))):
                if row.get("head") is None and name_of(row) in has_heads:
                    continue  # a layer as a whole, of which the heads are there
                value, layer = number(row.get(key)), row.get("layer")
                if value is not None and layer is not None:
                    cells[((name, _head(row.get("head"))), ("", str(layer)))] = max(value, 0.0)
            cells = _one_row_if_heads_agree(cells)
            if not cells:
                continue
            down, across = ordered(row for row, _ in cells), _layers_of(cells)
            chart = heat_map(down, across, cells, f"{title}, by layer and head", log=True, label="layer", unit=unit)
            figures.append(Figure(title + (f", {unit}" if unit else ""), caption, chart))
        panel.add(heading, figures)
    return panel


def _layers_of(cells: Iterable[tuple[Line, Line]]) -> list[Line]:
    return sorted({column for _, column in cells}, key=lambda column: number_first(column[1]))


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


_FRONT = (
    ("kld_predicted", "tuned, predicted"),
    ("kld_validation", "tuned, validation text"),
    ("kld_held_out", "tuned, held-out text"),
)


def tuning(runs: Sequence[Run], styles: Styles) -> Panel:
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
                uniform.add(bits, floored(divergence), tip)
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
                chart = heat_map(
                    list(dict.fromkeys(line for line, _ in cells)),
                    _layers_of(cells),
                    cells,
                    f"{title}, by layer",
                    log=not only_chosen,
                    label="layer",
                    written=only_chosen,
                )
                figures.append(Figure(title, caption, chart))
        panel.add(text_key(run), figures)
    return panel


def _front_of(rows: Sequence[Row], key: str, name: str) -> Series:
    series = Series(name)
    for row in rows:
        budget, divergence = number(row.get("budget")), number(row.get(key))
        if budget is not None and divergence is not None:
            series.add(budget, floored(divergence), f"{name}, {budget:.2f} bits per value: KL {short(divergence)} nats")
    return series
