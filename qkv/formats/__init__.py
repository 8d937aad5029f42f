"""Number formats: one file each, and the table of their names.

``none`` is no format but the absence of one: keys and values stay in the model's own type and take the same way through
storage and attention.
"""

from __future__ import annotations

import torch

from qkv.formats.base import Format
from qkv.formats.fp8 import Fp8E4M3, Fp8E5M2
from qkv.formats.int8 import Int8

__all__ = ["Format", "formats", "get_format", "register"]

NONE = "none"
_table: dict[str, Format] = {}


def register(kind: type[Format]) -> type[Format]:
    """Adds a format to the table; usable as a decorator.

    Raises:
        ValueError: the name is taken, or what the class says of itself is not what it does.
    """
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind.__name__} needs a `name`, a string")
    if name in _table or name == NONE:
        raise ValueError(f"a format named {name!r} is registered already")
    missing = [key for key in ("bits", "code_dtype", "largest") if not hasattr(kind, key)]
    if missing:
        raise ValueError(f"format {name!r} needs the attribute {missing[0]!r}")
    if kind.bits != 8 or kind.code_dtype.itemsize != 1:
        raise ValueError(
            f"format {name!r}: codes are stored in one byte each, so bits must be 8 and code_dtype a type of one byte; "
            f"they are {kind.bits} and {kind.code_dtype}"
        )
    made = kind()
    ends = made.round(torch.tensor([-made.largest, 0.0, made.largest]))
    if ends.dtype != kind.code_dtype or ends.float().tolist() != [-made.largest, 0.0, made.largest]:
        raise ValueError(
            f"format {name!r}: round() must give codes of type {kind.code_dtype} that stand for themselves; "
            f"{-made.largest}, 0 and {made.largest} became {ends.float().tolist()} of type {ends.dtype}"
        )
    _table[name] = made
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
