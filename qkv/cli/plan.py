"""``qkv plan``: how much memory a cache is going to take, before there is one."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import JsonOption, SeedOption, ThreadsOption, parse_bytes, parse_ints, parse_list
from qkv.cli.run import Run

FORMATS = "none,int8,k8v4,k6v5,k5v4,k4v4"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="smollm2, a folder, a GGUF file, a hub name, or a shape that is built in, see --list", metavar="MODEL"
        ),
    ] = None,
    context: Annotated[str, typer.Option("--context", help="tokens of each sequence; several with commas")] = "8192",
    batch: Annotated[str, typer.Option("--batch", help="sequences; several with commas")] = "1",
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="for weights and cache, such as 24GiB: says what fits", metavar="SIZE"),
    ] = None,
    formats: Annotated[str, typer.Option("--formats", help="caches: formats, set-ups, YAML files")] = FORMATS,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="tokens that may come, or with --on-full window stay", metavar="N"),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", help="that the cache may take, with --on-full offload in memory", metavar="SIZE"),
    ] = None,
    on_full: Annotated[
        str | None, typer.Option("--on-full", help="what it does then: error, window or offload", metavar="WAY")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="a static layout: memory is taken once")] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="in which the model computes (its own if not given)", metavar="DTYPE"),
    ] = None,
    weights_dtype: Annotated[
        str | None,
        typer.Option("--weights-dtype", help="as --dtype, or fp8, int8, int4 without scales", metavar="DTYPE"),
    ] = None,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", help="at which memory is read; the default: two channels of DDR5")
    ] = "50GB/s",
    shapes: Annotated[bool, typer.Option("--list", help="show the shapes that are built in, and exit")] = False,
    model_option: Annotated[
        str | None, typer.Option("--model", help="as MODEL, for those used to it", metavar="MODEL")
    ] = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Say how much memory a cache takes, and what fits, from a model's configuration alone."""
    if model is not None and model_option not in (None, model):
        raise ValueError(f"two models were given: {model!r} and --model {model_option!r}; give one")
    name = model or model_option or "smollm2"
    caches = parse_list(formats, "--formats")
    contexts, batches = parse_ints(context, "--context"), parse_ints(batch, "--batch")
    run = Run(json, seed, threads)
    if shapes:
        _list(run)
        return

    from qkv import QKVCache
    from qkv.model_shape import ModelShape, load_config
    from qkv.plan_rows import plan_row

    limits: dict[str, Any] = {
        "max_tokens": max_tokens,
        "max_bytes": parse_bytes(max_bytes, "--max-bytes") if max_bytes is not None else None,
        "on_full": on_full,
    }
    for cache in caches:
        _check(cache, limits, contexts)  # a mistake in it shows before the work
    bytes_per_second = parse_bytes(bandwidth.strip().removesuffix("/s"), "--bandwidth", "50GB/s")
    available = parse_bytes(memory, "--memory") if memory is not None else None
    config = load_config(name)
    for cache in caches:
        QKVCache(config, cache, max_cache_len=contexts[0] if static else None, **limits)
    dtype, weights_dtype, bytes_per_weight = _dtypes(config, dtype, weights_dtype)
    with run.progress.step(f"building {name} without its weights"):
        shape = ModelShape.of(config, dtype)
    weights = int(shape.parameters * bytes_per_weight)
    free = None if available is None else available - weights
    labels = {cache: Path(cache).stem if cache.endswith((".yaml", ".yml")) else cache for cache in caches}
    with run.progress.step("planning"):
        rows = [
            asdict(plan_row(shape, labels[cache], cache, tokens, sequences, free, bytes_per_second, static, **limits))
            for tokens, sequences, cache in product(contexts, batches, caches)
        ]
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    kinds = ", ".join(f"{count} {kind}" for kind, count in shape.layer_kinds().items())
    title = (
        f"{name}: {shape.parameters / 1e9:,.2f} billion weights, {weights / 1e9:,.2f} GB in {weights_dtype}; "
        f"layers: {kinds}"
    )
    _print(run, rows, title, memory, any(row["max_context"] is not None or row["window"] for row in rows))
    if available is not None and weights >= available:
        run.warn(f"the weights alone take {weights / 1e9:,.1f} GB of {memory}: no cache fits; see --weights-dtype")
    for row in rows:
        if row["refused"]:
            run.warn(f"{row['format']}: its limits do not let {row['context']:,} tokens x {row['batch']:,} come")
    if positions is not None and max(contexts) > positions:
        run.warn(f"the model was made for {positions:,} positions; {max(contexts):,} were asked for")
    meta = {
        "model": name,
        "model_type": config.model_type,
        "dtype": dtype,
        "weights_dtype": weights_dtype,
        "parameters": shape.parameters,
        "weights_bytes": weights,
        "layers": shape.layer_kinds(),
        "max_position_embeddings": positions,
        "static": static,
        **limits,
        "memory_bytes": available,
        "bandwidth_bytes_per_s": bytes_per_second,
    }
    run.finish(rows, meta=meta)


