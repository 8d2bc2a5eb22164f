"""The sigma grid, asked from the pipeline's own scheduler and never rebuilt from a formula."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from flow_factory.errors import InputError
from flow_factory.samples.trajectory import Grid


def pipeline_grid(
    scheduler: Any,
    num_steps: int | None,
    *,
    sigmas: Sequence[float] | None = None,
    mu: float | None = None,
    timesteps: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> Grid:
    """The grid that a diffusers pipeline walks.

    A deep copy of the scheduler is asked for `set_timesteps` with exactly the arguments that the pipeline's `__call__`
    passes on: `timesteps` or `sigmas` where it gives them, else the number of steps; `mu` where it has one. The float
    sigmas are copied from the scheduler: looking them up through integer timesteps is off by up to 1e-3.

    Args:
        scheduler: A diffusers flow-matching scheduler; left untouched.
        num_steps: num_inference_steps; not used where `sigmas` or `timesteps` are given.
        sigmas: What the pipeline passes, before the scheduler's shift.
        mu: Dynamic shift, for schedulers with `use_dynamic_shifting`.
        timesteps: What the pipeline passes.
        device: Where the tensors are made; the same as in the pipeline's call.

    Returns:
        A grid of one component: sigmas [T + 1] and timesteps [T]. T is not always `num_steps`.

    Raises:
        InputError: If the scheduler has no flow sigmas, or they are not finite or do not run from noise to data.
    """
    own = copy.deepcopy(scheduler)
    extra: dict[str, Any] = {} if mu is None else {"mu": mu}
    given = {"timesteps": timesteps, "sigmas": sigmas}
    given = {name: values for name, values in given.items() if values is not None}
    if given:
        own.set_timesteps(device=device, **given, **extra)
    elif num_steps is None or num_steps < 1:
        raise InputError(f"num_inference_steps is {num_steps}; a grid needs at least 1 step.")
    else:
        own.set_timesteps(num_steps, device=device, **extra)

    name = type(scheduler).__name__
    grid_sigmas = getattr(own, "sigmas", None)
    if not isinstance(grid_sigmas, torch.Tensor):
        raise InputError(
            f"scheduler {name} has no sigmas, so its grid is not in flow coordinates. Use a flow-matching scheduler, "
            f"or override the adapter's sigma_grid."
        )
    grid_sigmas, grid_timesteps = grid_sigmas.clone(), own.timesteps.clone()
    if grid_sigmas.shape[0] != grid_timesteps.shape[0] + 1:
        raise InputError(
            f"scheduler {name} gives {grid_sigmas.shape[0]} sigmas for {grid_timesteps.shape[0]} timesteps; a grid "
            f"needs one more sigma than timesteps. Override the adapter's sigma_grid."
        )
    if not bool(torch.isfinite(grid_sigmas).all()):
        raise InputError(
            f"scheduler {name} gives sigmas that are not finite for num_inference_steps {num_steps} (a shift of "
            f"the grid's end divides 0 by 0 where there is 1 step). Take more steps."
        )
    steps_down = bool((grid_sigmas[1:] <= grid_sigmas[:-1]).all())
    if not steps_down or float(grid_sigmas[0]) > 1 or float(grid_sigmas[-1]) < 0:
        raise InputError(
            f"scheduler {name} gives sigmas from {float(grid_sigmas[0]):g} to {float(grid_sigmas[-1]):g}; flow sigmas "
            f"fall from at most 1 (noise) to 0 (data). Override the adapter's sigma_grid to convert them."
        )
    return Grid.single(grid_sigmas.to(torch.float32), grid_timesteps)
