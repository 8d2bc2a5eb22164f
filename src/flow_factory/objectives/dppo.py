"""Flow-DPPO, arXiv 2606.11025: a trust region by the divergence itself instead of a clip of the sampled ratio.

The policy of a step is a Gaussian with known q, so its divergence from the old one is exact and costs nothing, where
the ratio of one sample is a noisy estimate of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_factory.objectives.common import agg_loss, check_rows
from flow_factory.objectives.grpo import ratio_metrics


def dppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    divergence: Tensor,
    advantages: Tensor,
    threshold: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -A rho over the samples that are inside the trust region or on their way back to it.

    A term with D >= threshold whose gradient moves further away, (rho > 1 and A > 0) or (rho < 1 and A < 0), is 0; all
    others are unclipped. The direction needs only the sign of l - l_old, so it does not depend on the log-probability's
    form.

    Args:
        log_prob: l, [B], with graph.
        old_log_prob: l_old, [B].
        divergence: D of each sample's step, [B]; detached here.
        advantages: A, [B].
        threshold: Divergence from which on terms are cut.
        mask: bool [B]; the terms of other samples are 0. None = all count.

    Returns:
        The scalar loss, and `ratio_metrics` with masked_fraction (samples that are cut), divergence_mean,
        divergence_max and policy_loss.
    """
    check_rows(log_prob, old_log_prob=old_log_prob, divergence=divergence, advantages=advantages)
    advantages, divergence = advantages.detach().to(log_prob.dtype), divergence.detach()
    log_ratio = log_prob - old_log_prob.detach().to(log_prob.dtype)
    away = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    cut = (divergence >= threshold) & away
    # `where` on both sides of the exponential: a product with a 0/1 mask would turn inf into NaN.
    gone = cut | (advantages == 0)
    ratio = torch.where(gone, torch.zeros_like(log_ratio), log_ratio).exp()
    terms = torch.where(gone, torch.zeros_like(ratio), -advantages * ratio)
    if mask is not None:
        check_rows(log_prob, mask=mask)
    loss = agg_loss(terms, mask)
    return loss, {
        **ratio_metrics(log_ratio),
        "masked_fraction": cut.double().mean(),
        "divergence_mean": divergence.double().mean(),
        "divergence_max": divergence.double().max(),
        "policy_loss": loss.detach().double(),
    }
