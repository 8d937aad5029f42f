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

Keys are turned by their position, a pair of channels at a time (RoPE, Su et al. 2021,
https://arxiv.org/abs/2104.09864). Where a bias makes a pair large, what the first tokens show of it is an arc, and
later tokens lie further along the circle. So a pair whose norm is large, more than ``LARGE`` median distances, and
steady, as a bias makes it, counts with what it can reach: as far as it will have moved by ``HORIZON`` times the first
tokens at the speed that it shows, at most the whole circle. A pair that stands still keeps the fine step that its
centre allows. Steady means that the norms' median distance from their median is less than ``STEADY`` of it: large
pairs of models without a bias vary more, and are worth their precision.
"""

from __future__ import annotations

import math

import torch

WARM_UP_TOKENS = 128
OUTLIER = 2.0
# A channel that hardly moves is not blown up beyond this part of the median one.
LEAST_PART = 2.0**-8

# Of pairs that are turned: see above. What chance may move the means of two quarters by does not count as speed.
LARGE = 5.0
STEADY = 0.04
HORIZON = 16.0
CHANCE = 2.0
HEAD_ROOM = 1.25
LEAST_QUARTER = 8

# The first and the second channels of pairs that are turned together, int64 ``[pairs]`` each.
Pairs = tuple[torch.Tensor, torch.Tensor]


def equalizing_vectors(
    keys: torch.Tensor, power: float, pairs: Pairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and multiplier, float32 ``[heads, dim]`` each, from keys ``[batch, heads, tokens, dim]``.

    Args:
        keys: of consecutive tokens.
        power: see above; 0 .. 1.
        pairs: channels that positions turn together; None: there are none, or it is not known.
    """
    wide = keys.double().contiguous()  # so that neither depends on strides
    finite = wide.isfinite()
    count = finite.sum(dim=(0, 2)).clamp(min=1)
    centre = (wide.where(finite, 0.0).sum(dim=(0, 2)) / count).float()
    wide = wide.where(finite, centre.double().unsqueeze(1))
    distance = (wide - centre.double().unsqueeze(1)).abs().amax(dim=(0, 2))
    median = _median(distance)
    ratio = torch.where(median > 0, distance / median, 1.0).clamp(min=LEAST_PART)
    far = ratio
    if pairs is not None and wide.shape[2] // 4 >= LEAST_QUARTER:
        reach, steady = _reach(wide, centre.double(), pairs)
        for channels in pairs:
            large = (steady > LARGE * median) & (median > 0)
            reached = torch.where(large, reach / median, 0.0)
            far = far.index_copy(-1, channels, torch.maximum(far[..., channels], reached))
    multiplier = ratio.clamp(max=OUTLIER) ** power * (far / OUTLIER).clamp(min=1.0)
    return centre, multiplier.float()


def _median(distance: torch.Tensor) -> torch.Tensor:
    """The distance of the median channel, ``[heads, 1]``."""
    median = distance.median(dim=-1, keepdim=True).values
    # More than half of the channels may be still: then the largest one is what others are measured by.
    return torch.where(median > 0, median, distance.amax(dim=-1, keepdim=True))


def _reach(keys: torch.Tensor, centre: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """How far from their centre pairs can come, and how far they steadily are from zero: ``[heads, pairs]`` each."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x[..., pairs[0]].square() + x[..., pairs[1]].square()).sqrt()

    radius = norm(keys).amax(dim=(0, 2))
    quarter = keys.shape[2] // 4
    early, late = keys[:, :, :quarter].mean(dim=2), keys[:, :, -quarter:].mean(dim=2)
    norms = norm(keys)
    usual = norms.median(dim=2, keepdim=True).values
    spread = (norms - usual).abs().median(dim=2).values
    usual = usual.squeeze(2)
    steady = torch.where(spread < STEADY * usual, usual, 0.0).amax(dim=0)
    moved = norm(late - early)
    chance = norm(keys.std(dim=2)) * math.sqrt(2 / quarter)
    # The quarters' middles are three quarters of the tokens apart.
    speed = (moved - CHANCE * chance).clamp(min=0.0).amax(dim=0) * (4 / 3)
    furthest = torch.minimum(speed * HORIZON, radius + norm(centre))
    shown = norm(keys - centre.unsqueeze(1)).amax(dim=(0, 2))
    return torch.maximum(shown, furthest) * HEAD_ROOM, steady
