"""Centered Reward Distillation: the policy's implicit reward is regressed on the external one, centred per prompt.

Zhu et al., "Diffusion Reinforcement Learning via Centered Reward Distillation", arXiv 2603.14128. The optimum of
KL-regularised reward maximisation is log pi / pi_old = R / beta - log Z(prompt); subtracting a mean over the samples of
one prompt removes Z. The log-ratio is estimated by the difference of two matching errors.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flow_factory.objectives.common import agg_loss, check_rows

# Smallest mean absolute error that a matching error is divided by.
_FLOOR = 1e-5


def normalised_error(error: Tensor, absolute: Tensor, adaptive: bool) -> Tensor:
    """m / w, w = max(1e-5, mean |v - target|) per sample, detached; w = 1 unless `adaptive`. All [B]."""
    return error / absolute.detach().clamp(min=_FLOOR) if adaptive else error


def implicit_reward(error: Tensor, error_old: Tensor) -> Tensor:
    """r_theta = -(m / w - m_old / w_old), the estimated log pi / pi_old, from normalised errors, [B]."""
    return error_old.detach() - error


def centring_weights(rewards: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    """Weights of the mean that is subtracted within one complete group.

    Args:
        rewards: R in [0, 1], [K].
        advantages: A, [K]; their sign decides at temperature 0.
        temperature: Below 0: uniform. Above 0: softmax(R / T), and softmax(-R / T) for a second loss. 0: the same at
            T = 1 over the members with A > 0, and with A < 0; uniform where there is none.

    Returns:
        [K, J], each column sums to 1; J = 1 for uniform weights, else 2.
    """
    if temperature < 0:
        return torch.full_like(rewards, 1 / rewards.shape[0]).unsqueeze(1)
    columns = []
    for sign in (1.0, -1.0):
        scores = sign * rewards / (temperature or 1.0)
        members = sign * advantages > 0
        if temperature == 0 and bool(members.any()):
            scores = scores.masked_fill(~members, -torch.inf)
        elif temperature == 0:
            scores = torch.zeros_like(scores)
        columns.append(scores.softmax(dim=0))
    return torch.stack(columns, dim=1)


def centred(
    implicit: Tensor, rewards: Tensor, advantages: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """What one complete group gives to each of its members, [K, 2 J], detached.

    Args:
        implicit: r_theta, [K].
        rewards: R, [K].
        advantages: A, [K].
        temperature: See `centring_weights`.
        mask: bool [K]; the other members are in no mean, and get zeros. None = all count.

    Returns:
        The J weighted means of r_theta (equal in all rows), then the J centred rewards R_c = R - sum w R.
    """
    if mask is not None:
        result = rewards.new_zeros(rewards.shape[0], 2 if temperature < 0 else 4)
        if bool(mask.any()):
            result[mask] = centred(implicit[mask], rewards[mask], advantages[mask], temperature)
        return result
    weights = centring_weights(rewards, advantages, temperature)
    means = (weights * implicit.detach().unsqueeze(1)).sum(dim=0, keepdim=True).expand_as(weights)
    return torch.cat([means, rewards.unsqueeze(1) - (weights * rewards.unsqueeze(1)).sum(dim=0)], dim=1)


def crd_loss(
    implicit: Tensor,
    centring: Tensor,
    *,
    beta: float,
    bound: float,
    loss_type: Literal["mse", "bce"] = "mse",
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A_max / beta mean (beta r_c - R_c)^2, with r_c = r_theta - its (detached) group mean.

    Args:
        implicit: r_theta, [B], with graph.
        centring: Rows of `centred`, [B, 2 J]; the J losses are averaged.
        beta: Factor of the implicit reward.
        bound: A_max.
        loss_type: "mse", or "bce": cross-entropy of logits beta r_c with targets sigmoid(R_c).
        mask: bool [B]; the terms of other samples are 0. None = all count.

    Returns:
        The loss, and detached scalars: implicit_reward_abs (mean |r_c|), policy_loss.
    """
    check_rows(implicit, first_column=centring[:, 0])
    means, targets = centring.detach().to(implicit.dtype).chunk(2, dim=1)
    scaled = beta * (implicit.unsqueeze(1) - means)
    if loss_type == "mse":
        terms = (scaled - targets).square()
    else:
        terms = torch.nn.functional.binary_cross_entropy_with_logits(scaled, targets.sigmoid(), reduction="none")
    loss = bound / beta * agg_loss(terms.mean(dim=1), mask)
    return loss, {"implicit_reward_abs": (scaled.detach() / beta).abs().mean(), "policy_loss": loss.detach()}


def adaptive_kl_weights(rewards: Tensor, kl_beta: float, floor: float) -> Tensor:
    """u + R (1 - u) with u = floor / kl_beta, [B]: times kl_beta it grows from `floor` (R = 0) to kl_beta (R = 1)."""
    ratio = floor / kl_beta
    return ratio + rewards.detach() * (1 - ratio)
