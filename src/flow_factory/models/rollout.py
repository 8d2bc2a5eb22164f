"""The one rollout: from noise to media, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.prefix import SharedPrefix
from flow_factory.models.solver import MultistepSolver, PipelineSolver
from flow_factory.models.step import StepOutput, check_rows, transition
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
    generation: Any = None,
    step_generators: Callable[[int], Sequence[torch.Generator]] | None = None,
    noise_levels: NoiseLevels | None = None,
    dynamics: Dynamics | str = Dynamics.FLOW_SDE,
    compute_log_prob: bool = False,
    log_prob_normalised: bool = True,
    trajectory_indices: Sequence[int] | Literal["all", "sde"] = (-1,),
    stores: Collection[str] = frozenset(),
    storage_dtype: torch.dtype = torch.float32,
    solver: Literal["dynamics", "pipeline"] = "dynamics",
    outside_solver: Literal["euler", "dpm2m"] = "euler",
    path: Sequence[int] | None = None,
    shared: SharedPrefix | None = None,
    shared_keys: Sequence[Hashable] = (),
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
        generation: The model-specific fields of `train:` or `eval:`; None means `train:`.
        step_generators: Step index to one CPU generator per row; needed for stochastic steps.
        noise_levels: eta of each step, length T, or a function of the grid that gives them; None or 0 = ODE step.
        dynamics: Kernel of the stochastic steps.
        compute_log_prob: Whether to keep the log-probability of every stochastic step.
        log_prob_normalised: See `scheduler.dynamics.log_prob`.
        trajectory_indices: Which states to keep: grid indices 0..T (T, or -1, = final latents), "all", or "sde" = those
            before and after every stochastic step, and the final one.
        stores: "mean" and "velocity" keep those of stochastic steps, in float32.
        storage_dtype: Dtype of kept states. A state that is kept is rounded *before* the rollout goes on from it, so
            that a replay sees what the rollout saw.
        solver: "dynamics", or "pipeline" = the pipeline's own scheduler (no stochastic steps).
        outside_solver: How "dynamics" takes its deterministic steps; see `scheduler.outside_solver`.
        path: The steps that are taken, all others being skipped over; None = all. Stochastic steps cannot be skipped.
        shared: Where rows have their first deterministic steps in common; see `SharedPrefix`.
        shared_keys: Per row, what its initial noise and condition are a function of; needed with `shared`.
        decode: Whether to decode the final latents.
        should_stop: Called before every step; it may raise to abandon the rollout.

    Raises:
        InputError: For more rows than the model takes, noise levels or indices that do not fit the grid, log-probs
            without a stochastic step, a stochastic step without generators, or guidance without negative conditions.
    """
    check_rows(self.spec, len(initial_generators))
    condition = self.prepare_condition_state(condition.to(self.device))
    state = self.prepare_latents(condition, initial_generators, height, width, generation)
    make_grid = self.solver_grid if solver == "pipeline" else self.sigma_grid
    grid = make_grid(num_inference_steps, state, condition, generation)
    state = self.initial_state(state, grid, condition)
    levels = _levels(noise_levels, grid, parse_dynamics(dynamics), solver)
    if compute_log_prob and not any(levels):
        raise InputError("log-probabilities need at least one stochastic step; all noise levels of this rollout are 0.")
    steps = _path(path, levels, solver)
    walk = _Walk(
        self,
        condition,
        grid,
        levels,
        steps,
        guidance,
        dynamics,
        keep=_kept(trajectory_indices, levels),
        stores=frozenset(stores),
        compute_log_prob=compute_log_prob,
        log_prob_normalised=log_prob_normalised,
        storage_dtype=storage_dtype,
        step_generators=step_generators,
        pipeline_solver=(
            PipelineSolver(self, num_inference_steps, state, condition, grid) if solver == "pipeline" else None
        ),
        multistep=MultistepSolver() if outside_solver == "dpm2m" else None,
        should_stop=should_stop,
    )
    branch = next((number for number, index in enumerate(steps) if levels[index] > 0), len(steps))
    if shared is not None and branch > 0:
        state, kept = shared.walk(shared_keys, branch, lambda rows: walk.part(rows, state, branch))
        walk.states.update(kept)
        state = walk.run(state, branch, len(steps))
    else:
        state = walk.run(state, 0, len(steps))
    media = self.decode_latents(self.finalize_state(state, condition, grid)) if decode else None
    trajectory = Trajectory(grid, levels, walk.states, walk.log_probs, walk.means, walk.velocities)
    return RolloutOutput(trajectory, media, grid)


