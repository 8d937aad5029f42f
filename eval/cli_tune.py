"""The command ``qkv tune``: it parses, calls and prints. Loaded for ``qkv --help``, so torch comes later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption, parse_list
from qkv.cli.run import Run, describe_setup


def tune(
    output: Annotated[
        str, typer.Option("--output", "-o", help="the YAML to write, for QKVCache", metavar="FILE")
    ] = "tuned.yaml",
    bits: Annotated[float | None, typer.Option("--bits", help="bits per value at most: the least divergence")] = None,
    max_kld: Annotated[
        float | None, typer.Option("--max-kld", help="mean KL divergence at most, nats: the fewest bits")
    ] = None,
    max_ratio_of_time: Annotated[
        float | None,
        typer.Option("--max-ratio-of-time", help="time of attention at most, over that of int8; alone or besides"),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="a text file to tune on (default: an embedded text)", metavar="FILE")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="a data set of the hub to tune on", metavar="NAME[:CONFIG:SPLIT:COLUMN]"),
    ] = None,
    candidates: Annotated[
        str | None, typer.Option("--candidates", help="a YAML file with lists keys and values", metavar="FILE")
    ] = None,
    formats: Annotated[
        str, typer.Option("--formats", help="set-ups of ours to verify beside it and the presets near it")
    ] = "int8",
    sinks: Annotated[int, typer.Option("--sinks", min=0, help="first tokens that stay exact")] = 4,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="tokens in the cache when bits and time count (default: --window)"),
    ] = None,
    window: Annotated[
        int, typer.Option("--window", min=2, help="tokens in a window for validation and verification")
    ] = 2048,
    limit: Annotated[int, typer.Option("--limit", min=0, help="held-out windows to verify on; 0: all")] = 4,
    validate: Annotated[int, typer.Option("--validate", min=1, help="windows to validate on")] = 2,
    measure_window: Annotated[
        int, typer.Option("--measure-window", min=256, help="tokens in a window for measuring single layers")
    ] = 512,
    measure_windows: Annotated[int, typer.Option("--measure-windows", min=1, help="windows for measuring")] = 2,
    points: Annotated[int, typer.Option("--points", min=0, help="other budgets to verify the front at")] = 6,
    measurements: Annotated[
        str | None,
        typer.Option("--measurements", help="where measurements are kept (default: beside the output)", metavar="FILE"),
    ] = None,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Choose a format for the keys and values of each layer under a budget; after a kill, it goes on where it was."""
    run = Run(json, seed, threads)
    names = parse_list(formats, "--formats")
    _check_output(output)

    from qkv.models import check_dtype, find_model
    from qkv_eval import tune as tuning
    from qkv_eval.keys import model_identity
    from qkv_eval.peers import with_baseline
    from qkv_eval.results_file import ResultsFile
    from qkv_eval.text import load_text
    from qkv_eval.tune_costs import read_candidates
    from qkv_eval.tune_settings import TuneSettings

    settings = TuneSettings(
        bits,
        max_kld,
        max_ratio_of_time,
        text,
        dataset,
        candidates,
        names,
        sinks,
        context,
        window,
        limit or None,
        validate,
        measure_window,
        measure_windows,
        points,
        seed=seed,
    )
    with_baseline(names)  # what is wrong with them shows now, not after the model is loaded
    if candidates is not None:
        read_candidates(candidates)
    if dataset is None:
        load_text(text)
    check_dtype(dtype)
    find_model(model)
    loaded = run.load_model(model, dtype)
    file = Path(measurements) if measurements is not None else Path(output).with_suffix(".measurements.jsonl")
    setup = {**describe_setup(), "model": model, "dtype": dtype}
    try:
        with ResultsFile(file) as kept, run.progress:
            for problem in kept.problems:
                run.warn(problem)
            identity = (*model_identity(model), dtype)
            results = tuning.run(*loaded, settings, run.progress, kept, identity, setup)
    finally:
        if file.is_file() and file.stat().st_size == 0:  # nothing came of it
            file.unlink()
    _print(run, results, f"{model}, {dtype}")
    for note in results["notes"]:
        run.warn(note)
    config = results["config"].to_dict()
    _write(output, config, _header(results, setup))
    run.warn(f"wrote {output}; what was measured is in {file}")
    meta = {name: results[name] for name in ("text", "notes", "asked", "context")}
    more = {name: results[name] for name in ("front", "verified", "choice")}
    run.finish(results["rows"], **more, config=config, meta={**meta, "command": "tune"})


