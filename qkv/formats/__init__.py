"""Number formats: one file each, and the table of their names.

``none`` is no format but the absence of one: keys and values stay in the model's own type and take the same way through
storage and attention.
"""

from __future__ import annotations

from qkv.formats.base import Format
from qkv.formats.fp8 import Fp8E4M3, Fp8E5M2
from qkv.formats.int8 import Int8

__all__ = ["Format", "formats", "get_format", "register"]

NONE = "none"
_table: dict[str, Format] = {}


def register(kind: type[Format]) -> type[Format]:
    """Adds a format to the table; usable as a decorator.

    Raises:
        ValueError: the name is taken.
    """
    if kind.name in _table or kind.name == NONE:
        raise ValueError(f"a format named {kind.name!r} is registered already")
    _table[kind.name] = kind()
    return kind


for _kind in (Int8, Fp8E4M3, Fp8E5M2):
    register(_kind)


def formats() -> tuple[str, ...]:
    """The known format names, ``none`` first."""
    return (NONE, *_table)


def get_format(name: str) -> Format | None:
    """The format of that name; None for ``none``.

    Raises:
        ValueError: no such format; the message lists the known ones.
    """
    if name == NONE:
        return None
    if name not in _table:
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(formats())}")
    return _table[name]
