"""The command ``qkv report``: it parses, calls and prints. It needs no model."""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    results: Annotated[
        list[str], typer.Argument(help="results of the commands' --json, and of sweeps", metavar="RESULTS...")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="the page to write", metavar="FILE")] = "report.html",
    title: Annotated[str, typer.Option("--title", help="heading of the page")] = "What the cache does",
) -> None:
    """Draw results as one page for a browser, without network or scripts: figures, tables, and every set-up."""
    from qkv_eval.report import build_page, load_runs, write_page
    from qkv_eval.report.page import check_writable

    check_writable(output)
    write_page(build_page(load_runs(results), title), output)
    typer.echo(f"wrote {output}")