def _print(run: Run, results: Mapping[str, Any], what: str) -> None:
    chosen = [row for row in results["rows"] if row["chosen"]]
    layers: dict[int, dict[str, Any]] = {}
    for row in chosen:
        layers.setdefault(row["layer"], {"layer": row["layer"]}).update(
            {row["side"]: row["format"], f"{row['side']}_kld": row["kld"]}
        )
    run.table(
        results["asked"],
        {
            "layer": "layer|d",
            "key": "keys",
            "key_kld": "KL\nalone|z.6f",
            "value": "values",
            "value_kld": "KL\nalone|z.6f",
        },
        layers.values(),
    )
    text = results["text"]
    run.table(
        f"{what}: {text['name']}, {text['windows']} held-out windows of {text['window']}",
        {
            "format": "cache",
            "bits_per_value": "bits/\nvalue|.3f",
            "ppl": "perplex-\nity|.3f",
            "dppl_percent": "change\n%|+.3f",
            "kld_predicted": "KL\npredicted|z.5f",
            "kld_validation": "\nvalidation|z.5f",
            "kld_mean": "\nheld-out|z.5f",
            "same_top_percent": "same\ntop %|.2f",
            "time_ratio": "time|.2f",
        },
        results["verified"],
        f"{results['verified'][0]['tokens']} predictions. Bits: at context {results['context']}. KL: nats, against the "
        "unquantized cache.\nPredicted: the sum over layers, each alone. Time: of attention, over that with int8.",
    )


def _header(results: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    choice, text = results["choice"], results["text"]
    # Of a folder or file its name: where it lies says nothing elsewhere.
    name = Path(setup["model"]).name if Path(setup["model"]).exists() else setup["model"]
    lines = [
        f"Tuned by qkv tune for {name}, {setup['dtype']}: {results['asked']}.",
        f"Bits per value at context {results['context']}: {choice['bits_per_value']:.3f}.",
        f"Held-out text, {choice['tokens']} predictions: KL {choice['kld_mean']:.5f} nats, perplexity "
        f"{choice['dppl_percent']:+.3f} %, same top {choice['same_top_percent']:.2f} %.",
    ]
    if choice["kld_predicted"] is not None:
        lines.append(
            f"KL predicted {choice['kld_predicted']:.5f}, on the validation text {choice['kld_validation']:.5f}."
        )
    if choice["time_ratio"] is not None:
        lines.append(f"Time of attention over that with int8: {choice['time_ratio']:.2f}.")
    lines += [
        f"Text: {text['name']} (SHA-256 {text['sha256'][:16]}), {text['measuring_windows']} windows of "
        f"{text['measuring_window']} tokens for measuring, {text['validation_windows']} of {text['window']} for "
        f"validation, {text['windows']} held out.",
        f"qkv {setup['version']}, torch {setup['torch']}, transformers {setup['transformers']}.",
    ]
    return lines


def _check_output(path: str) -> None:
    """Raises ``ValueError`` if a set-up cannot be written there."""
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output: {path!r} must end in .yaml or .yml, by which QKVCache knows a set-up")
    if file.is_dir():
        raise ValueError(f"--output: {path!r} is a folder; give a file")
    if not file.parent.is_dir():
        raise ValueError(f"--output: there is no folder {str(file.parent)!r}")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"--output: {path!r} may not be written")


def _write(path: str, config: Mapping[str, Any], header: Sequence[str]) -> None:
    """Writes a set-up with comments before it to a file, which is whole or not there."""
    file = Path(path)
    unfinished = file.with_name(f".{file.name}.writing")
    # One line for a layer, as one would write it.
    layers = config.get("layers", {})
    content = yaml.safe_dump({key: value for key, value in config.items() if key != "layers"}, sort_keys=False)
    if layers:
        content += "layers:\n"
        for index, changes in layers.items():
            flow = yaml.safe_dump(dict(changes), sort_keys=False, default_flow_style=True, width=1 << 20)
            content += f"  {index}: {flow}"
    comments = "".join(f"# {' '.join(line.split())}\n" for line in header)
    try:
        unfinished.write_text(comments + content, encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(f"cannot write {path!r}: {error.strerror}") from error
