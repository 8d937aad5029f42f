"""Number formats: one file each, and the table of their names.

``none`` is no format but the absence of one: keys and values stay in the model's own type and take the same way through
storage and attention.
"""

from __future__ import annotations

import torch

from qkv.formats.affine import AFFINE, AFFINE_ROTATED
from qkv.formats.base import Format
from qkv.formats.codebook import CODE_BOOKS
from qkv.formats.fp8 import Fp8E4M3, Fp8E5M2
from qkv.formats.int8 import Int8
from qkv.formats.layout import PARTS
from qkv.formats.mx import BLOCK_FORMATS
from qkv.presets import PRESETS

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
    if name in _table or name == NONE or name in PRESETS:
        raise ValueError(f"a format named {name!r} is registered already")
    missing = [key for key in ("bits", "code_dtype", "largest") if not hasattr(kind, key)]
    if missing:
        raise ValueError(f"format {name!r} needs the attribute {missing[0]!r}")
    if kind.code_dtype.itemsize != 1 or not (kind.bits == 8 or (kind.bits in PARTS and kind.code_dtype == torch.uint8)):
        widths = ", ".join(map(str, PARTS))
        raise ValueError(
            f"format {name!r}: codes are stored in 8 bits, code_dtype a type of one byte, or in {widths} bits, "
            f"code_dtype torch.uint8; they are {kind.bits} bits of {kind.code_dtype}"
        )
    made = kind()
    _check_codes(made)
    _table[name] = made
    return kind


def _check_codes(made: Format) -> None:
    """Raises ValueError unless a format's codes fit into its bits, and decode to about what was encoded."""
    name = made.name
    if made.code_dtype == torch.uint8:
        sample = torch.linspace(-1.0, 1.0, 33).repeat(2, 1)
        scale, offset = made.choose(sample)
        codes = made.encode(sample, scale, offset)
        if codes.dtype != torch.uint8 or int(codes.max()) >= 1 << made.bits:
            raise ValueError(
                f"format {name!r}: encode() must give codes of type torch.uint8 below {1 << made.bits}; they are "
                f"{codes.dtype}, up to {codes.max()}"
            )
        error = (made.decode(codes, scale, torch.float32, offset) - sample).abs().max().item()
        if not error <= 1.0:
            raise ValueError(f"format {name!r}: numbers within -1 .. 1 came back {error:.3g} away from what they were")
        return
    ends = made.round(torch.tensor([-made.largest, 0.0, made.largest]))
    if ends.dtype != made.code_dtype or ends.float().tolist() != [-made.largest, 0.0, made.largest]:
        raise ValueError(
            f"format {name!r}: round() must give codes of type {made.code_dtype} that stand for themselves; "
            f"{-made.largest}, 0 and {made.largest} became {ends.float().tolist()} of type {ends.dtype}"
        )


_KINDS: tuple[type[Format], ...] = (
    Int8,
    Fp8E4M3,
    Fp8E5M2,
    *AFFINE,
    *AFFINE_ROTATED,
    *CODE_BOOKS,
    *BLOCK_FORMATS,
)
for _kind in _KINDS:
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
        raise ValueError(
            f"unknown format {name!r}; known formats: {', '.join(formats())}; and set-ups: {', '.join(PRESETS)}"
        )
    return _table[name]
