"""Solvers with memory: the pipeline's own scheduler (`solver: pipeline`), and DPM-Solver++ 2M (`outside_solver`)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flow_factory.samples import ComponentTimes, Grid, LatentState
from flow_factory.scheduler.solvers import dpm_solver_2m_step

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter


class PipelineSolver:
    """Steps deep copies of the pipeline's scheduler (one for each component), whatever its order or memory.

    Args:
        adapter: Whose scheduler to copy.
        num_steps: num_inference_steps.
        state: The initial latents; the grid may depend on their size.
        condition: Encoded inputs.
        grid: The evaluations that are taken: all of the scheduler's, or the last of them, where a pipeline starts late.
    """

    def __init__(
        self, adapter: BaseAdapter[Any], num_steps: int, state: LatentState, condition: Any, grid: Grid
    ) -> None:
        self._adapter = adapter
        self._taken = grid.length
        arguments = adapter.grid_arguments(num_steps, state, condition)
        self._schedulers: dict[str, Any] = {}
        for name in state:
            scheduler = copy.deepcopy(adapter.component_scheduler(name))
            if "sigmas" in arguments or "timesteps" in arguments:
                scheduler.set_timesteps(device=adapter.device, **arguments)
            else:
                scheduler.set_timesteps(num_steps, device=adapter.device, **arguments)
            self._schedulers[name] = scheduler

    def step(self, index: int, state: LatentState, velocity: LatentState, times: ComponentTimes) -> LatentState:
        """The state after step `index`; pinned elements keep their values."""
        stepped = {}
        for name, x in state.items():
            scheduler = self._schedulers[name]
            output = self._adapter.scheduler_output(name, velocity[name], x, times)
            sample = self._adapter.to_scheduler(scheduler, x, times[name].sigma)
            timestep = scheduler.timesteps[index - self._taken]
            sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
            moved = self._adapter.from_scheduler(scheduler, sample, times[name].sigma_next)
            mask = state.masks.get(name)
            stepped[name] = moved if mask is None else torch.where(mask, moved, x)
        return LatentState(stepped, state.masks)


class MultistepSolver:
    """DPM-Solver++ 2M over all components; remembers the last step's prediction of the clean state."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Tensor, Tensor]] = {}

    def restart(self) -> None:
        """Forgets the last step: the trajectory that it lay on was left, by a stochastic step."""
        self._last = {}

    def step(self, state: LatentState, velocity: LatentState, times: ComponentTimes) -> LatentState:
        """The state after the step; pinned elements keep their values."""
        stepped = {}
        for name, x in state.items():
            t = times[name]
            moved = dpm_solver_2m_step(x, velocity[name], t.sigma, t.sigma_next, self._last.get(name))
            sigma = t.sigma.to(x.dtype).view((-1,) + (1,) * (x.dim() - 1))
            self._last[name] = (x - sigma * velocity[name], t.sigma)
            mask = state.masks.get(name)
            stepped[name] = moved if mask is None else torch.where(mask, moved, x)
        return LatentState(stepped, state.masks)
