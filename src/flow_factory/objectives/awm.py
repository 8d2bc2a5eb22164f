"""Advantage Weighted Matching: PPO with the (weighted) flow-matching error in the place of a log-likelihood.

Xue et al., "Advantage Weighted Matching: Aligning RL with Pretraining in Diffusion Models", arXiv 2509.25050. The
flow-matching loss is a bound on the negative log-likelihood of a sample, so its negative serves as the log-probability
of the whole sample under the policy, and the objective keeps the form of pretraining.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from flow_factory.objectives.grpo import grpo_loss
from flow_factory.objectives.matching import advantage_bound

Weighting = Literal["Uniform", "t", "t**2", "huber", "ghuber"]
# Keeps the root's gradient finite at a perfect match.
_EPSILON = 1e-10
# A clip of 1, as published, is (0, 2): no lower bound at all. This one is as good, and has a logarithm.
_NO_LOWER_BOUND = math.nextafter(-1.0, 0.0)


def pseudo_log_prob(weighting: Weighting, error: Tensor, sigma: Tensor, power: float = 0.25) -> Tensor:
    """l = -weight(m), the pseudo log-probability of each sample at its noise level.

    Args:
        weighting: "Uniform": -m. "t": -s m. "t**2": -s^2 m. "huber": -s (sqrt(m + e) - sqrt(e)). "ghuber":
            -s ((m + e)^p - e^p) / p, with e = 1e-10. The power is taken of the mean, not inside it.
        error: m = mean (v - (e - x0))^2, [B].
        sigma: s, [B].
        power: p of "ghuber"; p = 1/2 is twice "huber".

    Raises:
        ValueError: For an unknown weighting.
    """
    sigma = sigma.to(error.dtype)
    if weighting == "Uniform":
        return -error
    if weighting == "t":
        return -sigma * error
    if weighting == "t**2":
        return -(sigma**2) * error
    if weighting == "huber":
        return -sigma * ((error + _EPSILON).sqrt() - _EPSILON**0.5)
    if weighting == "ghuber":
        return -sigma * ((error + _EPSILON) ** power - _EPSILON**power) / power
    raise ValueError(f"unknown weighting {weighting!r}: Uniform, t, t**2, huber or ghuber.")


def awm_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
    adv_clip_range: tuple[float, float],
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate on rho = exp(l - l_old) of each (sample, time), with A = clip(A) / A_max.

    Before the first update of a cycle l_old is l, rho is exactly 1, and the gradient is that of
    mean A weight(m): an advantage-weighted matching loss.

    Args:
        log_prob: l, [B], with graph.
        old_log_prob: l_old on the same noise and time; detached.
        advantages: A, [B], unclipped.
        clip_range: (c_lo, c_hi); with c_lo <= -1 no ratio is too small.
        adv_clip_range: The clip of A; the larger bound is A_max.

    Returns:
        As `grpo_loss`.
    """
    scaled = advantages.detach().clamp(*adv_clip_range) / advantage_bound(adv_clip_range)
    clip_range = (max(clip_range[0], _NO_LOWER_BOUND), clip_range[1])
    return grpo_loss(log_prob, old_log_prob, scaled, clip_range)
