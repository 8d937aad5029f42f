"""Equalizing keys: a vector that is subtracted from them and one that they are divided by, per head, fixed early.

In some models a few channels of the keys are many times larger than the others, in every token (Qwen2.5, with its large
biases of ``k_proj``). A scale for a whole token is then as coarse as its largest channel needs. Divided by what they
usually are, channels become alike. It costs nothing per token: the query is multiplied instead.

The vectors are taken from the first ``WARM_UP_TOKENS`` tokens after the sinks, which stay exact until they are there,
so that they do not depend on how the input was cut. They are one for the whole batch: rows of padding see what the
others show. A number that is not finite does not count.

What a channel is divided by depends on its largest distance from the centre, against that of the median channel of its
head. Up to ``OUTLIER`` times the median it is divided by a power of that ratio: 0.6 for scales per token, so that
channels become more alike but those that matter keep the finer step; 0 (not divided) where a rotation and scales per
channel do that already. What is beyond is divided in full: however large an outlier is, it ends up where a channel of
``OUTLIER`` times the median does.
"""

from __future__ import annotations

import torch

WARM_UP_TOKENS = 128
OUTLIER = 2.0
# A channel that hardly moves is not blown up beyond this part of the median one.
LEAST_PART = 2.0**-8


def equalizing_vectors(keys: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and multiplier, float32 ``[heads, dim]`` each, from keys ``[batch, heads, tokens, dim]``."""
    wide = keys.double().contiguous()  # so that neither depends on strides
    finite = wide.isfinite()
    count = finite.sum(dim=(0, 2)).clamp(min=1)
    centre = (wide.where(finite, 0.0).sum(dim=(0, 2)) / count).float()
    distance = (wide - centre.double().unsqueeze(1)).abs().where(finite, 0.0).amax(dim=(0, 2))
    return centre, multiplier_of(distance, power)


def multiplier_of(distance: torch.Tensor, power: float) -> torch.Tensor:
    """What channels are divided by, float32 ``[heads, dim]``.

    Args:
        distance: the largest distance of each channel from its centre, ``[heads, dim]``.
        power: see above; 0 .. 1.
    """
    wide = distance.double()
    median = wide.median(dim=-1, keepdim=True).values
    # More than half of the channels may be still: then the largest one is what others are measured by.
    median = torch.where(median > 0, median, wide.amax(dim=-1, keepdim=True))
    ratio = torch.where(median > 0, wide / median, 1.0).clamp(min=LEAST_PART)
    return (ratio.clamp(max=OUTLIER) ** power * (ratio / OUTLIER).clamp(min=1.0)).float()