@dataclass
class _Walk:
    """One rollout's way along the grid; arguments as in `inference`."""

    adapter: BaseAdapter[Any]
    condition: Any
    grid: Grid
    levels: tuple[float, ...]
    steps: tuple[int, ...]
    guidance: GuidanceSpec
    dynamics: Dynamics | str
    keep: frozenset[int]
    stores: frozenset[str]
    compute_log_prob: bool
    log_prob_normalised: bool
    storage_dtype: torch.dtype
    step_generators: Callable[[int], Sequence[torch.Generator]] | None
    pipeline_solver: PipelineSolver | None
    multistep: MultistepSolver | None
    should_stop: Callable[[], None] | None
    states: dict[int, LatentState] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, LatentState] = field(default_factory=dict)
    velocities: dict[int, LatentState] = field(default_factory=dict)

    def run(self, state: LatentState, start: int, stop: int) -> LatentState:
        """Takes the steps number `start` to `stop` - 1 of the path; returns the state after them."""
        if start == 0 and 0 in self.keep:
            self.states[0], state = _stored(state, self.storage_dtype)
        for number in range(start, stop):
            if self.should_stop is not None:
                self.should_stop()
            index = self.steps[number]
            end = self.steps[number + 1] if number + 1 < len(self.steps) else self.grid.length
            times = self.grid.times(index, state.batch_size, self.adapter.device, end)
            velocity = self.adapter.predict(state, times, self.condition, self.guidance)
            state = self._step(state, velocity, times, index, end)
            if end in self.keep:
                self.states[end], state = _stored(state, self.storage_dtype)
        return state

    def part(self, rows: Sequence[int], state: LatentState, stop: int) -> tuple[LatentState, dict[int, LatentState]]:
        """Takes the first steps for some rows alone; returns their state and the states kept on the way."""
        some = replace(
            self,
            condition=self.adapter.collate_conditions([self.condition.row(row) for row in rows]),
            multistep=None if self.multistep is None else MultistepSolver(),
            states={},
        )
        reached = some.run(LatentState.stack([state.row(row) for row in rows]), 0, stop)
        return reached, some.states

    def _step(
        self, state: LatentState, velocity: LatentState, times: ComponentTimes, index: int, end: int
    ) -> LatentState:
        eta = self.levels[index]
        if self.pipeline_solver is not None:
            return self.pipeline_solver.step(index, state, velocity, times)
        if self.multistep is not None and eta == 0:
            return self.multistep.step(state, velocity, times)
        output = _transition(
            state,
            velocity,
            times,
            eta,
            index,
            self.step_generators,
            self.dynamics,
            self.storage_dtype if end in self.keep else torch.float32,
            self.compute_log_prob,
            self.log_prob_normalised,
        )
        if output.log_prob is not None:
            self.log_probs[index] = output.log_prob
        if eta > 0:
            if "mean" in self.stores:
                self.means[index] = output.mean
            if "velocity" in self.stores:
                self.velocities[index] = output.velocity
            if self.multistep is not None:
                self.multistep.restart()
        return output.next_state


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
    levels = tuple(float(eta) for eta in given or ())
    if not levels or (solver == "pipeline" and not any(levels)):  # whose grid may be longer than the dynamics'
        levels = (0.0,) * grid.length
    if len(levels) != grid.length:
        raise InputError(f"{len(levels)} noise levels were given for a grid of {grid.length} steps.")
    if any(eta < 0 for eta in levels):
        raise InputError(f"noise levels must be at least 0; got {levels}.")
    if any(levels) and (solver == "pipeline" or not dynamics.stochastic):
        what = "solver 'pipeline'" if solver == "pipeline" else "ODE dynamics"
        raise InputError(f"{what} has no stochastic steps; give noise levels of 0, or another scheduler.dynamics_type.")
    return levels


def _path(path: Sequence[int] | None, levels: Sequence[float], solver: str) -> tuple[int, ...]:
    """The steps that are taken, in order."""
    every = tuple(range(len(levels)))
    if path is None or tuple(path) == every:
        return every
    steps = tuple(path)
    if steps[:1] != (0,) or list(steps) != sorted(set(steps)) or steps[-1] >= len(levels):
        raise InputError(f"path {steps} must begin at step 0 and ascend on a grid of {len(levels)} steps.")
    ends = dict(zip(steps, (*steps[1:], len(levels)), strict=True))
    if solver == "pipeline" or any(eta > 0 and ends.get(i) != i + 1 for i, eta in enumerate(levels)):
        raise InputError("stochastic steps, and the pipeline's own solver, need every point of the grid.")
    return steps


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
