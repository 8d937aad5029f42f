"""The command ``qkv eval sweep``: it parses, calls and prints. Loaded for ``qkv --help``, so torch comes later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import JsonOption, SeedOption, ThreadsOption
from qkv.cli.run import Run, describe_setup

if TYPE_CHECKING:
    from qkv_eval.sweep import Cell, Outcome


def sweep(
    configs: Annotated[list[str], typer.Argument(help="YAML files, see configs/sweeps", metavar="CONFIG...")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="results file, instead of the ones in the YAML", metavar="FILE")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="instead of the models in the YAML", metavar="MODEL")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what is finished and what is not, and stop")] = False,
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Run formats x models x evaluations from YAML files; after a kill, the same command goes on where it was."""
    run = Run(json, seed, threads)

    from dataclasses import replace

    from qkv_eval import sweep as sweeping
    from qkv_eval.results_file import read_results
    from qkv_eval.sweep_config import read_sweep

    setup = describe_setup()
    sweeps = [read_sweep(config, output) for config in configs]
    if model is not None:
        pairs = [dict.fromkeys((model, dtype) for _, dtype in one.models) for one in sweeps]
        sweeps = [replace(one, models=tuple(models)) for one, models in zip(sweeps, pairs, strict=True)]
    planned = [sweeping.plan(one, setup, seed) for one in sweeps]  # what is wrong in the last shows before the first
    if dry_run:
        for one, cells in zip(sweeps, planned, strict=True):
            rows, problems = read_results(one.output) if one.output.exists() else ([], [])
            for problem in problems:
                run.warn(problem)
            finished = {row["key"]: row for row in rows}
            outcome = sweeping.Outcome(cells, finished, set(), {})
            _print_outcome(run, one.source, outcome, f"Results: {one.output}")
        return
    rows, failed = [], []
    for one in sweeps:
        with run.progress:
            outcome = sweeping.run(one, run.load_model, setup=setup, seed=seed, progress=run.progress, warn=run.warn)
        _print_outcome(run, one.source, outcome, f"Results: {one.output}")
        rows += list(outcome.rows.values())
        failed += [(cell, outcome.failed[cell.key]) for cell in outcome.cells if cell.key in outcome.failed]
    models = ", ".join(dict.fromkeys(name for one in sweeps for name, _ in one.models))
    dtypes = ", ".join(dict.fromkeys(dtype for one in sweeps for _, dtype in one.models))
    sources = [one.source for one in sweeps]
    run.finish(rows, meta={"command": "eval sweep", "model": models, "dtype": dtypes, "sweeps": sources})
    if failed:
        cell, reason = failed[0]
        raise ValueError(
            f"{len(failed)} of {sum(map(len, planned))} cells failed, the first ({cell.title}) with: {reason}. "
            "The others are finished; the same command tries these again"
        )


def _print_outcome(run: Run, title: str, outcome: Outcome, caption: str) -> None:
    run.table(
        title,
        {
            "model": "model",
            "evaluation": "evaluation",
            "cache": "cache",
            "state": "state",
            "rows": "rows|d",
            "seconds": "seconds|.0f",
        },
        [_described(cell, outcome) for cell in outcome.cells],
        caption,
    )


def _described(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    line = outcome.rows.get(cell.key)
    if line is None:
        state = "failed" if cell.key in outcome.failed else "to do"
    else:
        state = "computed" if cell.key in outcome.computed else "found finished"
    return {
        "model": cell.model,
        "evaluation": cell.evaluation,
        "cache": cell.cache,
        "state": state,
        "rows": None if line is None else len(line["rows"]),
        "seconds": None if line is None else line["seconds"],
    }
