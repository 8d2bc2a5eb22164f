"""GRPO-Guard, arXiv 2510.22319: a centred, normalised log-ratio for the clip, and gradients of equal size per step.

The log-ratio of two Gaussians with means mu and mu_old and the same q is, per element and with z = (x' - mu_old) / q,
z (mu - mu_old) / q - (mu - mu_old)^2 / (2 q^2). Its second term is never positive, so PPO's clip sees ratios that lie
below 1, and both terms depend on q, so one clip range means different things at different steps. Guard removes both.
"""

from __future__ import annotations

from torch import Tensor

from flow_factory.objectives.common import check_rows
from flow_factory.objectives.grpo import clipped_surrogate
from flow_factory.samples.reductions import row_mean

_SDES = ("Flow-SDE", "Dance-SDE")


def guard_log_ratio(
    next_state: Tensor, mean: Tensor, old_mean: Tensor, spread: Tensor, active: Tensor | None = None
) -> Tensor:
    """mean over elements of z (mu - mu_old), z = (x' - mu_old) / q: centred at 0, in units of q.

    It equals (l - l_old) q + mean (mu - mu_old)^2 / (2 q) with the normalised log-probability, which is how the paper
    writes it; formed from z it needs no log-probability, so its form (`scheduler.log_prob`) plays no part.

    Args:
        next_state: x', [B, D].
        mean: mu of the current policy, [B, D], with graph.
        old_mean: mu_old, [B, D].
        spread: q, broadcastable to [B, D].
        active: bool [B, D]; None = all.

    Returns:
        float64 [B]; exactly 0 where the means are equal.
    """
    z = (next_state.detach() - old_mean.detach()) / spread
    return row_mean(z * (mean - old_mean.detach()), active)


def gradient_scale(dynamics: str, h: Tensor, velocity_scale: Tensor) -> Tensor:
    """What the loss of a step is divided by, [B], so that steps of any size give gradients of equal size.

    h for the SDE dynamics, as published: d mu / d v is h (1 + ...), so the gradients of all steps become of equal
    scale (1 + eta^2 / 2 for Flow-SDE). The other kernels mix x0 and noise and are not proportional to h; they are
    divided by |d mu / d v| itself, which for CPS is s (1 - s') - (1 - s) sqrt(s'^2 - c^2). That is our extension.
    """
    return h if dynamics in _SDES else velocity_scale


def grpo_guard_loss(
    log_ratio: Tensor,
    scale: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate of the normalised ratio, divided by the step's scale.

    Args:
        log_ratio: From `guard_log_ratio`, [B].
        scale: From `gradient_scale`, [B].
        advantages, clip_range, mask: As in `clipped_surrogate`, which also says what is returned.
    """
    check_rows(log_ratio, scale=scale)
    return clipped_surrogate(log_ratio, advantages, clip_range, 1 / scale.to(log_ratio.dtype), mask)
