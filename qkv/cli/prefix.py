"""What prompts begin with: its cache, computed once, out of a file or into it (``--prefix-cache``)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from qkv.cache import QKVCache
    from qkv.cli.run import Run


def check_prefix_path(path: Path) -> None:
    """Raises ValueError where a cache can neither be read nor written, before any work is done."""
    if path.is_dir():
        raise ValueError(f"--prefix-cache: {str(path)!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--prefix-cache: there is no folder {str(path.parent)!r}")


def common_prefix(prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tokens that prompts begin with, all but the last of the shortest at most: the model's answer to it is needed.

    Args:
        prompts: int64 ``[1, tokens]`` each.

    Returns:
        int64 ``[1, tokens]``.
    """
    count = min(ids.shape[1] for ids in prompts) - 1
    for ids in prompts[1:]:
        differ = (ids[0, :count] != prompts[0][0, :count]).nonzero()
        count = int(differ[0]) if len(differ) else count
    return prompts[0][:, :count]


def cache_of_prefix(
    path: Path | None, cache: QKVCache, model: Any, ids: torch.Tensor, run: Run, complete: bool
) -> tuple[QKVCache, int]:
    """A cache that holds the first tokens of prompts: out of the file, or computed, and saved there.

    The file serves when it is of this model (its weights, too), of this kind of cache, and of tokens that the prompts
    begin with.

    Args:
        path: the file, or None.
        cache: an empty cache of the kind that is wanted.
        model: the model.
        ids: what the prompts begin with, int64 ``[1, tokens]``.
        run: is told on standard error what happened.
        complete: whether the cache is to hold all of ``ids`` where the file holds fewer.

    Returns:
        The cache, and how many of its tokens came out of the file.

    Raises:
        ValueError: the file is there and no saved cache: it is not written over. Or it cannot be written.
    """
    from qkv.saved import NoSavedCacheError

    if path is not None and path.exists():
        try:
            loaded = type(cache).load(path, model.config, cache.config, model=model)
            count = _checked_prefix(loaded, ids, path)
        except NoSavedCacheError as error:
            raise ValueError(f"--prefix-cache: {error}; give another file, or remove this one") from None
        except ValueError as error:
            run.warn(f"the prompt's cache is computed anew: {error}")
        else:
            run.warn(f"loaded the cache of {count} tokens from {path}; only what comes behind them is run")
            if complete:
                _fill(loaded, model, ids[:, count:])
            return loaded, count
    if not ids.shape[1]:
        run.warn("the prompts begin with different tokens: there is no prefix to keep")
        return cache, 0
    _fill(cache, model, ids)
    message = f"computed the cache of the first {ids.shape[1]} tokens"
    if path is not None:
        cache.save(path, ids, model=model)
        message += f" and saved it to {path}"
    run.warn(message)
    return cache, 0


def _checked_prefix(loaded: QKVCache, ids: torch.Tensor, path: Path) -> int:
    """How many tokens the loaded cache holds, if these are of the prompts."""
    held = loaded.loaded_token_ids
    count = 0 if held is None else held.shape[1]
    if held is None or not 0 < count <= ids.shape[1] or not bool((ids[:, :count] == held).all()):
        raise ValueError(f"{path} holds the cache of other tokens than those that the prompt begins with")
    return count


def _fill(cache: QKVCache, model: Any, ids: torch.Tensor) -> None:
    """Runs tokens behind those that the cache holds."""
    if ids.shape[1] == 0:
        return
    import torch

    from qkv.named_caches import as_argument

    more = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, **as_argument(cache), **more)
