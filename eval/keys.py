"""Keys of figures: digests of everything that a figure depends on, by which it is found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of a set-up as ``qkv.cli.run.describe_setup`` gives it, what every figure depends on, and what times do besides.
VERSIONS = ("version", "torch", "transformers", "python")
MACHINE = ("processor", "capability", "threads")


def make_key(facts: Mapping[str, Any], setup: Mapping[str, Any], *, timed: bool) -> str:
    """Returns the key of a figure.

    Args:
        facts: what it depends on besides the set-up; ``key_version`` among them, to be raised when the same words come
            to mean another computation.
        setup: versions and machine.
        timed: whether it is a time, and so one of this machine.
    """
    names = VERSIONS + (MACHINE if timed else ())
    matters = {**facts, "setup": {name: setup.get(name) for name in names}}
    return hashlib.sha256(json.dumps(matters, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_identity(name: str) -> list[Any]:
    """What a model is: of a local one the contents of its files, wherever it lies; of one on the hub its name."""
    from qkv.models import find_model

    source = find_model(name)
    return [source] if isinstance(source, str) else file_contents(source)


def file_contents(path: str | Path) -> list[Any]:
    """Digests of a file, or of the files right in a folder with their names."""
    path = Path(path)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = []
    for each in files:
        try:
            with each.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"cannot read {str(each)!r}: {error.strerror}") from error
        found.append([each.name if path.is_dir() else "", digest])
    return found
