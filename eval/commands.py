"""The command ``qkv compare``, and ``qkv bench`` from ``bench.commands``: they parse, call and print.

This module is loaded for ``qkv --help``, so it imports torch only inside the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text as RichText

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run
from qkv_eval.bench.commands import bench
from qkv_eval.options import PeersOption, RoundsOption, ScoredTextOption, WindowOption

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["bench", "compare"]


def compare(
    formats: PeersOption = "none,int8,fp8_e4m3",
    text: ScoredTextOption = None,
    window: WindowOption = 2048,
    limit: Annotated[int, typer.Option("--limit", min=1, help="windows to score")] = 2,
    context: Annotated[int, typer.Option("--context", min=1, help="tokens in the cache when a step is timed")] = 4096,
    batch: Annotated[int, typer.Option("--batch", min=1, help="sequences in the cache when a step is timed")] = 4,
    rounds: RoundsOption = 11,
    sample_tokens: Annotated[
        int, typer.Option("--sample-tokens", min=0, help="length of the sample texts; 0: none")
    ] = 48,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Compare cache formats on one model and text: memory, quality, speed, and a sample of what it writes."""
    run = Run(json, seed, threads)
    names = parse_list(formats, "--formats")

    from qkv_eval import compare as comparison
    from qkv_eval.peers import with_baseline
    from qkv_eval.text import load_text

    with_baseline(names)  # what is wrong with them shows now, not after the model is loaded
    load_text(text)
    loaded = run.load_model(model, dtype)
    settings = comparison.CompareSettings(
        names, text, window, limit, context, batch, rounds, sample_tokens=sample_tokens, seed=seed
    )
    with run.progress:
        results = comparison.run(*loaded, settings, run.progress)
    rows, notes, samples, scored = (results[key] for key in ("rows", "notes", "samples", "text"))
    stepwise = ", ".join(row["format"] for row in rows if row["scoring"] == "stepwise")
    run.table(
        f"{model}, {dtype}, {run.threads} threads",
        {
            "format": "cache",
            "bits_per_value": "bits/\nvalue|.2f",
            "kv_mb": "cache\nMB|.0f",
            "ppl": "perplex-\nity|.3f",
            "dppl_percent": "change\n%|+.3f",
            "kld_mean": "KL|.5f",
            "same_top_percent": "same\ntop %|.2f",
            "ms_per_step": "ms/\nstep|.1f",
            "ratio_to_dynamic": "speed|.2f",
        },
        [{**row, "kv_mb": row["kv_bytes"] / 1e6} for row in rows],
        f"Memory and time of a decode step at batch {batch}, context {context}; speed: DynamicCache's time / its.\n"
        f"Quality: {rows[0]['tokens']} tokens of {scored['name']} in windows of {window}, through the stored values"
        + (f" (token by token: {stepwise})." if stepwise else "."),
    )
    if samples:
        _print_samples(run, settings.prompt, samples)
    for note in notes:
        run.warn(note)
    run.finish(rows, samples=samples, meta={"command": "compare", "text": scored, "notes": notes})


def _print_samples(run: Run, prompt: str, samples: list[Mapping[str, Any]]) -> None:
    """Prints what was written through each cache, the part that equals the first cache's text dimmed."""
    first = samples[0]
    run.out.print(f"[bold]Prompt[/bold]: {escape(prompt)}")
    for sample in samples:
        same, title = len(sample["same_text"]), sample["format"]
        text = RichText.assemble((sample["text"][:same], "dim"), sample["text"][same:])
        if sample is first:
            text = RichText(sample["text"])
        elif sample["text"] == first["text"]:
            text = RichText(f"the same {sample['tokens']} tokens as {first['format']}", "dim")
        else:
            title += f": the first {sample['same']} of {sample['tokens']} tokens as {first['format']}"
        run.out.print(Panel(text, title=escape(title), title_align="left", width=min(100, run.out.width)))
