"""The ``qkv`` command.

``main`` is the console script. Other packages add commands through the entry-point group ``qkv.commands`` and may
use the public names of ``qkv.cli.options`` (the options that every command takes, lists) and ``qkv.cli.run`` (one
run of a command: set-up, progress, tables, JSON). Importing this package imports neither torch nor transformers.
"""

from qkv.cli.app import main

__all__ = ["main"]
