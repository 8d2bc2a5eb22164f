"""`solver: pipeline`: the pipeline's own scheduler over the toolkit's velocity; for evaluation, not for training."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from flow_factory.samples import ComponentTimes, LatentState

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter


class PipelineSolver:
    """Steps deep copies of the pipeline's scheduler (one for each component), whatever its order or memory.

    Args:
        adapter: Whose scheduler to copy.
        num_steps: num_inference_steps.
        state: The initial latents; the grid may depend on their size.
        condition: Encoded inputs.
    """

    def __init__(self, adapter: BaseAdapter[Any], num_steps: int, state: LatentState, condition: Any) -> None:
        self._adapter = adapter
        arguments = adapter.grid_arguments(num_steps, state, condition)
        self._schedulers: dict[str, Any] = {}
        for name in state:
            scheduler = copy.deepcopy(adapter.pipeline.scheduler)
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
            moved = scheduler.step(output, scheduler.timesteps[index], x, return_dict=False)[0]
            mask = state.masks.get(name)
            stepped[name] = moved if mask is None else torch.where(mask, moved, x)
        return LatentState(stepped, state.masks)
