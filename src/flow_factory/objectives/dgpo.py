"""Direct Group Preference Optimization: DPO between the better and the worse part of a whole group.

Luo et al., "Reinforcing Diffusion Models by Direct Group Preference Optimization", arXiv 2510.08425. With
c_i = A_i beta (d_i - d_i_ref) / K the group's loss is -log sigmoid(-sum c); the advantages sum to zero, so the
unknown normalising constant of each prompt cancels. Its gradient is W sum_i A_i beta / K grad d_i, W = sigmoid(sum c),
which is what is accumulated here, up to the constant beta / K: W needs the complete group, the rest only one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_factory.objectives.common import check_rows
from flow_factory.objectives.grpo import log_clip_range


def preference_terms(advantages: Tensor, error: Tensor, error_ref: Tensor, beta: float, group_size: int) -> Tensor:
    """c_i = A_i beta (d_i - d_i_ref) / K, detached, [B].

    Args:
        advantages: A, [B], clipped.
        error: d, matching error under the policy.
        error_ref: d_ref, on the same noise and time.
        beta: Strength.
        group_size: K.
    """
    check_rows(error, error_ref=error_ref, advantages=advantages)
    return (advantages.to(error.dtype) * beta * (error - error_ref) / group_size).detach()


def group_weight(terms: Tensor) -> Tensor:
    """W = sigmoid(sum of c over the complete group), a scalar for [K] terms."""
    return torch.sigmoid(terms.sum())


def dgpo_loss(
    error: Tensor,
    advantages: Tensor,
    weight: Tensor,
    old_error: Tensor | None = None,
    clip_range: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """mean W A d, where samples that have moved too far from a recent average pass no gradient.

    With rho = exp(d_old - d), a sample's d is detached where A > 0 and rho > 1 + c_hi (it already fits much better), or
    A <= 0 and rho < 1 + c_lo. W is unaffected.

    Args:
        error: d, [B], with graph.
        advantages: A, [B], clipped to their range.
        weight: W of each sample's group, [B]; detached.
        old_error: d_old under the recent average, [B]; None = no clip.
        clip_range: (c_lo, c_hi).

    Returns:
        The loss; the samples that were cut off, bool [B]; and detached scalars: group_weight (mean W), error (mean d),
        clip_fraction, policy_loss.
    """
    check_rows(error, advantages=advantages, weight=weight)
    advantages = advantages.detach().to(error.dtype)
    cut = torch.zeros_like(error, dtype=torch.bool)
    if old_error is not None and clip_range is not None:
        check_rows(error, old_error=old_error)
        log_lo, log_hi = log_clip_range(clip_range)
        log_ratio = old_error.detach() - error.detach()
        cut = torch.where(advantages > 0, log_ratio > log_hi, log_ratio < log_lo)
    loss = (weight.detach() * advantages * torch.where(cut, error.detach(), error)).mean()
    metrics = {
        "group_weight": weight.detach().mean(),
        "error": error.detach().mean(),
        "clip_fraction": cut.double().mean(),
        "policy_loss": loss.detach(),
    }
    return loss, cut, metrics
