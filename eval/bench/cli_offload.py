"""The command ``qkv bench offload``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_bytes
from qkv.cli.run import Run
from qkv_eval.options import CacheFormatOption


def offload(
    cache_format: CacheFormatOption = "int8",
    context: Annotated[int, typer.Option("--context", min=1, help="tokens in the cache")] = 8192,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="that the cache may take in memory, such as 32MiB", metavar="SIZE")
    ] = "32MiB",
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="tokens of the prompt in one pass")] = 128,
    steps: Annotated[int, typer.Option("--steps", min=1, help="tokens to decode")] = 32,
    folder: Annotated[str | None, typer.Option("--folder", help="for the file (default: that of temporary files)")] = (
        None
    ),
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """A cache larger than the memory that it may take: its resident memory, and what that costs in time."""
    limit = parse_bytes(max_bytes, "--max-bytes")
    run = Run(json, seed, threads)

    from qkv_eval.bench import offload as benchmark

    loaded, _ = run.load_model(model, dtype)
    settings = benchmark.OffloadSettings(cache_format, context, limit, chunk, steps, folder, seed)
    with run.progress:
        rows = benchmark.run(loaded, settings, run.progress)["rows"]
    sizes = ("kv_bytes", "offloaded_bytes", "max_bytes", "resident_bytes")
    run.table(
        f"{model}, {dtype}, {run.threads} threads: {cache_format} at {context} tokens",
        {
            "cache": "cache",
            "kv_bytes": "cache\nMB|.1f",
            "offloaded_bytes": "in the\nfile|.1f",
            "max_bytes": "limit\nMB|.1f",
            "resident_bytes": "resident\nMB|.1f",
            "ms_per_step": "ms/\nstep|.1f",
            "slowdown": "slow-\ndown|.2f",
            "same": "same bits",
        },
        [{**row, **{key: None if row[key] is None else row[key] / 1e6 for key in sizes}} for row in rows],
        "Resident: the most above what the process had before the cache, while decoding.",
    )
    run.finish(rows, meta={"command": "bench offload"})
