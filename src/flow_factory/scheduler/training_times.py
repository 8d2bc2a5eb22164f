"""Training times of decoupled objectives: stratified draws of sigma, or of steps of the rollout's grid.

A sample is noised again at several times per pass. Drawing one time in each of as many equal strata covers the range
evenly within one sample, which lowers the variance of the gradient against independent draws; the strata are then
permuted, so that no accumulation window sees only noisy or only clean times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams.training_times import TimeSampling

# Before the map onto the range: no sigma so small that the target is all noise over nothing, none that is exactly 1.
_LOWEST, _HIGHEST = 0.01, 1.0 - 1e-6


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """k s / (1 + (k - 1) s): acts on sigma itself, keeps 0 and 1, and makes times noisier for k > 1."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def draw_sigmas(sampling: TimeSampling, count: int, generator: torch.Generator) -> Tensor:
    """Freely drawn noise levels of one sample, float32 [count].

    One quantile per stratum ((i + u_i) / count with u_i uniform), through the inverse distribution function of the
    strategy, then the shift, the clamp to [0.01, 1 - 1e-6] and the affine map onto [1 - hi, 1 - lo].

    Args:
        sampling: "uniform" or "logit_normal", with its shift and range.
        count: How many.
        generator: CPU generator of this sample.
    """
    jitter = torch.rand(count, generator=generator, dtype=torch.float64)
    quantiles = _permuted((torch.arange(count, dtype=torch.float64) + jitter) / count, generator)
    if sampling.strategy == "logit_normal":
        # The standard normal of a quantile that rounds to 0 or 1 would be infinite.
        normal = torch.special.ndtri(quantiles.clamp(1e-12, 1 - 1e-12))
        quantiles = torch.sigmoid(sampling.logit_mean + sampling.logit_std * normal)
    elif sampling.strategy != "uniform":
        raise ValueError(f"strategy {sampling.strategy!r} draws steps of a grid; use draw_steps.")
    low, high = sampling.timestep_range
    sigma = shift_sigma(quantiles, sampling.time_shift).clamp(_LOWEST, _HIGHEST)
    return ((1.0 - high) + sigma * (high - low)).to(torch.float32)


def draw_steps(sampling: TimeSampling, num_steps: int, generator: torch.Generator) -> Tensor:
    """Grid indices of one sample's training times, int64 [n].

    Systematic sampling: the C candidate steps are cut into n equal sub-ranges and one offset, the same in each, picks a
    step in every one. Every step is then equally likely, and none is drawn twice while n <= C.

    Args:
        sampling: A discrete strategy with its range.
        num_steps: N, steps of the grid.
        generator: CPU generator of this sample.

    Raises:
        InputError: If the range holds no step of the grid.
    """
    candidates = sampling.steps(num_steps)
    if not candidates:
        raise InputError(
            f"train.timestep_range {sampling.timestep_range} holds no step of a grid of {num_steps} steps with "
            f"time_sampling_strategy {sampling.strategy!r}. Widen it, or take more num_inference_steps."
        )
    count = sampling.num_times(num_steps)
    if sampling.strategy == "discrete_with_init":
        rest = _systematic(candidates[1:], count - 1, generator)
        chosen = torch.cat([torch.tensor(candidates[:1]), rest])
    else:
        chosen = _systematic(candidates, count, generator)
    return _permuted(chosen, generator)


def _systematic(candidates: Sequence[int], count: int, generator: torch.Generator) -> Tensor:
    """`count` of the candidates, floor(C (i + u) / count) with one u for all i."""
    if count == 0 or not candidates:
        # Step 0 is the only candidate: it fills every place.
        return torch.zeros(count, dtype=torch.int64)
    offset = torch.rand(1, generator=generator, dtype=torch.float64)
    places = (torch.arange(count, dtype=torch.float64) + offset) * len(candidates) / count
    places = places.floor().to(torch.int64).clamp(max=len(candidates) - 1)
    return torch.tensor(candidates, dtype=torch.int64)[places]


def _permuted(values: Tensor, generator: torch.Generator) -> Tensor:
    return values[torch.randperm(values.shape[0], generator=generator)]
