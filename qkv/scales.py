"""Static scales per head: their names, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

_NAME = re.compile(r"layers\.\d+\.(key|value)_scale")


def load_scales(source: str | Path | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales by name: ``layers.<i>.key_scale`` and ``layers.<i>.value_scale``, float32 ``[kv_heads]``.

    Args:
        source: the path of a safetensors file, or a mapping; a mapping's tensors are copied.

    Raises:
        ValueError: a file that cannot be read, a name of another kind, or scales that are not positive and finite.
    """
    if isinstance(source, Mapping):
        found = dict(source)
    else:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(str(source))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read scales from {source}: {error}") from None
    scales = {}
    for name, tensor in found.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"scales: {name!r} is no name of a scale; use layers.<i>.key_scale or .value_scale")
        scale = torch.as_tensor(tensor).detach().to(torch.float32).clone()
        if scale.dim() != 1:
            raise ValueError(f"scales: {name} must be [kv_heads], not {list(scale.shape)}")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(f"scales: {name} must be positive and finite")
        scales[name] = scale
    return scales
