"""How far a model's predictions move when its cache is quantized."""

from __future__ import annotations

import torch

# Rows of logits worked on at a time: a row is the whole vocabulary, and several copies of it are alive.
_ROWS = 64


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the negative log-likelihood of each target, in nats, float32 ``[...]``.

    Args:
        logits: ``[..., vocabulary]``, any floating dtype.
        targets: int64 ``[...]``.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    wanted = targets.reshape(-1, 1)
    losses = torch.empty(len(flat), dtype=torch.float32)
    for start in range(0, len(flat), _ROWS):
        rows = flat[start : start + _ROWS].float()
        losses[start : start + _ROWS] = torch.logsumexp(rows, -1) - rows.gather(1, wanted[start : start + _ROWS])[:, 0]
    return losses.reshape(targets.shape)


def compare_predictions(baseline: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares the predictions of two runs at the same positions.

    A divergence of nearly equal predictions can come out below 0 by rounding, around -1e-7; it is left as it is.

    Args:
        baseline, logits: ``[..., vocabulary]``, any floating dtype.

    Returns:
        KL(baseline || other) in nats, float32 ``[...]``, and whether both have the same likeliest token, bool
        ``[...]``.
    """
    flat, other = baseline.reshape(-1, baseline.shape[-1]), logits.reshape(-1, logits.shape[-1])
    divergence = torch.empty(len(flat), dtype=torch.float32)
    same_top = torch.empty(len(flat), dtype=torch.bool)
    for start in range(0, len(flat), _ROWS):
        log_p = torch.log_softmax(flat[start : start + _ROWS].float(), -1)
        log_q = torch.log_softmax(other[start : start + _ROWS].float(), -1)
        divergence[start : start + _ROWS] = (log_p.exp() * (log_p - log_q)).sum(-1)
        same_top[start : start + _ROWS] = log_p.argmax(-1) == log_q.argmax(-1)
    shape = baseline.shape[:-1]
    return divergence.reshape(shape), same_top.reshape(shape)
