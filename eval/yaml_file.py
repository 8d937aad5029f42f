"""Reads YAML files that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: str | Path, what: str) -> Any:
    """Reads what a YAML file holds.

    Args:
        path: the file.
        what: what it is, for messages, such as ``sweep``.

    Raises:
        ValueError: the file is missing, cannot be read or is no YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
