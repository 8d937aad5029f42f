"""The options that several commands of the evaluation share, beside those of all commands in ``qkv.cli.options``.

Without a default, which each command has of its own.
"""

from __future__ import annotations

from typing import Annotated

import typer

PeersOption = Annotated[str, typer.Option("--formats", help="caches beside dynamic: formats, YAML files, hf-...")]
CacheFormatOption = Annotated[str, typer.Option("--format", "-f", help="of the cache")]
ScoredTextOption = Annotated[
    str | None, typer.Option("--text", help="a text file to score (default: an embedded text)", metavar="FILE")
]
SeenTextOption = Annotated[
    str | None, typer.Option("--text", help="a text file to run over (default: an embedded text)", metavar="FILE")
]
WindowOption = Annotated[int, typer.Option("--window", min=2, help="tokens in a window of text")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="timed turns of each peer")]
