"""Diffusion-DPO on pairs: prefer the winner's matching error to fall further below the reference's than the loser's.

Wallace et al., "Diffusion Model Alignment Using Direct Preference Optimization", arXiv 2311.12908, equation 14.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_factory.objectives.common import check_rows


def dpo_loss(
    winner: Tensor,
    loser: Tensor,
    winner_ref: Tensor,
    loser_ref: Tensor,
    beta: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -log sigmoid( -(beta / 2) [ (m_w - m_w_ref) - (m_l - m_l_ref) ] ).

    Args:
        winner: m_w, matching error of each pair's winner under the policy, [P], with graph.
        loser: m_l, of the loser, on the same noise and time.
        winner_ref: m_w_ref, under the reference; detached.
        loser_ref: m_l_ref, under the reference; detached.
        beta: Strength; errors are means over elements.
        weights: Factor of each pair, [P]: 0 for the place of a group that has no pair. The mean is over all places.

    Returns:
        The loss, and detached scalars over the pairs that count: accuracy (share with a positive margin), margin (mean
        of the sigmoid's argument), policy_loss.
    """
    check_rows(winner, loser=loser, winner_ref=winner_ref, loser_ref=loser_ref)
    margin = -(beta / 2) * ((winner - winner_ref.detach()) - (loser - loser_ref.detach()))
    terms = -torch.nn.functional.logsigmoid(margin)
    counted = torch.ones_like(terms) if weights is None else weights.detach().to(terms.dtype)
    check_rows(winner, weights=counted)
    loss = (terms * counted).mean()
    with torch.no_grad():
        total = counted.sum().clamp(min=1)
        metrics = {
            "accuracy": ((margin > 0) * counted).sum() / total,
            "margin": (margin * counted).sum() / total,
            "policy_loss": loss.detach(),
        }
    return loss, metrics
