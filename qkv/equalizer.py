"""Equalizing keys: a vector that is subtracted from them and one that they are divided by, per head, fixed early.

In some models a few channels of the keys are many times larger than the others, in every token (Qwen2.5, with its large
biases of ``k_proj``). A scale for a whole token is then as coarse as its largest channel needs. Divided by what they
usually are, channels become alike. It costs nothing per token: the query is multiplied instead.

The vectors are taken from the first ``WARM_UP_TOKENS`` tokens after the sinks, which stay exact until they are there,
so that they do not depend on how the input was cut. They are one for the whole batch: rows of padding see what the
others show. A number that is not finite does not count.

What a channel is divided by is its largest distance from the centre, to the power 0.7: with 1 the channels that matter
little would get as fine a step as those that matter.
"""

from __future__ import annotations

import torch

WARM_UP_TOKENS = 128
POWER = 0.7
# A channel that hardly moves is not blown up beyond this part of the largest one.
LEAST_PART = 2.0**-12


def equalizing_vectors(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and multiplier, float32 ``[heads, dim]`` each, from keys ``[batch, heads, tokens, dim]``."""
    wide = keys.double().contiguous()  # so that neither depends on strides
    finite = wide.isfinite()
    count = finite.sum(dim=(0, 2)).clamp(min=1)
    centre = (wide.where(finite, 0.0).sum(dim=(0, 2)) / count).float()
    distance = (wide - centre.double().unsqueeze(1)).abs().where(finite, 0.0).amax(dim=(0, 2))
    return centre, multiplier_of(distance)


def multiplier_of(distance: torch.Tensor) -> torch.Tensor:
    """What channels are divided by, float32 ``[heads, dim]``, for their largest distances from the centre.

    The geometric mean over the channels of a head is 1.
    """
    wide = distance.double()
    top = wide.amax(dim=-1, keepdim=True)
    wide = torch.maximum(wide, top * LEAST_PART)
    wide = torch.where(top > 0, wide, 1.0)
    logarithm = wide.log()
    return (POWER * (logarithm - logarithm.mean(dim=-1, keepdim=True))).exp().float()
