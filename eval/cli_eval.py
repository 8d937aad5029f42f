"""The command ``qkv eval``: what a cache does to a model, each evaluation a command of its own."""

from __future__ import annotations

import typer

from qkv_eval.cli_layers import layers
from qkv_eval.cli_lm import lm
from qkv_eval.cli_ppl import ppl
from qkv_eval.cli_recall import recall
from qkv_eval.cli_sweep import sweep
from qkv_eval.cli_window import window

evaluate = typer.Typer(
    help="What a cache does to a model, measured through the values that it stores.", no_args_is_help=True
)
evaluate.command("ppl")(ppl)
evaluate.command("lm")(lm)
evaluate.command("recall")(recall)
evaluate.command("layers")(layers)
evaluate.command("sweep")(sweep)
evaluate.command("window")(window)
