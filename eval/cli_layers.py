"""The command ``qkv eval layers``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run
from qkv_eval.options import SeenTextOption, WindowOption


def layers(
    formats: Annotated[str, typer.Option("--formats", help="formats of ours, YAML files; a list")] = "int8,fp8_e4m3",
    text: SeenTextOption = None,
    window: WindowOption = 512,
    limit: Annotated[int, typer.Option("--limit", min=1, help="windows to run over")] = 1,
    heads: Annotated[bool, typer.Option("--heads", help="print the rows of heads as well")] = False,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Where a format's error comes from: errors by layer and head, and what each layer alone does to predictions."""
    run = Run(json, seed, threads)
    names = parse_list(formats, "--formats")

    from qkv_eval import layers as evaluation
    from qkv_eval.peers import with_baseline
    from qkv_eval.text import load_text

    with_baseline(names)  # what is wrong with them shows now, not after the model is loaded
    load_text(text)
    loaded = run.load_model(model, dtype)
    settings = evaluation.LayersSettings(names, text, window, limit, seed)
    with run.progress:
        results = evaluation.run(*loaded, settings, run.progress)
    rows, scored = results["rows"], results["text"]
    for total in results["totals"]:
        mine = [row for row in rows if row["format"] == total["format"] and (heads or row["head"] is None)]
        columns = {"layer": "layer|d"} | ({"head": "head|d"} if heads else {})
        run.table(
            f"{total['format']}, {model}, {dtype}: {scored['name']}, {scored['windows']} x {window} tokens",
            columns
            | {
                "key_error": "keys\n%|.3f",
                "value_error": "values\n%|.3f",
                "score_error": "scores\n%|.3f",
                "output_error": "output\n%|.3f",
                "kld_alone": "KL of this\nlayer alone|z.6f",
            },
            [{key: _percent(key, value) for key, value in row.items()} for row in mine],
            f"Errors: root mean square, relative. All layers stored so: KL {total['kld']:z.6f}, perplexity "
            f"{total['dppl_percent']:+z.3f}%;\nthe layers alone add up to {total['kld_alone_sum']:z.6f}.",
        )
    for note in results["notes"]:
        run.warn(note)
    meta = {"text": scored, "notes": results["notes"], "command": "eval layers"}
    run.finish(rows, totals=results["totals"], meta=meta)


def _percent(key: str, value: object) -> object:
    return 100 * value if key.endswith("_error") and isinstance(value, float) else value
