"""qkv: a small, fast and honest key/value cache for Hugging Face models.

::

    import qkv
    qkv.enable(model)
    cache = qkv.QKVCache(model.config, "int8")
    model.generate(**inputs, past_key_values=cache)  # transformers 5.24 and later: cache=cache
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qkv.config import CacheConfig
from qkv.formats import formats
from qkv.formats import register as register_format
from qkv.native import SlowPathWarning
from qkv.presets import presets

if TYPE_CHECKING:
    from qkv.cache import QKVCache, nbytes
    from qkv.hf import disable, enable

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "QKVCache",
    "SlowPathWarning",
    "disable",
    "enable",
    "formats",
    "nbytes",
    "presets",
    "register_format",
]

# What needs transformers comes on first use: it takes seconds to import, and `qkv --help` need not wait for it.
_LATE = {"QKVCache": "qkv.cache", "disable": "qkv.hf", "enable": "qkv.hf", "nbytes": "qkv.cache"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
