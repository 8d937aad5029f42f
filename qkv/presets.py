"""Set-ups by name: keys in one format, values in another, as they measure best near a number of bits.

``k5v4`` stores keys in 5 bits and values in 4. Both are rotated; keys have a scale per channel over 64 tokens, values
one per 64 channels. Keys of 8 bits are those of ``int8``. The first 4 tokens, on which models lean, stay exact: on
SmolLM2 that halves the divergence for 0.05 bits of a window of 2,048. What each costs is measured in the README; the
same set-ups lie in ``configs/`` as files to start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SINK_TOKENS = 4


def _mixed(key_bits: int, value_bits: int) -> Mapping[str, Any]:
    names = [f"int{bits}" if bits == 8 else f"int{bits}_rot" for bits in (key_bits, value_bits)]
    return MappingProxyType({"format": names[0], "value_format": names[1], "sink_tokens": SINK_TOKENS})


# name -> what CacheConfig.from_dict takes
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        f"k{key}v{value}": _mixed(key, value)
        for key, value in ((8, 4), (6, 6), (6, 5), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3))
    }
)


def presets() -> tuple[str, ...]:
    """The names of the mixed set-ups, as ``QKVCache`` and every command take them."""
    return tuple(PRESETS)
