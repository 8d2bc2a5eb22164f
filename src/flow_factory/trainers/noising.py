"""From stored samples to noised states: what decoupled objectives train on instead of the rollout's transitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flow_factory.hparams.training_times import TimeSampling
from flow_factory.samples import (
    ComponentTimes,
    Grid,
    LatentState,
    NoiseKey,
    Purpose,
    SampleBatch,
    StepTimes,
    draw_normal,
)
from flow_factory.samples.reductions import zero_inactive
from flow_factory.scheduler.training_times import draw_sigmas, draw_steps

# The member number of draws that a whole group shares; members themselves count from 0.
_WHOLE_GROUP = -1
# Passes over the samples draw anew; a pass has fewer times than this.
_TIMES_PER_PASS = 1 << 20


TimestepForSigma = Callable[[Tensor, LatentState], Tensor]
"""The network's time for a freely drawn noise level [B], and the latents that it is for."""

ComponentSigma = Callable[[str, Tensor], Tensor]
"""Noise level of a component, by its name, where that of the first one is freely drawn."""


def same_sigma(component: str, sigma: Tensor) -> Tensor:
    """All components at one noise level."""
    return sigma


@dataclass(frozen=True)
class NoisedState:
    """A micro-batch noised to one of its training times.

    Attributes:
        number: Which of the samples' times this is, from 0.
        state: x_s = (1 - s) x0 + s e, float32, batch B; inactive elements keep their values.
        times: s and the network's time of each row; rows may differ.
        target: The velocity that leads back to the row's own data, e - x0; 0 where inactive.
        clean: x0.
    """

    number: int
    state: LatentState
    times: ComponentTimes
    target: LatentState
    clean: LatentState

    @property
    def sigmas(self) -> dict[str, Tensor]:
        """s per component, [B]."""
        return {name: times.sigma for name, times in self.times.components.items()}

    @property
    def sigma(self) -> Tensor:
        """s of the first component, [B], which weightings by noise level use."""
        return next(iter(self.times.components.values())).sigma


def noised_at(
    batch: SampleBatch,
    number: int,
    sampling: TimeSampling,
    grid: Grid,
    timestep_for_sigma: TimestepForSigma,
    *,
    component_sigma: ComponentSigma = same_sigma,
    repeat: int = 0,
    shared_noise: bool = False,
    shared_times: bool = False,
) -> NoisedState:
    """The micro-batch at time `number`, the same however samples are divided into batches and ranks.

    Args:
        batch: Samples whose final latents were kept (`trajectory_indices=(-1,)`).
        number: Which of each sample's times, 0 to `sampling.num_times(grid.length) - 1`.
        sampling: How they are drawn.
        grid: The rollout's grid.
        timestep_for_sigma: The network's time for a freely drawn sigma.
        component_sigma: The components' sigmas for a freely drawn one.
        repeat: Number of the pass over the samples; each draws anew.
        shared_noise: One noise per group and time.
        shared_times: The same times for all members of a group.
    """
    keys = [sample.key for sample in batch]
    clean = batch.trajectory.states[grid.length].to(dtype=torch.float32)
    device = next(iter(clean.components.values())).device
    time_keys = _whole_groups(keys) if shared_times else keys
    noise_keys = _whole_groups(keys) if shared_noise else keys
    times = _times(clean, time_keys, number, sampling, grid, timestep_for_sigma, component_sigma, repeat).to(device)
    step = repeat * _TIMES_PER_PASS + number
    return noised_clean(clean, times, [key.generator(Purpose.TRAIN_NOISE, step) for key in noise_keys], number)


def noised_clean(
    clean: LatentState, times: ComponentTimes, generators: Sequence[torch.Generator], number: int = 0
) -> NoisedState:
    """Clean latents noised to given times.

    Args:
        clean: x0, float32, batch B.
        times: s of each row, on the device of x0.
        generators: Row i's noise is drawn from `generators[i]`, component by component; two states with equal
            generators and shapes get the same noise.
        number: Which of the samples' times this is.
    """
    states, targets = {}, {}
    for name, x0 in clean.items():
        noise = draw_normal(x0.shape[1:], generators).to(x0.device)
        sigma = times[name].sigma.reshape(-1, *[1] * (x0.dim() - 1))
        mask = clean.masks.get(name)
        states[name] = x0 + sigma * zero_inactive(noise - x0, mask)
        targets[name] = zero_inactive(noise - x0, mask)
    return NoisedState(number, LatentState(states, clean.masks), times, LatentState(targets, clean.masks), clean)


def free_times(
    clean: LatentState,
    sigma: Tensor,
    timestep_for_sigma: TimestepForSigma,
    component_sigma: ComponentSigma = same_sigma,
) -> ComponentTimes:
    """Times at a freely drawn sigma [B] of the first component. No step is taken from it, so sigma_next is sigma."""
    sigmas = {name: component_sigma(name, sigma) for name in clean}
    return ComponentTimes({name: StepTimes(s, s, timestep_for_sigma(s, clean)) for name, s in sigmas.items()})


def _times(
    clean: LatentState,
    keys: Sequence[NoiseKey],
    number: int,
    sampling: TimeSampling,
    grid: Grid,
    timestep_for_sigma: TimestepForSigma,
    component_sigma: ComponentSigma,
    repeat: int,
) -> ComponentTimes:
    """Times of each row, on the grid or freely drawn. No step is taken from them, so sigma_next is sigma."""
    generators = [key.generator(Purpose.TRAIN_TIME, repeat) for key in keys]
    if sampling.discrete:
        index = torch.stack([draw_steps(sampling, grid.length, g)[number] for g in generators])
        components = {
            name: StepTimes(sigmas.cpu()[index], sigmas.cpu()[index], grid.timesteps[name].cpu()[index])
            for name, sigmas in grid.sigmas.items()
        }
        return ComponentTimes(components, index, grid.length)
    count = sampling.num_times(grid.length)
    sigma = torch.stack([draw_sigmas(sampling, count, g)[number] for g in generators])
    return free_times(clean, sigma, timestep_for_sigma, component_sigma)


def _whole_groups(keys: Sequence[NoiseKey]) -> list[NoiseKey]:
    return [replace(key, member=_WHOLE_GROUP) for key in keys]
