"""The commands ``qkv bench``, the longer ones from ``cli_*.py``: they parse, call and print.

This module is loaded for ``qkv --help``, so it imports torch only inside the commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

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
from qkv_eval.bench.cli_guard import guard
from qkv_eval.bench.cli_offload import offload
from qkv_eval.bench.cli_redundancy import redundancy
from qkv_eval.options import RoundsOption

CachesOption = Annotated[str, typer.Option("--caches", help="caches beside dynamic: formats, YAML files, hf-...")]
BatchOption = Annotated[str, typer.Option("--batch", help="sequences, a list")]
PromptOption = Annotated[str, typer.Option("--context", help="tokens of the prompt, a list")]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk", min=1, help="tokens of the prompt in one pass (default: all at once)")
]

# The context that a cache's own share of a step is measured against.
BASE_CONTEXT = 16


def decode(
    caches: CachesOption = "dynamic,none,int8",
    batch: BatchOption = "1",
    context: Annotated[str, typer.Option("--context", help="tokens in the cache, a list")] = "128,4096",
    rounds: RoundsOption = 15,
    share: Annotated[
        bool,
        typer.Option("--share", help=f"its own share too: what a step takes above one at context {BASE_CONTEXT}"),
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="time caches as well that came to their context by so many steps")
    ] = 0,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Time one decode step of a whole model through each cache, with DynamicCache in the same run.

    With three contexts or more, a line is fitted to the time over the context.
    """
    run = Run(json, seed, threads)
    names, batches = parse_list(caches, "--caches"), parse_ints(batch, "--batch")
    contexts = parse_ints(context, "--context")
    if steps >= min(contexts):
        raise ValueError(f"--steps {steps} must be less than every context; the smallest is {min(contexts)}")

    from qkv_eval.bench import decode as benchmark
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = benchmark.DecodeSettings(
        names, batches, contexts, rounds, seed=seed, base=BASE_CONTEXT if share else None, steps=steps
    )
    with run.progress:
        results = benchmark.run(loaded, settings, run.progress)
    rows, fits, notes = results["rows"], results["fits"], results["notes"]
    columns = {
        "cache": "cache",
        "batch": "batch|d",
        "context": "context|d",
        "ms_per_step": "ms/step|.1f",
        "spread": "spread|.0%",
        "ratio_to_dynamic": "speed|.2f",
        "kv_mb": "cache MB|.1f",
        "tokens_per_s": "tokens/s|.1f",
    }
    caption = (
        "Medians; spread: interquartile range / median; speed: DynamicCache's time / this one's, in turn in one run."
    )
    if share:
        columns |= {"cache_ms": "share ms|.2f", "cache_ms_iqr": "+-|.2f"}
        caption += (
            f" share: what a step takes above one at context {BASE_CONTEXT}, in the same turns; +-: the width of the "
            "middle half of the differences of single turns."
        )
    if steps:
        columns |= {"ratio_after_steps": "steps|.3f"}
        caption += (
            f"\nsteps: the time / that of the same cache after {steps} steps; 1: nothing grows with their number."
        )
    title = f"One decode step, {model}, {dtype}, {run.threads} threads"
    run.table(title, columns, [{**row, "kv_mb": row["kv_bytes"] / 1e6} for row in rows], caption)
    if fits:
        _print_fits(run, fits)
    _finish(run, "bench decode", rows, notes, fits=fits)


