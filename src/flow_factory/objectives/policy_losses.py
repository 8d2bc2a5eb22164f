"""The policy losses that ship, as `train.policy_loss` names them: each a few lines around a pure objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from flow_factory.hparams.types import PositiveFloat, SymmetricRange
from flow_factory.objectives.common import agg_loss
from flow_factory.objectives.dppo import dppo_loss
from flow_factory.objectives.grpo import clipped_surrogate, grpo_loss
from flow_factory.objectives.grpo_guard import gradient_scale, grpo_guard_loss, guard_log_ratio
from flow_factory.objectives.policy_step import PolicyStep
from flow_factory.objectives.registry import register_policy_loss

Result = tuple[Tensor, dict[str, Tensor]]


@register_policy_loss("grpo")
def grpo(step: PolicyStep, advantages: Tensor, mask: Tensor, *, clip_range: SymmetricRange = (-1e-4, 1e-4)) -> Result:
    """PPO's clip on the ratio of each step (Flow-GRPO, arXiv 2505.05470)."""
    return grpo_loss(step.log_prob, step.old_log_prob, advantages, clip_range, mask=mask)


@register_policy_loss("grpo-guard", needs={"old_mean"})
def grpo_guard(
    step: PolicyStep, advantages: Tensor, mask: Tensor, *, clip_range: SymmetricRange = (-2e-6, 2e-6)
) -> Result:
    """A centred, normalised ratio, and gradients of equal size per step (GRPO-Guard, arXiv 2510.22319)."""
    log_ratio = guard_log_ratio(step.next_state, step.mean, step.old_mean, step.spread, step.active)
    scale = gradient_scale(step.dynamics, step.h, step.velocity_scale)
    return grpo_guard_loss(log_ratio, scale, advantages, clip_range, mask)


def _dppo_needs(params: Mapping[str, Any]) -> set[str]:
    return {"old_velocity" if params["kl_mask_type"] == "v-based" else "old_mean"}


@register_policy_loss("dppo", needs=_dppo_needs)
def dppo(
    step: PolicyStep,
    advantages: Tensor,
    mask: Tensor,
    *,
    kl_mask_type: Literal["v-based", "x-based"] = "x-based",
    kl_mask_threshold: PositiveFloat = 1e-6,
) -> Result:
    """Samples whose step has left a divergence threshold are pushed no further (Flow-DPPO, arXiv 2606.11025).

    x-based: the exact KL divergence per element, mean (mu - mu_old)^2 / (2 q^2). v-based: mean (v - v_old)^2.
    """
    with torch.no_grad():
        if kl_mask_type == "v-based":
            difference = step.velocity - step.old_velocity
        else:
            difference = (step.mean - step.old_mean) / (2**0.5 * step.spread)
        divergence = step.row_mean(difference * difference)
    return dppo_loss(step.log_prob, step.old_log_prob, divergence, advantages, kl_mask_threshold, mask)


@register_policy_loss("gspo", needs={"sequence_log_ratio"})
def gspo(step: PolicyStep, advantages: Tensor, mask: Tensor, *, clip_range: SymmetricRange = (-1e-4, 1e-4)) -> Result:
    """PPO's clip on the ratio of the whole trajectory (GSPO, arXiv 2507.18071), one step at a time.

    The ratio of a sample is s = exp(mean over its trained steps of l - l_old), and all its steps are clipped or none.
    So that every step keeps its own backward pass, a step's term has the value of s and the gradient of its own
    log-probability, log s_t = stop(log s) + l_t - stop(l_t): the paper's token form, whose terms of all steps together
    have the gradient of the sequence form.
    """
    log_ratio = step.sequence_log_ratio + (step.log_prob - step.log_prob.detach())
    return clipped_surrogate(log_ratio, advantages, clip_range, mask=mask)


@register_policy_loss("reinforce")
def reinforce(step: PolicyStep, advantages: Tensor, mask: Tensor) -> Result:
    """-mean A l: no ratio and no clip, for one update per cycle (Williams, Machine Learning 8, 1992)."""
    loss = agg_loss(-advantages.to(step.log_prob.dtype) * step.log_prob, mask)
    return loss, {"log_prob": step.log_prob.detach().mean(), "policy_loss": loss.detach()}
