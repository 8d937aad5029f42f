"""The commands ``qkv compare`` and ``qkv bench``: they parse, call and print.

This module is loaded for ``qkv --help``, so it imports torch only inside the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text as RichText

from qkv.cli.options import (
    DtypeOption,
    JsonOption,
    ModelOption,
    SeedOption,
    ThreadsOption,
    parse_ints,
    parse_list,
    parse_shapes,
)
from qkv.cli.run import Run

if TYPE_CHECKING:
    from collections.abc import Mapping

RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="timed turns of each peer")]

bench = typer.Typer(help="Time caches: a whole decode step, or attention alone.", no_args_is_help=True)


def compare(
    formats: Annotated[
        str, typer.Option("--formats", help="caches beside dynamic: formats, YAML files, hf-...")
    ] = "none,int8,fp8_e4m3",
    text: Annotated[
        str | None, typer.Option("--text", help="a text file to score (default: an embedded text)", metavar="FILE")
    ] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="tokens in a window of text")] = 2048,
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


@bench.command("decode")
def bench_decode(
    caches: Annotated[
        str, typer.Option("--caches", help="caches beside dynamic: formats, YAML files, hf-...")
    ] = "dynamic,none,int8",
    batch: Annotated[str, typer.Option("--batch", help="sequences, a list")] = "1",
    context: Annotated[str, typer.Option("--context", help="tokens in the cache, a list")] = "128,4096",
    rounds: RoundsOption = 15,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Time one decode step of a whole model through each cache, with DynamicCache in the same run."""
    run = Run(json, seed, threads)
    names, batches = parse_list(caches, "--caches"), parse_ints(batch, "--batch")
    contexts = parse_ints(context, "--context")

    from qkv_eval.bench import decode
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    with run.progress:
        results = decode.run(loaded, decode.DecodeSettings(names, batches, contexts, rounds, seed=seed), run.progress)
    rows, notes = results["rows"], results["notes"]
    run.table(
        f"One decode step, {model}, {dtype}, {run.threads} threads",
        {
            "cache": "cache",
            "batch": "batch|d",
            "context": "context|d",
            "ms_per_step": "ms/step|.1f",
            "spread": "spread|.0%",
            "ratio_to_dynamic": "speed|.2f",
            "kv_mb": "cache MB|.1f",
            "tokens_per_s": "tokens/s|.1f",
        },
        [{**row, "kv_mb": row["kv_bytes"] / 1e6} for row in rows],
        "Medians; spread: interquartile range / median; speed: DynamicCache's time / this one's, in turn in one run.",
    )
    _finish(run, "bench decode", rows, notes)


@bench.command("kernel")
def bench_kernel(
    formats: Annotated[str, typer.Option("--formats", help="formats of ours, a list")] = "int8,fp8_e4m3",
    shape: Annotated[
        str, typer.Option("--shape", help="kv_heads x query heads per kv head x head_dim, a list")
    ] = "3x3x64",
    kv_len: Annotated[str, typer.Option("--kv-len", help="tokens in the cache, a list")] = "8192",
    batch: Annotated[str, typer.Option("--batch", help="sequences, a list")] = "1",
    rounds: RoundsOption = 30,
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Time attention alone over each format, beside the fastest way that torch offers on fp32 tensors."""
    run = Run(json, seed, threads)
    names, shapes = parse_list(formats, "--formats"), parse_shapes(shape, "--shape")
    lengths, batches = parse_ints(kv_len, "--kv-len"), parse_ints(batch, "--batch")

    from qkv_eval.bench import kernel

    with run.progress:
        results = kernel.run(kernel.KernelSettings(names, shapes, lengths, batches, rounds, seed=seed), run.progress)
    rows, notes = results["rows"], results["notes"]
    run.table(
        f"Attention of one query token, {run.threads} threads",
        {
            "format": "format",
            "backend": "backend",
            "shape": "shape",
            "batch": "batch|d",
            "kv_len": "kv_len|d",
            "ms": "ms|.3f",
            "sdpa_ms": "torch ms|.3f",
            "speedup": "speedup|.2f",
            "gb_per_s": "GB/s|.1f",
            "fraction_of_read_bandwidth": "of memory|.0%",
        },
        [{**row, "shape": f"{row['kv_heads']}x{row['q_per_kv']}x{row['head_dim']}"} for row in rows],
        f"Medians; torch: its fastest way on fp32 tensors; memory reads at {rows[0]['read_gb_per_s']:.1f} GB/s here.",
    )
    _finish(run, "bench kernel", rows, notes)


def _finish(run: Run, command: str, rows: list[dict[str, Any]], notes: list[str]) -> None:
    for note in notes:
        run.warn(note)
    run.finish(rows, meta={"command": command, "notes": notes})


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