def prefill(
    caches: CachesOption = "dynamic,none,int8",
    batch: BatchOption = "1",
    context: PromptOption = "1024",
    chunk: ChunkOption = None,
    rounds: RoundsOption = 5,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Time a prompt's pass through a whole model into each cache, and follow the most memory that it takes."""
    run = Run(json, seed, threads)
    names, batches = parse_list(caches, "--caches"), parse_ints(batch, "--batch")
    contexts = parse_ints(context, "--context")

    from qkv_eval.bench import prefill as benchmark
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = benchmark.PrefillSettings(names, batches, contexts, chunk, rounds, seed=seed)
    with run.progress:
        results = benchmark.run(loaded, settings, run.progress)
    rows, notes = results["rows"], results["notes"]
    run.table(
        f"A prompt, {model}, {dtype}, {run.threads} threads" + (f", {chunk} tokens in a pass" if chunk else ""),
        {
            "cache": "cache",
            "batch": "batch|d",
            "context": "context|d",
            "seconds": "seconds|.3f",
            "spread": "spread|.0%",
            "ratio_to_dynamic": "speed|.2f",
            "tokens_per_s": "tokens/s|.0f",
            "kv_mb": "cache MB|.1f",
            "peak_mb": "peak MB|.1f",
            "rss_mb": "process MB|.1f",
        },
        [
            {
                **row,
                "kv_mb": _mega(row["kv_bytes"]),
                "peak_mb": _mega(row["peak_bytes"]),
                "rss_mb": _mega(row["peak_rss_bytes"]),
            }
            for row in rows
        ],
        "Medians; speed: DynamicCache's time / this one's, in turn in one run. peak: the most that all tensors took at "
        "once above the weights, in a pass of its own; process: by how much its resident size rose, in another.",
    )
    _finish(run, "bench prefill", rows, notes)


def memory(
    caches: CachesOption = "dynamic,none,int8",
    batch: BatchOption = "1",
    context: PromptOption = "1024",
    steps: Annotated[int, typer.Option("--steps", min=0, help="decode steps after the prompt")] = 4,
    chunk: ChunkOption = None,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Measure what each cache holds after a prompt and some steps, and the most memory on the way there."""
    run = Run(json, seed, threads)
    names, batches = parse_list(caches, "--caches"), parse_ints(batch, "--batch")
    contexts = parse_ints(context, "--context")

    from qkv_eval.bench import memory as benchmark
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    with run.progress:
        results = benchmark.run(
            loaded, benchmark.MemorySettings(names, batches, contexts, steps, chunk, seed=seed), run.progress
        )
    rows, notes = results["rows"], results["notes"]
    run.table(
        f"Memory, {model}, {dtype}" + (f", {chunk} tokens in a pass" if chunk else ""),
        {
            "cache": "cache",
            "batch": "batch|d",
            "context": "context|d",
            "kv_mb": "cache MB|.1f",
            "bytes_per_token": "bytes/token|,.0f",
            "bits_per_value": "bits/value|.2f",
            "ratio_to_fp16": "against fp16|.2f",
            "peak_mb": "peak MB|.1f",
            "step_mb": "in steps|.1f",
        },
        [
            {
                **row,
                "kv_mb": _mega(row["kv_bytes"]),
                "peak_mb": _mega(row["peak_bytes"]),
                "step_mb": _mega(row["peak_step_bytes"]),
            }
            for row in rows
        ],
        f"After the prompt and {steps} steps, spare room included (bits/value: without). against fp16: a plain 16-bit "
        "cache / this one. peak: the most that all tensors took at once above the weights; in steps: during the steps "
        "alone.",
    )
    _finish(run, "bench memory", rows, notes)


def kernel(
    formats: Annotated[
        str, typer.Option("--formats", help="caches of ours, a list: formats, presets, YAML files")
    ] = "int8,fp8_e4m3",
    shape: Annotated[
        str, typer.Option("--shape", help="kv_heads x query heads per kv head x head_dim, a list")
    ] = "3x3x64",
    kv_len: Annotated[str, typer.Option("--kv-len", help="tokens in the cache, a list")] = "8192",
    batch: BatchOption = "1",
    dtype: Annotated[
        str, typer.Option("--dtype", help="of the query, a list: fp32, bf16; with bf16, torch's best on bf16 as well")
    ] = "fp32",
    rounds: RoundsOption = 30,
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Time attention alone over each format, beside the fastest way that torch offers on unquantized tensors."""
    run = Run(json, seed, threads)
    names, shapes = parse_list(formats, "--formats"), parse_shapes(shape, "--shape")
    lengths, batches = parse_ints(kv_len, "--kv-len"), parse_ints(batch, "--batch")
    types = parse_list(dtype, "--dtype")

    from qkv_eval.bench import kernel as benchmark

    settings = benchmark.KernelSettings(names, shapes, lengths, batches, rounds, seed=seed, dtype=types)
    with run.progress:
        results = benchmark.run(settings, run.progress)
    rows, notes = results["rows"], results["notes"]
    columns = {
        "format": "format",
        "dtype": "query",
        "backend": "backend",
        "shape": "shape",
        "batch": "batch|d",
        "kv_len": "kv_len|d",
        "ms": "ms|.3f",
        "sdpa_ms": "torch ms|.3f",
        "speedup": "speedup|.2f",
    }
    caption = "Medians; torch: its fastest way on fp32 tensors"
    if "sdpa_bf16_ms" in rows[0]:
        columns |= {"sdpa_bf16_ms": "bf16 ms|.3f", "speedup_bf16": "speedup|.2f"}
        caption += ", and on bf16 tensors"
    columns |= {"gb_per_s": "GB/s|.1f", "fraction_of_read_bandwidth": "of memory|.0%"}
    run.table(
        f"Attention of one query token, {run.threads} threads",
        columns,
        [{**row, "shape": f"{row['kv_heads']}x{row['q_per_kv']}x{row['head_dim']}"} for row in rows],
        f"{caption}; memory reads at {rows[0]['read_gb_per_s']:.1f} GB/s here.",
    )
    _finish(run, "bench kernel", rows, notes)


def _print_fits(run: Run, fits: Sequence[dict[str, Any]]) -> None:
    run.table(
        "Time of a step as a line over the context",
        {
            "cache": "cache",
            "batch": "batch|d",
            "contexts": "points|d",
            "range": "contexts",
            "us_per_1000_tokens": "\N{MICRO SIGN}s/1,000 tokens|.1f",
            "intercept_ms": "at 0, ms|.2f",
            "r2": "r2|.5f",
            "max_deviation_ms": "farthest, ms|.2f",
            "max_deviation_percent": "farthest, %|.1f",
            "worst_context": "at|d",
        },
        [{**fit, "range": f"{fit['first_context']} to {fit['last_context']}"} for fit in fits],
        "Least squares; the slope is what 1,000 tokens more in each sequence add, divided by the sequences.",
    )


def _mega(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def _finish(run: Run, command: str, rows: list[dict[str, Any]], notes: list[str], **more: Any) -> None:
    for note in notes:
        run.warn(note)
    run.finish(rows, meta={"command": command, "notes": notes}, **more)


bench = typer.Typer(
    help="Time and size of caches: a decode step, a prompt, memory, attention alone; what one saves at all; and a "
    "guard over the figures.",
    no_args_is_help=True,
)
for command in (decode, prefill, memory, redundancy, kernel, guard, offload):
    bench.command(command.__name__)(command)
