"""Which channels of keys the positions turn together (RoPE), as far as a model's configuration tells."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rotary:
    """How the channels of keys are paired.

    Attributes:
        part: the part of the channels that is turned.
        start: the first channel that is.
        interleaved: whether neighbours are a pair; else the halves are.
    """

    part: float = 1.0
    start: int = 0
    interleaved: bool = False

    def pairs(self, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second channels of all pairs, int64 ``[pairs]`` each."""
        count = int((head_dim - self.start) * self.part) // 2
        first = torch.arange(count, device=device)
        if self.interleaved:
            return self.start + 2 * first, self.start + 2 * first + 1
        return self.start + first, self.start + first + count


def rotary_of(config: Any, layer: int) -> Rotary | None:
    """How the keys of a layer are paired; None for a model whose positions turn nothing, or without a configuration.

    Args:
        config: the model's configuration (of its text part), or None.
        layer: the layer's index.
    """
    held = vars(config) if config is not None else {}
    parameters = held.get("rope_parameters")
    kinds = held.get("layer_types")
    if parameters and kinds and kinds[layer] in parameters:  # one for each kind of layer
        parameters = parameters[kinds[layer]]
    if not isinstance(parameters, Mapping):
        # GPT-J and CodeGen say how many channels they turn, and nothing else.
        turned, heads = held.get("rotary_dim"), held.get("n_head")
        if not turned or not heads:
            return None
        return Rotary(turned / (held["n_embd"] // heads), 0, _interleaved(config))
    latent = held.get("qk_rope_head_dim")
    if latent:  # keys are a part that is not turned, then one that is
        return Rotary(1.0, held.get("qk_nope_head_dim") or 0, _interleaved(config))
    return Rotary(parameters.get("partial_rotary_factor") or 1.0, 0, _interleaved(config))


def _interleaved(config: Any) -> bool:
    """Found out from the function that the model turns with; it is loaded wherever there is a model."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    turn = getattr(module, "rotate_half", None)
    if turn is None:
        return hasattr(module, "rotate_every_two")
    # By a quarter of a circle: a number's partner comes to its place, negated.
    return bool(turn(torch.arange(4.0))[0] == -1.0)
