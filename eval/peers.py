"""The caches of one run: the unquantized one first, each under a name of its own, each attended to as it is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, named_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Told what is being done, how much of it is done, and how much it is in all.
Progress = Callable[[str, int, int], None]


def with_baseline(names: Iterable[str]) -> list[NamedCache]:
    """Returns the caches of these names, with the unquantized ``dynamic`` before them.

    Raises:
        ValueError: an unknown cache, or two that tables would show under one name.
    """
    caches = [named_cache(name) for name in dict.fromkeys([UNQUANTIZED, *names])]
    shown = [cache.name for cache in caches]
    for name in shown:
        if shown.count(name) > 1:
            raise ValueError(f"two of the caches would be called {name!r} in tables; rename the YAML file of one")
    return caches


def attend_as_meant(model: PreTrainedModel, cache: NamedCache) -> None:
    """Lets a model attend to our caches as codes, and leaves it plain for all others."""
    if cache.is_ours:
        qkv.enable(model)
    else:
        qkv.disable(model)
