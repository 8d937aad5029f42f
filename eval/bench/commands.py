"""The commands ``qkv bench``: they parse, call and print.

This module is loaded for ``qkv --help``, so it imports torch only inside the commands.
"""

from __future__ import annotations

import json as jsons
import subprocess
import sys
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

CachesOption = Annotated[str, typer.Option("--caches", help="caches beside dynamic: formats, YAML files, hf-...")]
BatchOption = Annotated[str, typer.Option("--batch", help="sequences, a list")]
PromptOption = Annotated[str, typer.Option("--context", help="tokens of the prompt, a list")]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk", min=1, help="tokens of the prompt in one pass (default: all at once)")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="timed turns of each peer")]

# The context that a cache's own share of a step is measured against.
BASE_CONTEXT = 16

bench = typer.Typer(
    help="Time and size of caches: a decode step, a prompt, memory, attention alone; what one saves at all; and a "
    "guard over the figures.",
    no_args_is_help=True,
)


@bench.command("decode")
def bench_decode(
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

    from qkv_eval.bench import decode
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = decode.DecodeSettings(
        names, batches, contexts, rounds, seed=seed, base=BASE_CONTEXT if share else None, steps=steps
    )
    with run.progress:
        results = decode.run(loaded, settings, run.progress)
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


@bench.command("prefill")
def bench_prefill(
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

    from qkv_eval.bench import prefill
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = prefill.PrefillSettings(names, batches, contexts, chunk, rounds, seed=seed)
    with run.progress:
        results = prefill.run(loaded, settings, run.progress)
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


@bench.command("memory")
def bench_memory(
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

    from qkv_eval.bench import memory
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    with run.progress:
        results = memory.run(
            loaded, memory.MemorySettings(names, batches, contexts, steps, chunk, seed=seed), run.progress
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


@bench.command("redundancy")
def bench_redundancy(
    caches: Annotated[
        str, typer.Option("--caches", help="caches beside none and dynamic: formats, YAML files, hf-...")
    ] = "dynamic,int8",
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", help="tokens of the prompt, a list")] = "64",
    new_tokens: Annotated[str, typer.Option("--new-tokens", help="tokens that are written after it, a list")] = "64",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="timed turns, beside the one that counts")] = 3,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Count how often keys are computed without a cache and with each, and time every token on the way."""
    run = Run(json, seed, threads)
    names, prompts = parse_list(caches, "--caches"), parse_ints(prompt_tokens, "--prompt-tokens")
    generated = parse_ints(new_tokens, "--new-tokens")

    from qkv_eval.bench import redundancy
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = redundancy.RedundancySettings(names, prompts, generated, rounds, seed=seed)
    with run.progress:
        results = redundancy.run(loaded, settings, run.progress)
    rows, fits, factors, notes = (results[key] for key in ("rows", "fits", "factors", "notes"))
    lengths = {"cache": "cache", "prompt": "prompt|d", "generated": "new|d"}
    by_row = {tuple(fit[key] for key in lengths): fit for fit in fits}
    shown = [{**by_row.get(tuple(row[key] for key in lengths), {}), **row} for row in rows]
    run.table(
        f"Positions whose keys were computed, {model}",
        lengths
        | {
            "positions_computed": "counted|,d",
            "expected": "expected|,d",
            "factor": "factor|.2f",
            "first_position_computed": "first|,d",
            "layer_positions_computed": "all layers|,d",
            "head_positions_computed": "all heads|,d",
        }
        | ({"squared": "g\N{SUPERSCRIPT TWO}|.3f", "linear": "g|.3f", "constant": "1|.3f"} if fits else {}),
        [{key: _no_dust(value) for key, value in row.items()} for row in shown],
        "counted: in one layer, each time; expected: by the closed form; factor: how often in the mean; first: how "
        "often those of position 0."
        + (" The last columns: counted, by least squares, as a polynomial of the new tokens so far." if fits else ""),
    )
    run.table(
        f"Time of the new tokens, {model}, {dtype}, {run.threads} threads",
        lengths
        | {
            "seconds": "seconds|.2f",
            "spread": "spread|.0%",
            "ms_first": "first, ms|.1f",
            "ms_second": "second, ms|.1f",
            "ms_last": "last, ms|.1f",
            "ms_per_1000_positions": "ms/1,000 positions|.1f",
            "r2": "r2|.3f",
            "same_tokens": "same tokens|d",
        },
        shown,
        "Medians; the first takes the prompt. ms/1,000 positions: the slope of a line through the times of all others. "
        "same tokens: those at the start that are as without a cache.",
    )
    run.table(
        "The factor for usual lengths, by the closed forms",
        {
            "prompt": "prompt|,d",
            "generated": "new|,d",
            "without_cache": "without a cache|,d",
            "with_cache": "with one|,d",
            "factor": "factor|,.1f",
        },
        factors,
        "Of every model: layers and heads multiply both counts alike.",
    )
    _finish(run, "bench redundancy", rows, notes, fits=fits, factors=factors)


@bench.command("kernel")
def bench_kernel(
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

    from qkv_eval.bench import kernel

    settings = kernel.KernelSettings(names, shapes, lengths, batches, rounds, seed=seed, dtype=types)
    with run.progress:
        results = kernel.run(settings, run.progress)
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


@bench.command("guard")
def bench_guard(
    results: Annotated[
        list[str] | None,
        typer.Argument(help="results of qkv bench --json; none: the benchmarks are run now", metavar="[RESULTS]..."),
    ] = None,
    expected: Annotated[
        str | None, typer.Option("--expected", help="the expected ratios (default: those in qkv_eval)", metavar="FILE")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="write what was measured as the new expectation into that file")
    ] = False,
    json: JsonOption = None,
    threads: ThreadsOption = None,
) -> int:
    """Compare ratios of benchmarks with those that are expected; exit with 1 if one got worse.

    Times differ between machines and days; ratios of times out of one run hardly do, and sizes not at all.
    """
    run = Run(json, 0, threads)

    from qkv_eval.bench import guard

    known = guard.read_expected(expected or guard.EXPECTED)
    given = [guard.read_results(path) for path in results or ()] or _run_benchmarks(known.runs, threads)
    judgement = guard.judge(known, given)
    rows = [verdict.as_row() for verdict in judgement.verdicts]
    run.table(
        f"Ratios against {known.path.name}",
        {
            "check": "check",
            "measured": "measured|.3f",
            "expected": "expected|.3f",
            "limit": "limit|.3f",
            "change_percent": "change %|+.1f",
            "spread": "spread|.0%",
            "outcome": "outcome",
        },
        rows,
        "change: above 0 is better; limit: where a ratio begins to be worse than it may be.",
    )
    for verdict in judgement.verdicts:
        if verdict.note:
            run.warn(f"{verdict.check.name}: {verdict.note}")
    for note in judgement.notes:
        run.warn(note)
    run.finish(rows, meta={"command": "bench guard", "notes": list(judgement.notes)})
    if update:
        content = guard.updated(known, judgement, given)
        try:
            known.path.write_text(guard.as_text(content), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {str(known.path)!r}: {error.strerror}") from error
        run.warn(f"wrote {known.path}")
        return 0
    for verdict in judgement.failures:
        change = verdict.change_percent
        words = "not measured" if change is None else f"{-change:.1f} % worse than expected"
        run.warn(f"REGRESSION: {verdict.check.name}: {words}")
    return 1 if judgement.failures else 0


def _run_benchmarks(runs: Sequence[Sequence[str]], threads: int | None) -> list[dict[str, Any]]:
    """Runs benchmarks, each in a process of its own so that none meets what another has left in memory."""
    if not runs:
        raise ValueError("the expectations name no runs; give results of qkv bench --json")
    found = []
    for arguments in runs:
        more = ["--json", "-"] + ([] if threads is None else ["--threads", str(threads)])
        main = [sys.executable, "-c", "from qkv.cli import main; main()"]
        # With the results on standard output, what is for people goes to standard error, as here.
        done = subprocess.run([*main, "bench", *arguments, *more], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"qkv bench {' '.join(arguments)} failed, see above")
        found.append(jsons.loads(done.stdout))
    return found


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


def _no_dust(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and abs(value) < 1e-6 else value


def _mega(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def _finish(run: Run, command: str, rows: list[dict[str, Any]], notes: list[str], **more: Any) -> None:
    for note in notes:
        run.warn(note)
    run.finish(rows, meta={"command": command, "notes": notes}, **more)
