"""The command ``qkv eval lm``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run
from qkv_eval.options import PeersOption


def lm(
    formats: PeersOption = "none,int8,fp8_e4m3",
    tasks: Annotated[
        str, typer.Option("--tasks", help="tasks of lm-eval; with --data these three are read from local files")
    ] = "arc_easy,piqa,lambada_openai",
    data: Annotated[
        str | None, typer.Option("--data", help="a folder with arc_easy.jsonl, piqa.jsonl, ...", metavar="DIR")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="documents of each task; 0: all")] = 300,
    batch: Annotated[int, typer.Option("--batch", min=1, help="continuations in one pass")] = 32,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Tasks of lm-eval through each cache: accuracy, drift, and which answers changed."""
    run = Run(json, seed, threads)
    names, wanted = parse_list(formats, "--formats"), parse_list(tasks, "--tasks")

    from qkv_eval import lm_compare as evaluation
    from qkv_eval.lm_tasks import check_folder, load_tasks
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    evaluation.check_statistics()
    if data is not None:
        check_folder(data)
    with run.progress.step("reading the tasks"):
        documents = load_tasks(wanted, data, seed)
    settings = evaluation.LmSettings(names, wanted, data, limit or None, batch, seed)
    loaded = run.load_model(model, dtype)
    with run.progress:
        results = evaluation.run(*loaded, settings, run.progress, documents)
    rows, notes, seconds = results["rows"], results["notes"], results["seconds"]
    stepwise = ", ".join(dict.fromkeys(row["format"] for row in rows if row["scoring"] == "stepwise"))
    run.table(
        f"{model}, {dtype}, {run.threads} threads",
        {
            "task": "task",
            "metric": "metric",
            "format": "cache",
            "n": "docs|d",
            "value": "value|.4f",
            "stderr": "std.\nerror|.4f",
            "drift": "drift|+.4f",
            "drift_stderr": "std.\nerror|.4f",
            "answers_changed": "answers\nchanged|d",
            "to_right": "to\nright|d",
            "to_wrong": "to\nwrong|d",
            "mcnemar_p": "McNemar\np|.3f",
        },
        rows,
        "Drift: from dynamic, the unquantized cache, with the standard error of the difference document by document.\n"
        "McNemar: the chance of directions at least so uneven if both were equally likely.\n"
        f"{sum(seconds.values()):.0f} s in all: "
        + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        + (f". Token by token: {stepwise}." if stepwise else "."),
    )
    for note in notes:
        run.warn(note)
    run.finish(rows, meta={"notes": notes, "seconds": seconds, "limit": limit, "batch": batch, "command": "eval lm"})
