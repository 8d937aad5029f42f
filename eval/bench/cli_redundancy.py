"""The command ``qkv bench redundancy``: it parses, calls and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_ints, parse_list
from qkv.cli.run import Run


def redundancy(
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

    from qkv_eval.bench import redundancy as benchmark
    from qkv_eval.peers import with_baseline

    with_baseline(names)
    loaded, _ = run.load_model(model, dtype)
    settings = benchmark.RedundancySettings(names, prompts, generated, rounds, seed=seed)
    with run.progress:
        results = benchmark.run(loaded, settings, run.progress)
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
    for note in notes:
        run.warn(note)
    run.finish(rows, meta={"command": "bench redundancy", "notes": notes}, fits=fits, factors=factors)


def _no_dust(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and abs(value) < 1e-6 else value
