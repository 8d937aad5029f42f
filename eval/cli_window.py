"""The command ``qkv eval window``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run
from qkv_eval.options import CacheFormatOption, ScoredTextOption

# Blocks that a table has room for; all are in the JSON.
_MOST_COLUMNS = 10


def window(
    ways: Annotated[
        str, typer.Option("--ways", help="window, no-sinks, recomputed (the last tokens read anew), whole (no limit)")
    ] = "window,no-sinks,recomputed,whole",
    cache_format: CacheFormatOption = "int8",
    size: Annotated[int, typer.Option("--window", min=1, help="tokens that stay beside the first ones")] = 512,
    sinks: Annotated[int, typer.Option("--sinks", min=0, help="how many of the first tokens stay")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="of the text to score")] = 5120,
    block: Annotated[int, typer.Option("--block", min=1, help="tokens that a figure is given for")] = 512,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="tokens in one pass")] = 128,
    text: ScoredTextOption = None,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Perplexity, block by block, of a text much longer than a cache that keeps a window of it."""
    run = Run(json, seed, threads)
    names = parse_list(ways, "--ways")

    from qkv_eval import window as evaluation
    from qkv_eval.text import load_text

    scored = load_text(text)
    settings = evaluation.WindowSettings(
        scored.content, names, cache_format, window=size, sinks=sinks, tokens=tokens, block=block, chunk=chunk
    )
    loaded = run.load_model(model, dtype)
    with run.progress:
        rows = evaluation.run(*loaded, settings, run.progress)["rows"]
    count = max(len(row["blocks"]) for row in rows)
    every = -(-count // _MOST_COLUMNS)
    shown = range(every - 1, count, every)  # the last ones of equal parts
    run.table(
        f"{model}, {dtype}, {run.threads} threads: perplexity of {scored.name}, {block} tokens at a time, "
        f"with {size} in the window",
        {"way": "cache"}
        | {str(i): f"{i * block}|.2f" for i in shown}
        | {"ppl": "all|.2f", "over_recomputed": "ratio|.3f", "megabytes": "MB|.1f", "seconds": "s|.0f"},
        [
            {**row, **{str(i): x for i, x in enumerate(row["blocks"])}, "megabytes": _megabytes(row["kv_bytes"])}
            for row in rows
        ],
        f"Of {count} blocks, {len(shown)} by the token that they begin with. Ratio: of the second half of the blocks, "
        "to those where the last tokens are read anew. MB: the cache in the end.",
    )
    run.finish(rows, meta={"text": {"name": scored.name, "sha256": scored.sha256}, "command": "eval window"})


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6
