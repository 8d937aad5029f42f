"""The command ``qkv bench guard``: it parses, runs benchmarks where none are given, judges and prints."""

from __future__ import annotations

import json as jsons
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from qkv.cli.options import JsonOption, ThreadsOption
from qkv.cli.run import Run


def guard(
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

    from qkv_eval.bench import guard as guarding

    known = guarding.read_expected(expected or guarding.EXPECTED)
    given = [guarding.read_results(path) for path in results or ()] or _run_benchmarks(known.runs, threads)
    judgement = guarding.judge(known, given)
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
        content = guarding.updated(known, judgement, given)
        try:
            known.path.write_text(guarding.as_text(content), encoding="utf-8")
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
