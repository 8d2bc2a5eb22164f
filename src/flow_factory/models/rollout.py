"""The one rollout: from noise to media, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.solver import PipelineSolver
from flow_factory.models.step import StepOutput, transition
from flow_factory.samples import ComponentTimes, Grid, LatentState, Trajectory, draw_normal
from flow_factory.scheduler.names import Dynamics, parse_dynamics

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter

NoiseLevels = Sequence[float] | Callable[[Grid], Sequence[float]]


@dataclass(frozen=True)
class RolloutOutput:
    """What a rollout of B rows gives.

    Attributes:
        trajectory: The stored states, log-probs and means, batched; its grid lies on the adapter's device.
        media: B decoded media (uint8 [C, H, W] on CPU for images), or None if decoding was not asked for.
        grid: The grid walked.
    """

    trajectory: Trajectory
    media: list[Any] | None
    grid: Grid


@torch.no_grad()
def inference(
    self: BaseAdapter[Any],
    condition: Any,
    *,
    initial_generators: Sequence[torch.Generator],
    num_inference_steps: int,
    guidance: GuidanceSpec,
    height: int,
    width: int,
    step_generators: Callable[[int], Sequence[torch.Generator]] | None = None,
    noise_levels: NoiseLevels | None = None,
    dynamics: Dynamics | str = Dynamics.FLOW_SDE,
    compute_log_prob: bool = False,
    log_prob_normalised: bool = True,
    trajectory_indices: Sequence[int] | Literal["all", "sde"] = (-1,),
    stores: Collection[str] = frozenset(),
    storage_dtype: torch.dtype = torch.float32,
    solver: Literal["dynamics", "pipeline"] = "dynamics",
    decode: bool = True,
    should_stop: Callable[[], None] | None = None,
) -> RolloutOutput:
    """Samples B examples, one for each generator.

    Args:
        condition: Encoded inputs, batch B.
        initial_generators: One CPU generator per row for the initial noise.
        num_inference_steps: What the pipeline's `num_inference_steps` means; T is the grid's length.
        guidance: How predictions are combined.
        height: Pixels.
        width: Pixels.
        step_generators: Step index to one CPU generator per row; needed for stochastic steps.
        noise_levels: eta of each step, length T, or a function of the grid that gives them; None or 0 = ODE step.
        dynamics: Kernel of the stochastic steps.
        compute_log_prob: Whether to keep the log-probability of every stochastic step.
        log_prob_normalised: See `scheduler.dynamics.log_prob`.
        trajectory_indices: Which states to keep: grid indices 0..T (T, or -1, = final latents), "all", or "sde" = those
            before and after every stochastic step, and the final one.
        stores: {"mean"} keeps the transition means of stochastic steps.
        storage_dtype: Dtype of kept states. A state that is kept is rounded *before* the rollout goes on from it, so
            that a replay sees what the rollout saw.
        solver: "dynamics", or "pipeline" = the pipeline's own scheduler (no stochastic steps).
        decode: Whether to decode the final latents.
        should_stop: Called before every step; it may raise to abandon the rollout.

    Raises:
        InputError: For noise levels or indices that do not fit the grid, log-probs without a stochastic step, a
            stochastic step without generators, or guidance without negative conditions.
    """
    condition = self.prepare_condition_state(condition.to(self.device))
    state = self.prepare_latents(condition, initial_generators, height, width)
    grid = self.sigma_grid(num_inference_steps, state, condition)
    levels = _levels(noise_levels, grid, parse_dynamics(dynamics), solver)
    if compute_log_prob and not any(levels):
        raise InputError("log-probabilities need at least one stochastic step; all noise levels of this rollout are 0.")
    keep = _kept(trajectory_indices, levels)
    pipeline_solver = PipelineSolver(self, num_inference_steps, state, condition) if solver == "pipeline" else None

    states: dict[int, LatentState] = {}
    log_probs: dict[int, Tensor] = {}
    means: dict[int, LatentState] = {}
    if 0 in keep:
        states[0], state = _stored(state, storage_dtype)
    for index, eta in enumerate(levels):
        if should_stop is not None:
            should_stop()
        times = grid.times(index, state.batch_size, self.device)
        velocity = self.predict(state, times, condition, guidance)
        rounding = storage_dtype if index + 1 in keep else torch.float32
        if pipeline_solver is not None:
            state = pipeline_solver.step(index, state, velocity, times)
        else:
            output = _transition(state, velocity, times, eta, index, step_generators, dynamics, rounding,
                                 compute_log_prob, log_prob_normalised)  # fmt: skip
            state = output.next_state
            if output.log_prob is not None:
                log_probs[index] = output.log_prob
            if eta > 0 and "mean" in stores:
                means[index] = output.mean.to(dtype=storage_dtype)
        if index + 1 in keep:
            states[index + 1], state = _stored(state, storage_dtype)

    media = self.decode_latents(self.finalize_state(state, condition)) if decode else None
    return RolloutOutput(Trajectory(grid, levels, states, log_probs, means), media, grid)


def _transition(
    state: LatentState,
    velocity: LatentState,
    times: ComponentTimes,
    eta: float,
    index: int,
    step_generators: Callable[[int], Sequence[torch.Generator]] | None,
    dynamics: Dynamics | str,
    rounding: torch.dtype,
    compute_log_prob: bool,
    log_prob_normalised: bool,
) -> StepOutput:
    noise = None
    if eta > 0:
        if step_generators is None:
            raise InputError(f"step {index} is stochastic (noise level {eta}) but no step_generators were given.")
        generators = step_generators(index)
        noise = state.map(lambda x: draw_normal(x.shape[1:], generators).to(x.device))
    return transition(
        state,
        velocity,
        times,
        dynamics=dynamics,
        noise_level=eta,
        noise=noise,
        compute_log_prob=compute_log_prob and eta > 0,
        log_prob_normalised=log_prob_normalised,
        storage_dtype=rounding,
    )


def _levels(noise_levels: NoiseLevels | None, grid: Grid, dynamics: Dynamics, solver: str) -> tuple[float, ...]:
    """eta of each step, length T."""
    given = noise_levels(grid) if callable(noise_levels) else noise_levels
    levels = (0.0,) * grid.length if given is None else tuple(float(eta) for eta in given)
    if len(levels) != grid.length:
        raise InputError(f"{len(levels)} noise levels were given for a grid of {grid.length} steps.")
    if any(eta < 0 for eta in levels):
        raise InputError(f"noise levels must be at least 0; got {levels}.")
    if any(levels) and (solver == "pipeline" or not dynamics.stochastic):
        what = "solver 'pipeline'" if solver == "pipeline" else "ODE dynamics"
        raise InputError(f"{what} has no stochastic steps; give noise levels of 0, or another scheduler.dynamics_type.")
    return levels


def _kept(indices: Sequence[int] | str, levels: Sequence[float]) -> frozenset[int]:
    """Grid indices of the states to keep, in 0..T."""
    length = len(levels)
    if indices == "all":
        return frozenset(range(length + 1))
    if indices == "sde":
        steps = [i for i, eta in enumerate(levels) if eta > 0]
        return frozenset([*steps, *(i + 1 for i in steps), length])
    if isinstance(indices, str):
        raise InputError(f"trajectory_indices: {indices!r} is neither 'all', 'sde' nor a sequence of grid indices.")
    kept = frozenset(i + length + 1 if i < 0 else i for i in indices)
    outside = sorted(i for i in kept if not 0 <= i <= length)
    if outside:
        raise InputError(f"trajectory_indices {outside} are not on a grid of {length} steps (0 to {length}).")
    return kept


def _stored(state: LatentState, dtype: torch.dtype) -> tuple[LatentState, LatentState]:
    """The state as it is stored, and as the rollout goes on from it (the same values in float32)."""
    stored = state.to(dtype=dtype)
    return stored, state if dtype == torch.float32 else stored.to(dtype=torch.float32)
