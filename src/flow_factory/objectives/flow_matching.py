"""Flow matching on data: the squared error of the velocity along straight paths from noise to given media.

Lipman et al., "Flow Matching for Generative Modeling", arXiv 2210.02747, equation 23 with sigma_min = 0; Liu et al.,
"Flow Straight and Fast", arXiv 2209.03003, equation 1. Which times are drawn weighs them (Esser et al., "Scaling
Rectified Flow Transformers for High-Resolution Image Synthesis", arXiv 2403.03206, section 3.1), so no weight is
applied here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_factory.objectives.common import check_rows
from flow_factory.objectives.matching import mean_square
from flow_factory.samples import LatentState

_NOISE_BANDS = (("error_low_noise", 0.0, 1 / 3), ("error_mid_noise", 1 / 3, 2 / 3), ("error_high_noise", 2 / 3, 1.1))


def flow_matching_loss(velocity: LatentState, target: LatentState, sigma: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """mean over rows of m = mean over elements of (v - (e - x0))^2.

    Args:
        velocity: v of the network, batch B, with graph.
        target: e - x0; its masks say which elements count.
        sigma: Noise level of each row, [B]; for the metrics only.

    Returns:
        The scalar loss in float64, and detached means of m over the rows of each third of the noise axis that has any
        (`error_low_noise`, `error_mid_noise`, `error_high_noise`): the error depends strongly on sigma, so the loss of
        few rows mostly shows which times were drawn.

    Raises:
        ValueError: If `sigma` is not one value per row.
    """
    errors = mean_square(velocity, target)
    check_rows(errors, sigma=sigma)
    metrics: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, low, high in _NOISE_BANDS:
            rows = (sigma >= low) & (sigma < high)
            if rows.any():
                metrics[name] = errors[rows].mean()
    return errors.mean(), metrics
