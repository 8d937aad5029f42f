"""The command ``qkv eval recall``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_ints, parse_list
from qkv.cli.run import Run
from qkv_eval.options import PeersOption


def recall(
    formats: PeersOption = "int8,fp8_e4m3",
    tasks: Annotated[
        str, typer.Option("--tasks", help="passkey, many_keys, copy: which of them, a list")
    ] = "passkey,many_keys,copy",
    context: Annotated[
        str, typer.Option("--context", help="tokens in all, question and answer included; a list")
    ] = "512,1024",
    depths: Annotated[
        str, typer.Option("--depths", help="places of what is asked for, 0 (the start) to 1; a list")
    ] = "0.1,0.5,0.9",
    n: Annotated[int, typer.Option("--n", "--limit", min=1, help="answers for each depth")] = 8,
    keys: Annotated[int, typer.Option("--keys", min=1, help="secret words in a document of many_keys")] = 4,
    text: Annotated[
        str | None, typer.Option("--text", help="a text file for the prose (default: an embedded text)", metavar="FILE")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="documents in one pass")] = 4,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Does the model find what it read, near or far back? Keys hidden in prose, and copies of random sequences."""
    run = Run(json, seed, threads)
    names, wanted = parse_list(formats, "--formats"), parse_list(tasks, "--tasks")
    contexts, places = parse_ints(context, "--context"), _parse_depths(depths)

    from qkv_eval import recall as evaluation
    from qkv_eval.peers import with_baseline
    from qkv_eval.text import load_text

    with_baseline(names)  # what is wrong with them shows now, not after the model is loaded
    load_text(text)
    settings = evaluation.RecallSettings(names, wanted, contexts, places, n, keys, text, batch, seed)
    evaluation.check_settings(settings)
    loaded = run.load_model(model, dtype)
    with run.progress:
        results = evaluation.run(*loaded, settings, run.progress)
    rows = results["rows"]
    stepwise = ", ".join(dict.fromkeys(row["format"] for row in rows if row["scoring"] == "stepwise"))
    run.table(
        f"Recall, {model}, {dtype}, {run.threads} threads",
        {
            "task": "task",
            "context": "context|d",
            "depth": "depth|g",
            "format": "cache",
            "n": "n|d",
            "exact_match": "right|.1%",
            "drift": "drift|+z.1%",
            "loss": "loss|.4f",
            "loss_drift": "drift|+z.4f",
        },
        rows,
        f"right: answers that are right in every token; of copy: tokens. loss: nats per token of the right answer.\n"
        f"drift: against dynamic. Prose: {results['text']['name']}, all read from the stored values"
        + (f" (token by token: {stepwise})." if stepwise else "."),
    )
    for note in results["notes"]:
        run.warn(note)
    run.finish(rows, meta={"text": results["text"], "notes": results["notes"], "command": "eval recall"})


def _parse_depths(text: str) -> tuple[float, ...]:
    depths = []
    for item in parse_list(text, "--depths"):
        try:
            depths.append(float(item))
        except ValueError:
            raise ValueError(f"--depths: {item!r} will not do; give numbers from 0 to 1, such as 0.1,0.5,0.9") from None
    return tuple(dict.fromkeys(depths))
