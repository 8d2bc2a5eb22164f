"""Matching errors: how far a velocity is from the one that leads from a noised state back to its own data.

What decoupled objectives are made of. Data x0 is noised to x_s = (1 - s) x0 + s e, whose target velocity is e - x0.
Every error is a mean over the active elements of all components, per row, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from flow_factory.samples import LatentState
from flow_factory.samples.reductions import active_count, combine_row_means, row_mean, zero_inactive


def mean_square(a: LatentState, b: LatentState) -> Tensor:
    """mean (a - b)^2 of each row, [B] float64; inactive elements (`b.masks`) take no part in value or gradient."""
    return _mean_of(lambda difference: difference * difference, a, b)


def mean_absolute(a: LatentState, b: LatentState) -> Tensor:
    """mean |a - b| of each row, [B] float64."""
    return _mean_of(lambda difference: difference.abs(), a, b)


def predicted_clean(state: LatentState, velocity: LatentState, sigmas: Mapping[str, Tensor]) -> LatentState:
    """x0^ = x_s - s v, with s [B] per component."""
    return LatentState(
        {name: x - sigmas[name].reshape(-1, *[1] * (x.dim() - 1)) * velocity[name] for name, x in state.items()},
        state.masks,
    )


def advantage_bound(clip_range: tuple[float, float]) -> float:
    """A_max: what clipped advantages are divided by, so that their size is at most 1."""
    return max(abs(bound) for bound in clip_range)


def unit_reward(advantages: Tensor, clip_range: tuple[float, float]) -> Tensor:
    """r = clip(A) / (2 A_max) + 1/2 in [0, 1], detached float64 [B]: 1/2 for a sample as good as its group."""
    return advantages.detach().double().clamp(*clip_range) / (2 * advantage_bound(clip_range)) + 0.5


def _mean_of(function: Callable[[Tensor], Tensor], a: LatentState, b: LatentState) -> Tensor:
    means, counts = [], []
    for name, value in b.items():
        mask = b.masks.get(name)
        means.append(row_mean(function(zero_inactive(a[name] - value, mask)), mask))
        counts.append(active_count(value, mask))
    return combine_row_means(means, counts)