def _check(cache: str, limits: dict[str, Any], contexts: tuple[int, ...]) -> None:
    """Raises ValueError where the description of a cache, with limits, makes no sense, whatever the model."""
    from qkv import CacheConfig, QKVCache

    plain: dict[str, Any] = dict.fromkeys(("max_tokens", "max_bytes", "on_full", "offload_folder"))
    described = CacheConfig.of(cache)
    QKVCache(None, replace(described, **plain))
    described = replace(described, **{name: value for name, value in limits.items() if value is not None})
    most = described.max_tokens
    if most is not None and described.on_full != "window" and most < max(contexts):
        raise ValueError(
            f"{cache}: max_tokens={most} does not let {max(contexts)} tokens come; give a smaller --context, a larger "
            "--max-tokens, or --on-full window"
        )


def _dtypes(config: Any, dtype: str | None, weights_dtype: str | None) -> tuple[str, str, float]:
    """The types in which a model computes and has its weights, by name, and the bytes of one weight."""
    from qkv.models import DTYPES, check_dtype
    from qkv.plan_rows import WEIGHT_BYTES

    if dtype is None:
        own = str(config.get_text_config(decoder=True).dtype or config.dtype).removeprefix("torch.")
        dtype = own if own in DTYPES else "bfloat16"
    check_dtype(dtype)
    weights_dtype = weights_dtype or dtype
    if weights_dtype not in WEIGHT_BYTES:
        raise ValueError(f"--weights-dtype: unknown type {weights_dtype!r}; use one of {', '.join(WEIGHT_BYTES)}")
    return dtype, weights_dtype, WEIGHT_BYTES[weights_dtype]


def _print(run: Run, rows: list[dict[str, Any]], title: str, memory: str | None, limited: bool) -> None:
    columns = {
        "format": "cache",
        "context": "context|,",
        "batch": "batch|,",
        "bits_per_value": "bits/value|.2f",
        "bytes_per_token": "bytes/token|,.0f",
        "kv_gb": "cache GB|,.3f",
        "window": "window|>",
        "memory_gb": "in memory|,.3f",
        "file_gb": "in the file|,.3f",
        "max_context": f"context in {memory}|>" if memory is not None else "longest context|>",
        "max_batch": f"batch in {memory}|>",
        "read_ms_per_token": "read ms|,.2f",
    }
    if len({(row["context"], row["batch"]) for row in rows}) == 1:  # said once, above
        title += f"\n{rows[0]['context']:,} tokens x {rows[0]['batch']:,}"
        del columns["context"], columns["batch"]
    if memory is None:
        del columns["max_batch"]
        if not limited:
            del columns["max_context"]
    windows, files = any(row["window"] for row in rows), any(row["file_bytes"] for row in rows)
    if not windows:
        del columns["window"]
    if not files:
        del columns["memory_gb"], columns["file_gb"]

    def shown(row: dict[str, Any]) -> dict[str, Any]:
        shown = {key: "any" if row[key] is None else f"{row[key]:,}" for key in ("max_context", "max_batch")}
        shown["window"] = "all" if row["window"] is None else f"{row['window']:,}"
        sizes = {"kv_gb": "kv_bytes", "memory_gb": "memory_bytes", "file_gb": "file_bytes"}
        return {**row, **{name: row[key] / 1e9 for name, key in sizes.items()}, **shown}

    caption = "bytes/token: of the next tokens of a sequence; read: of all that is stored, the least time of a step."
    if windows:
        caption += " window: tokens that stay of each sequence, the first ones included."
    if files:
        reading = max(row["reading_bytes"] for row in rows) / 1e9
        caption += f" GB in the file: a layer at a time is in memory too while it is read, {reading:,.3f} GB at most."
    run.table(title, columns, map(shown, rows), caption)


def _list(run: Run) -> None:
    from qkv.shapes import SHAPES

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "billions": shape.billions,
            "source": shape.source,
            "about": shape.about,
            "checked": shape.checked,
        }
        for name, shape in SHAPES.items()
    ]
    columns = {"name": "name", "billions": "10^9 weights|g", "about": "its cache"}
    run.table("Shapes that are built in; smollm2 stands for smollm2-135m", columns, rows)
    run.finish(rows)
