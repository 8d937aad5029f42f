"""Caches by name, wherever a command or a user means "a cache": ours, and transformers' own to compare with.

| name | cache |
| --- | --- |
| a name from ``qkv.formats()`` or ``qkv.presets()`` | ``QKVCache`` of that format or set-up |
| a path ending in .yaml or .yml | ``QKVCache`` of that set-up |
| ``package.module:function`` | what that function, of yours, makes for a model's configuration |
| ``dynamic`` | transformers' ``DynamicCache``: nothing is quantized |
| ``hf-fp8`` | transformers' ``QuantizedCache``, e4m3, one scale for a layer's tensor, fixed by the first update |
| ``hf-quanto4``, ``hf-quanto2`` | the same with optimum-quanto, 4 and 2 bits |
| ``hf-hqq8``, ``hf-hqq4`` | the same with HQQ, 8 and 4 bits |

transformers' caches have transformers' own settings (groups of 64, the newest up to 128 tokens exact) and the axis
that its documentation recommends for each backend: 0 with quanto, 1 with HQQ.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.cache_utils import Cache

UNQUANTIZED = "dynamic"

# name -> (the package that is needed, arguments for transformers' QuantizedCache)
_TRANSFORMERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "hf-fp8": (None, {"backend": "fp8"}),
    "hf-quanto4": ("optimum.quanto", {"backend": "quanto", "nbits": 4, "axis_key": 0, "axis_value": 0}),
    "hf-quanto2": ("optimum.quanto", {"backend": "quanto", "nbits": 2, "axis_key": 0, "axis_value": 0}),
    "hf-hqq8": ("hqq", {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hf-hqq4": ("hqq", {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}),
}
_DISTRIBUTIONS = {"optimum.quanto": "optimum-quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class NamedCache:
    """A kind of cache under the name that tables show.

    Attributes:
        name: what tables show.
        make: returns a new, empty cache for a model's configuration.
        is_ours: a ``QKVCache``, which attention reads as codes after ``qkv.enable(model)``.
    """

    name: str
    make: Callable[[PreTrainedConfig], Cache]
    is_ours: bool


def as_argument(cache: Cache) -> dict[str, Cache]:
    """Returns the keyword argument by which a model's forward and ``generate`` take a cache.

    transformers 5.24 renamed it, from ``past_key_values`` to ``cache``, and warns where it meets the old name.
    """
    return {_argument_name(): cache}


@functools.cache
def _argument_name() -> str:
    from transformers import GenerationMixin

    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_names() -> tuple[str, ...]:
    """Returns the names that ``named_cache`` knows; the path of a YAML file serves as well."""
    import qkv

    return (UNQUANTIZED, *qkv.formats(), *qkv.presets(), *_TRANSFORMERS)


def named_cache(name: str) -> NamedCache:
    """Returns the kind of cache that ``name`` stands for.

    Raises:
        ValueError: the name is unknown (it lists the known ones), the YAML file is missing or wrong, or the cache
            needs a package that is not installed.
    """
    if name == UNQUANTIZED:
        return NamedCache(name, _make_dynamic, is_ours=False)
    if name in _TRANSFORMERS:
        return _from_transformers(name)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return _from_function(name)
    return _from_qkv(name)


def _make_dynamic(config: PreTrainedConfig) -> Cache:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _from_transformers(name: str) -> NamedCache:
    package, arguments = _TRANSFORMERS[name]
    if package is not None and not _is_installed(package):
        distribution = _DISTRIBUTIONS[package]
        raise ValueError(f"the cache {name!r} needs the package {distribution}; run: pip install {distribution}")

    def make(config: PreTrainedConfig) -> Cache:
        from transformers import QuantizedCache

        return QuantizedCache(config=config, **arguments)

    return NamedCache(name, make, is_ours=False)


def _from_function(name: str) -> NamedCache:
    from transformers.cache_utils import Cache

    import qkv

    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the cache {name!r} cannot be imported: {error}") from error

    def checked(config: PreTrainedConfig) -> Cache:
        made = make(config)
        if not isinstance(made, Cache):
            raise ValueError(f"{name} made a {type(made).__name__}, not a cache of transformers")
        return made

    ours = isinstance(make, type) and issubclass(make, qkv.QKVCache)
    return NamedCache(name, checked, is_ours=ours)


def _from_qkv(name: str) -> NamedCache:
    import qkv

    setup: str | qkv.CacheConfig
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ValueError(f"there is no set-up file {name!r}")
        setup = qkv.CacheConfig.from_yaml(name)
        label = Path(name).stem
    elif name in qkv.formats() or name in qkv.presets():
        setup, label = name, name
    else:
        raise ValueError(
            f"unknown cache {name!r}; use one of {', '.join(cache_names())}, the path of a YAML file, or "
            "package.module:function"
        )
    return NamedCache(label, lambda config: qkv.QKVCache(config, setup), is_ours=True)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False
