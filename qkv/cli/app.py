"""The command line: which commands there are, and how their errors leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from qkv.cli.generate import generate
from qkv.cli.plan import plan

COMMANDS = "qkv.commands"


def build_app() -> typer.Typer:
    """Builds the command line: the library's own commands and those of the entry-point group ``qkv.commands``.

    An entry point is a function or a ``typer.Typer``. One that cannot be loaded costs a line on standard error and no
    more.
    """
    app = typer.Typer(
        name="qkv",
        help="A small, fast key/value cache for Hugging Face models: use it, measure it.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    app.command("generate")(generate)
    app.command("plan")(plan)
    for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        try:
            command = point.load()
        except Exception as error:  # it is somebody else's code
            _complain(f"the command {point.name!r} is left out: {error}")
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the ``qkv`` command and exits: 0 on success, 2 on bad arguments or input, with one clear line.

    The library says what is wrong with what it was given by ``ValueError``, so that is what becomes the line. With
    QKV_DEBUG set, the traceback is shown instead.
    """
    try:
        status = build_app()(args=arguments, prog_name="qkv", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
        else:
            _complain(error.format_message())
        sys.exit(2)
    except ValueError as error:
        if os.environ.get("QKV_DEBUG"):
            raise
        _complain(str(error))
        sys.exit(2)
    except BrokenPipeError:
        # The reader has gone. Without this, the interpreter would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qkv {version('qkv')}")
        raise typer.Exit


def _common(
    show_version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _complain(message: str) -> None:
    print("qkv: error:", " ".join(message.split()), file=sys.stderr)
