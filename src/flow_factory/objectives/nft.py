"""DiffusionNFT: policy improvement by contrasting an implicit positive and an implicit negative velocity.

Zheng et al., "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", arXiv 2509.16117. With r the
probability that a sample is a good one, the velocity v is fitted so that v+ = b v + (1 - b) v_old explains the good
samples and v- = (1 + b) v_old - b v the bad ones. At v = v_old the gradient is r's distance from 1/2 times the
gradient of a matching error: samples above their group's mean are fitted, those below are un-fitted.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flow_factory.objectives.common import agg_loss
from flow_factory.objectives.matching import (
    advantage_bound,
    mean_absolute,
    mean_square,
    predicted_clean,
    unit_reward,
)
from flow_factory.samples import LatentState

# Smallest mean absolute error that a squared error is divided by.
_FLOOR = 1e-5


def nft_loss(
    velocity: LatentState,
    old_velocity: LatentState,
    state: LatentState,
    clean: LatentState,
    sigmas: Mapping[str, Tensor],
    advantages: Tensor,
    *,
    beta: float,
    adv_clip_range: tuple[float, float],
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A_max / b mean[ r mean (x0+ - x0)^2 / w+ + (1 - r) mean (x0- - x0)^2 / w- ].

    x0+- = x_s - s v+- is the clean sample that each velocity predicts, and w+- = max(1e-5, mean |x0+- - x0|) its error,
    per sample and detached, which makes all noise levels weigh alike.

    Args:
        velocity: v of the policy, with graph.
        old_velocity: v_old of the policy that sampled; detached here.
        state: x_s.
        clean: x0, with the masks of active elements.
        sigmas: s per component, [B].
        advantages: A, [B], unclipped.
        beta: b.
        adv_clip_range: The clip of A; the larger bound is A_max.
        mask: bool [B]; the terms of other samples are 0, which r = 1/2 would not give. None = all count.

    Returns:
        The loss, float64, and detached scalars: reward (mean r), error (mean over samples of mean (x0+ - x0)^2),
        policy_loss.
    """
    old = old_velocity.detach()
    positive = LatentState({n: beta * v + (1 - beta) * old[n] for n, v in velocity.items()})
    negative = LatentState({n: (1 + beta) * old[n] - beta * v for n, v in velocity.items()})
    reward = unit_reward(advantages, adv_clip_range)
    plus, error = _weighted_error(positive, state, clean, sigmas)
    minus, _ = _weighted_error(negative, state, clean, sigmas)
    loss = advantage_bound(adv_clip_range) / beta * agg_loss(reward * plus + (1 - reward) * minus, mask)
    return loss, {"reward": reward.mean(), "error": error.detach().mean(), "policy_loss": loss.detach()}


def _weighted_error(
    velocity: LatentState, state: LatentState, clean: LatentState, sigmas: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """mean (x0^ - x0)^2 / w and mean (x0^ - x0)^2, [B]."""
    predicted = predicted_clean(state, velocity, sigmas)
    error = mean_square(predicted, clean)
    return error / mean_absolute(predicted, clean).detach().clamp(min=_FLOOR), error
