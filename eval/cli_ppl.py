"""The command ``qkv eval ppl``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run
from qkv_eval.options import PeersOption, ScoredTextOption, WindowOption


def ppl(
    formats: PeersOption = "none,int8,fp8_e4m3",
    text: ScoredTextOption = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="a data set of the hub to score", metavar="NAME[:CONFIG:SPLIT:COLUMN]"),
    ] = None,
    window: WindowOption = 2048,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="tokens from one window to the next (default: no overlap)")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="windows to score; 0: all")] = 8,
    scoring: Annotated[str, typer.Option("--scoring", help="auto, chunked, stepwise or prefill-exact")] = "auto",
    positions: Annotated[bool, typer.Option("--positions", help="print the divergence by position as well")] = False,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Perplexity and divergence from the unquantized cache, every prediction made from the stored values."""
    run = Run(json, seed, threads)
    names = parse_list(formats, "--formats")

    from qkv_eval import ppl as evaluation
    from qkv_eval.peers import with_baseline
    from qkv_eval.text import load_text

    with_baseline(names)
    if dataset is None:
        load_text(text)
    settings = evaluation.PplSettings(names, text, dataset, window, stride, limit or None, scoring, seed=seed)
    loaded = run.load_model(model, dtype)
    with run.progress:
        results = evaluation.run(*loaded, settings, run.progress)
    rows, scored = results["rows"], results["text"]
    run.table(
        f"{model}, {dtype}, {run.threads} threads: {scored['name']}, {scored['windows']} windows of {window}",
        {
            "format": "cache",
            "scoring": "scoring",
            "bits_per_value": "bits/\nvalue|.2f",
            "ppl": "perplex-\nity|.3f",
            "ppl_stderr": "std.\nerror|.3f",
            "dppl_percent": "change\n%|+.3f",
            "kld_mean": "KL\nmean|z.5f",
            "kld_median": "\nmedian|z.5f",
            "kld_p99": "\n99%|z.4f",
            "kld_p999": "\n99.9%|z.4f",
            "kld_max": "\nmax|.3f",
            "same_top_percent": "same\ntop %|.2f",
            "seconds_ratio": "time|.2f",
        },
        rows,
        f"{rows[0]['tokens']} predictions. KL: nats, against the unquantized cache of this run. Time: of its passes, "
        "over the unquantized cache's.",
    )
    if positions:
        run.table(
            "KL by position in the window",
            {"format": "cache"}
            | {str(i): f"{part['from']}-{part['to']}|z.5f" for i, part in enumerate(rows[0]["by_position"])},
            [
                {"format": row["format"], **{str(i): part["kld_mean"] for i, part in enumerate(row["by_position"])}}
                for row in rows
            ],
        )
    for note in results["notes"]:
        run.warn(note)
    run.finish(rows, meta={"text": scored, "notes": results["notes"], "command": "eval ppl"})
