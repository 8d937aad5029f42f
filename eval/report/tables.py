"""The tables of the page: which columns each kind of rows has, and how values are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv_eval.report.load import NOISE_FLOOR, OTHER, UNQUANTIZED, Run, name_of, number
from qkv_eval.report.series import short


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and how its values are written (see :func:`write`)."""

    key: str
    heading: str
    form: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its heading; ``cells`` are written out, and a column of numbers stands to the right."""

    title: str
    run: Run
    columns: tuple[Column, ...]
    cells: tuple[tuple[str, ...], ...]
    muted: frozenset[int]


_SCORES = (
    Column("ppl", "perplexity", ".3f"),
    Column("ppl_stderr", "std. error", ".3f"),
    Column("dppl_percent", "change, %", "+z.3f"),
    Column("kld_mean", "KL, nats", "short"),
    Column("kld_median", "median", "short"),
    Column("kld_p99", "99 %", "short"),
    Column("kld_p999", "99.9 %", "short"),
    Column("kld_max", "max", "short"),
    Column("same_top_percent", "same top, %", ".2f"),
)
_CACHE = Column("cache", "cache")
_FORMAT = Column("format", "cache")
_SIZES = (Column("batch", "batch", ",d"), Column("context", "context", ",d"))
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "compare": (
        _FORMAT,
        Column("bits_per_value", "bits/value", ".2f"),
        Column("kv_bytes", "cache, MB", "mega"),
        *_SCORES,
        Column("ms_per_step", "ms/step", ".1f"),
        Column("ratio_to_dynamic", "speed", ".2f"),
    ),
    "eval ppl": (
        _FORMAT,
        Column("scoring", "scoring"),
        Column("tokens", "predictions", ",d"),
        Column("bits_per_value", "bits/value", ".2f"),
        *_SCORES,
    ),
    "eval lm": (
        _FORMAT,
        Column("task", "task"),
        Column("metric", "metric"),
        Column("value", "value", ".4f"),
        Column("stderr", "std. error", ".4f"),
        Column("baseline", "unquantized", ".4f"),
        Column("drift", "drift", "+z.4f"),
        Column("answers_changed", "answers changed", "short"),
        Column("n", "n", ",d"),
    ),
    "eval recall": (
        Column("task", "task"),
        _FORMAT,
        Column("context", "context", ",d"),
        Column("depth", "depth", "short"),
        Column("n", "n", ",d"),
        Column("exact_match", "right", ".1%"),
        Column("drift", "drift", "+z.1%"),
        Column("loss", "loss, nats", ".4f"),
        Column("loss_drift", "drift of the loss", "+z.4f"),
        Column("scoring", "scoring"),
    ),
    "eval layers": (
        _FORMAT,
        Column("layer", "layer", ",d"),
        Column("head", "head", ",d"),
        Column("key_error", "keys", "short"),
        Column("value_error", "values", "short"),
        Column("score_error", "scores", "short"),
        Column("output_error", "output", "short"),
        Column("kld_alone", "KL alone, nats", "short"),
    ),
    "tune": (
        Column("layer", "layer", ",d"),
        Column("side", "side"),
        Column("format", "candidate"),
        Column("bits_per_value", "bits/value", ".2f"),
        Column("kld", "KL alone, nats", "short"),
        Column("kld_stderr", "std. error", "short"),
        Column("time_share", "time, of int8's", ".2f"),
        Column("chosen", "chosen"),
    ),
    "bench kernel": (
        _FORMAT,
        Column("dtype", "query"),
        Column("backend", "backend"),
        Column("kv_heads", "kv heads", ",d"),
        Column("q_per_kv", "queries per kv head", ",d"),
        Column("head_dim", "head_dim", ",d"),
        Column("batch", "batch", ",d"),
        Column("kv_len", "tokens", ",d"),
        Column("ms", "ms", ".3f"),
        Column("sdpa_ms", "torch, ms", ".3f"),
        Column("speedup", "speed-up", ".2f"),
        Column("sdpa_bf16_ms", "torch in bf16, ms", ".3f"),
        Column("speedup_bf16", "speed-up against it", ".2f"),
        Column("gb_per_s", "GB/s", ".1f"),
        Column("fraction_of_read_bandwidth", "of memory", ".0%"),
    ),
    "bench decode": (
        _CACHE,
        *_SIZES,
        Column("ms_per_step", "ms/step", ".1f"),
        Column("spread", "spread", ".0%"),
        Column("ratio_to_dynamic", "speed", ".2f"),
        Column("cache_ms", "own share, ms", ".2f"),
        Column("ratio_after_steps", "after many steps", ".3f"),
        Column("kv_bytes", "cache, MB", "mega"),
        Column("bits_per_value", "bits/value", ".2f"),
        Column("tokens_per_s", "tokens/s", ".1f"),
    ),
    "bench prefill": (
        _CACHE,
        *_SIZES,
        Column("seconds", "seconds", ".3f"),
        Column("spread", "spread", ".0%"),
        Column("ratio_to_dynamic", "speed", ".2f"),
        Column("peak_bytes", "peak, MB", "mega"),
    ),
    "bench memory": (
        _CACHE,
        *_SIZES,
        Column("kv_bytes", "cache, MB", "mega"),
        Column("bytes_per_token", "bytes/token", ",.0f"),
        Column("peak_bytes", "peak, MB", "mega"),
        Column("peak_step_bytes", "in steps, MB", "mega"),
        Column("ratio_to_fp16", "against fp16", ".2f"),
    ),
    "bench redundancy": (
        _CACHE,
        Column("prompt", "prompt", ",d"),
        Column("generated", "new tokens", ",d"),
        Column("positions_computed", "positions computed", ",d"),
        Column("expected", "by the closed form", ",d"),
        Column("factor", "factor", ".2f"),
        Column("first_position_computed", "of the first", ",d"),
        Column("layer_positions_computed", "in all layers", ",d"),
        Column("head_positions_computed", "in all heads", ",d"),
        Column("seconds", "seconds", ".2f"),
        Column("ms_first", "first, ms", ".1f"),
        Column("ms_second", "second, ms", ".1f"),
        Column("ms_last", "last, ms", ".1f"),
        Column("same_tokens", "same tokens", ",d"),
        Column("kv_bytes", "cache, MB", "mega"),
    ),
}
TITLES = {
    "compare": "Comparison",
    "eval ppl": "Perplexity and divergence",
    "eval lm": "Tasks of lm-eval",
    "eval recall": "Recall",
    "eval layers": "Layers and heads",
    "tune": "Tuning: costs of single layers",
    "bench kernel": "Attention alone",
    "bench decode": "Decode step",
    "bench prefill": "Prompt",
    "bench memory": "Memory",
    "bench redundancy": "Keys computed, without a cache and with one",
    OTHER: "Other results",
}


def make_table(run: Run) -> Table:
    """Returns the table of a run: the columns that it has values for; of rows of an unknown kind, all plain values."""
    kind = run.kind
    columns = _COLUMNS.get(kind) or tuple(
        Column(str(key), str(key), "short" if all(number(row.get(key)) is not None for row in run.rows) else "")
        for key in dict.fromkeys(key for row in run.rows for key in row)
        if not any(isinstance(row.get(key), (dict, list)) for row in run.rows)
    )
    columns = tuple(column for column in columns if any(row.get(column.key) is not None for row in run.rows))
    cells = tuple(tuple(write(row.get(column.key), column.form) for column in columns) for row in run.rows)
    muted = frozenset(i for i, row in enumerate(run.rows) if name_of(row) in (UNQUANTIZED, NOISE_FLOOR))
    return Table(TITLES[kind], run, columns, cells, muted)


def write(value: Any, form: str = "") -> str:
    """Writes a value for a table: ``short`` with three digits, ``mega`` in millions, otherwise a format of Python."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    known = number(value)
    if known is None or not form:
        return str(value)
    if form == "short":
        return short(known)
    if form == "mega":
        return f"{known / 1e6:,.1f}"
    return format(int(known) if form.endswith("d") else known, form)
