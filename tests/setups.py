"""Every way to store numbers: each format with each granularity that it has, and keys equalized or not.

A new format, or a new granularity of one, is here by itself, and so in every test that asks for these.
"""

from __future__ import annotations

import itertools
from typing import Any

from qkv.formats import formats, get_format
from qkv.formats.base import Format

# Tokens that share a scale per channel: the fewest that there can be, so that few tokens make several groups.
GROUP_TOKENS = 16


def every_setup() -> dict[str, dict[str, Any]]:
    """Name -> options of a :class:`qkv.CacheConfig` for keys and values alike; ``none`` comes first."""
    found: dict[str, dict[str, Any]] = {"none": {"format": "none"}}
    turn = itertools.count()
    for name in formats():
        format = get_format(name)
        if format is None:
            continue
        # Equalizing has nothing to do with what shares a scale: once for each format, by turns, and for int8 always.
        each = format.granularities
        equalized = each if name == "int8" else [each[next(turn) % len(each)]]
        for granularity in each:
            options: dict[str, Any] = {"format": name, "granularity": granularity, "equalize": False}
            if granularity == "channel":
                options["group_size"] = GROUP_TOKENS
            found[f"{name} {granularity}"] = options
            if granularity in equalized:
                found[f"{name} {granularity} equalized"] = {**options, "equalize": True}
    return found


SETUPS = every_setup()


def format_of(options: dict[str, Any], side: str) -> Format | None:
    """The format of the keys (``key``) or the values (``value``)."""
    return get_format(options.get(f"{side}_format") or options["format"])


def fits(options: dict[str, Any], key_dim: int, value_dim: int) -> bool:
    """Whether the head sizes go with blocks that a format fixes."""
    sizes = {"key": key_dim, "value": value_dim}
    blocks = {side: format.block for side in sizes if (format := format_of(options, side)) is not None}
    return all(block is None or sizes[side] % block == 0 for side, block in blocks.items())
