"""GRPO on the transitions of a diffusion sampler: PPO's clipped surrogate with group-relative advantages.

Flow-GRPO, arXiv 2505.05470; the clipped surrogate is PPO's, arXiv 1707.06347 equation 7. Log-probabilities are means
over latent elements, which is what makes a clip range of 1e-4 meaningful.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.objectives.common import agg_loss, check_rows


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean max(-A rho, -A clip(rho, 1 + c_lo, 1 + c_hi)) with rho = exp(l - l_old).

    Args:
        log_prob: l of the current policy, [B], with graph.
        old_log_prob: l_old from the rollout, [B]; detached here.
        advantages, clip_range, weights, mask: As in `clipped_surrogate`, which also says what is returned.
    """
    check_rows(log_prob, old_log_prob=old_log_prob)
    log_ratio = log_prob - old_log_prob.detach().to(log_prob.dtype)
    return clipped_surrogate(log_ratio, advantages, clip_range, weights, mask)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean max(-A rho, -A clip(rho, 1 + c_lo, 1 + c_hi)), given log rho.

    Clipping happens on log rho, where a range of 1e-6 is still resolved, and before the exponential, so that a ratio
    that would overflow has the value and the zero gradient of its clip. At the very edge of the range the gradient
    passes.

    Args:
        log_ratio: log rho, [B], with graph.
        advantages: A, [B], already clipped to their own range; detached here.
        clip_range: (c_lo, c_hi), -1 < c_lo < 0 < c_hi.
        weights: Factor of each sample's term, [B] (a step weighting, for example); None = 1.
        mask: bool [B]; the terms of other samples are 0. None = all count.

    Returns:
        The scalar loss, and detached float64 scalars:
        ratio_mean: mean rho, exactly 1 when the log-probs are equal.
        ratio_deviation_max: max |rho - 1|.
        clip_fraction: share of samples whose gradient the clip cuts off.
        approx_kl: mean (log rho)^2 / 2.
        policy_loss: the loss.

    Raises:
        InputError: If the clip range does not enclose 0.
        ValueError: If shapes differ.
    """
    check_rows(log_ratio, advantages=advantages)
    log_lo, log_hi = log_clip_range(clip_range)
    advantages = advantages.detach().to(log_ratio.dtype)

    # max(-A rho, -A clip(rho)) is -A min(rho, 1 + c_hi) for A > 0 and -A max(rho, 1 + c_lo) for A < 0. A = 0 is cut on
    # both sides: 0 * exp(large) would be NaN.
    above, below = log_ratio > log_hi, log_ratio < log_lo
    cut = (above & (advantages >= 0)) | (below & (advantages <= 0))
    terms = -advantages * torch.where(cut, log_ratio.detach().clamp(log_lo, log_hi), log_ratio).exp()
    if weights is not None:
        check_rows(log_ratio, weights=weights)
        terms = terms * weights.detach().to(terms.dtype)
    if mask is not None:
        check_rows(log_ratio, mask=mask)
    loss = agg_loss(terms, mask)
    return loss, {
        **ratio_metrics(log_ratio),
        "clip_fraction": (cut & (advantages != 0)).double().mean(),
        "policy_loss": loss.detach().double(),
    }


@torch.no_grad()
def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """`ratio_mean`, `ratio_deviation_max` and `approx_kl` of log rho, [B], as float64 scalars."""
    exact = log_ratio.double()
    return {
        "ratio_mean": exact.exp().mean(),
        "ratio_deviation_max": exact.expm1().abs().max(),
        "approx_kl": exact.square().mean() / 2,
    }


def log_clip_range(clip_range: tuple[float, float]) -> tuple[float, float]:
    """(log(1 + c_lo), log(1 + c_hi)).

    Raises:
        InputError: Unless -1 < c_lo < 0 < c_hi.
    """
    lo, hi = clip_range
    if not -1 < lo < 0 < hi < math.inf:
        raise InputError(
            f"clip_range is ({lo}, {hi}) (train.clip_range): the lower bound must be in (-1, 0) and the upper one "
            f"above 0, such as (-1e-4, 1e-4)."
        )
    return math.log1p(lo), math.log1p(hi)
