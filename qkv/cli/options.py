"""The options that every command shares, comma-separated lists, and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]i?|)B?", re.IGNORECASE)

ModelOption = Annotated[
    str, typer.Option("--model", help="smollm2 (embedded), a folder, a GGUF file, or a hub name", metavar="MODEL")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="of the weights: float32, bfloat16 or float16", metavar="DTYPE")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="write the results here; - for standard output, alone", metavar="FILE")
]
SeedOption = Annotated[int, typer.Option("--seed", help="of all random numbers", min=0)]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="processor threads (torch's choice if not given)", min=1)
]


def parse_list(text: str, option: str) -> tuple[str, ...]:
    """Splits a comma-separated list, without repeats and in order.

    Raises:
        ValueError: there is nothing in it; the message names ``option``.
    """
    items = tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not items:
        raise ValueError(f"{option} is empty; give one value or several with commas between them")
    return items


def parse_ints(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Reads a comma-separated list of whole numbers of at least ``least``.

    Raises:
        ValueError: a bad item; the message names it and ``option``.
    """

    def read(item: str) -> int:
        number = int(item)
        if number < least:
            raise ValueError
        return number

    return _parse(text, option, read, f"whole numbers of at least {least}, such as 128,4096")


def parse_shapes(text: str, option: str) -> tuple[tuple[int, int, int], ...]:
    """Reads a comma-separated list of attention shapes, such as 3x3x64.

    A shape is kv_heads x query heads per kv head x head_dim.

    Raises:
        ValueError: a bad item; the message names it and ``option``.
    """

    def read(item: str) -> tuple[int, int, int]:
        kv_heads, q_per_kv, head_dim = (int(part) for part in item.split("x"))
        if min(kv_heads, q_per_kv, head_dim) < 1:
            raise ValueError
        return kv_heads, q_per_kv, head_dim

    return _parse(text, option, read, "kv_heads x query heads per kv head x head_dim, such as 3x3x64,8x4x128")


def _parse(text: str, option: str, read: Callable[[str], T], wanted: str) -> tuple[T, ...]:
    values = []
    for item in parse_list(text, option):
        try:
            values.append(read(item))
        except ValueError:
            raise ValueError(f"{option}: {item!r} will not do; give {wanted}") from None
    return tuple(values)


def parse_bytes(text: str, option: str, examples: str = "24GiB, 24GB or 512MiB") -> int:
    """Reads a size: ``24GiB``, ``24GB``, ``512MiB``, ``1.5T``, or a number of bytes.

    Raises:
        ValueError: it is no such size, or 0; the message names ``option`` and gives ``examples``.
    """
    found = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(float(found[1]) * units[found[2].lower()]) if found is not None else 0
    if size < 1:
        raise ValueError(f"{option}: {text!r} will not do; give one such as {examples}")
    return size
