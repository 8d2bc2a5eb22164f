"""One step: a velocity and one transition. The same code samples in a rollout and replays in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams import ModelSpec
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.samples import ComponentTimes, LatentState
from flow_factory.samples.reductions import active_count, combine_row_means
from flow_factory.scheduler.dynamics import TransitionMoments, log_prob, sample_next, transition_moments
from flow_factory.scheduler.names import Dynamics

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter


@dataclass(frozen=True)
class StepOutput:
    """Velocity and transition of one step, in float32; reductions to one number per row in float64.

    Attributes:
        velocity: v = noise - data, guided, with the graph of the network.
        next_state: The state after the step: given, or sampled (then without a graph).
        mean: Mean of the transition.
        std: Component name to the effective std q of each row, [B]; 0 where the step is deterministic.
        diffusion: Component name to the diffusion coefficient a, [B].
        log_prob: Mean log-density of `next_state` over active elements, float64 [B]; None unless asked for.
    """

    velocity: LatentState
    next_state: LatentState
    mean: LatentState
    std: Mapping[str, Tensor]
    diffusion: Mapping[str, Tensor]
    log_prob: Tensor | None


def check_rows(spec: ModelSpec, count: int) -> None:
    """Raises an InputError if a forward of `count` rows is more than the model takes."""
    if spec.max_batch is not None and count > spec.max_batch:
        raise InputError(
            f"a forward of {count} rows was asked for, but model {spec.key!r} takes at most {spec.max_batch}; generate "
            f"and train with batches of {spec.max_batch}."
        )


def predict(
    self: BaseAdapter[Any], state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
) -> LatentState:
    """The guided velocity v = noise - data at `state`, float32, [B, ...] per component, with the state's masks.

    Autocast is entered here, for this forward alone, and without its weight cache: a cache that outlives one forward
    (inside an outer autocast) would keep serving weights from before an optimizer step or a change of variant.

    Raises:
        InputError: If there are more rows than the model takes (`ModelSpec.max_batch`).
    """
    check_rows(self.spec, state.batch_size)
    network_state = self.network_state(state, condition)
    with self.autocast():
        velocity = self.predict_velocity(network_state, times, condition, guidance)
    return LatentState({name: v.float() for name, v in velocity.items()}, state.masks)


def transition(
    state: LatentState,
    velocity: LatentState,
    times: ComponentTimes,
    *,
    dynamics: Dynamics | str,
    noise_level: float | Tensor,
    next_state: LatentState | None = None,
    noise: LatentState | None = None,
    compute_log_prob: bool = False,
    log_prob_normalised: bool = True,
    storage_dtype: torch.dtype = torch.float32,
) -> StepOutput:
    """One transition of the sampler, given the velocity; arguments as in `forward`."""
    moments = {
        name: transition_moments(
            dynamics, x, velocity[name], times[name].sigma, times[name].sigma_next, noise_level, times.index
        )
        for name, x in state.items()
    }
    if next_state is None:
        known_ode = isinstance(noise_level, float) and noise_level == 0.0
        next_state = _fresh(state, moments, noise, storage_dtype, known_ode)
    return StepOutput(
        velocity=velocity,
        next_state=next_state,
        mean=LatentState({name: m.mean for name, m in moments.items()}, state.masks),
        std={name: m.std for name, m in moments.items()},
        diffusion={name: m.diffusion for name, m in moments.items()},
        log_prob=_log_prob(next_state, moments, log_prob_normalised) if compute_log_prob else None,
    )


def forward(
    self: BaseAdapter[Any],
    state: LatentState,
    times: ComponentTimes,
    condition: Any,
    guidance: GuidanceSpec,
    *,
    dynamics: Dynamics | str,
    noise_level: float | Tensor,
    next_state: LatentState | None = None,
    noise: LatentState | None = None,
    compute_log_prob: bool = False,
    log_prob_normalised: bool = True,
    storage_dtype: torch.dtype = torch.float32,
) -> StepOutput:
    """Velocity plus one scheduler transition.

    Args:
        state: The state before the step, batch B.
        times: Its times; `times.index` decides which rows are the first of the grid.
        condition: Encoded inputs, batch B.
        guidance: How predictions are combined.
        dynamics: Transition kernel.
        noise_level: eta, a number or [B]; 0 is the ODE step.
        next_state: Replay: the state that was reached. None: sample one.
        noise: Standard normal, like the state; needed to sample a stochastic step, ignored otherwise.
        compute_log_prob: Whether to evaluate the log-probability of the next state.
        log_prob_normalised: See `scheduler.dynamics.log_prob`.
        storage_dtype: A sampled next state is rounded to this dtype before its log-probability is computed, so that a
            replay of the stored state gives the same number.

    Raises:
        ValueError: If a stochastic step is to be sampled without `noise`.
        InputError: If a log-probability of a deterministic step is asked for, or guidance lacks negative conditions.
    """
    state = state.to(dtype=torch.float32)
    velocity = self.predict(state, times, condition, guidance)
    return transition(
        state,
        velocity,
        times,
        dynamics=dynamics,
        noise_level=noise_level,
        next_state=next_state,
        noise=noise,
        compute_log_prob=compute_log_prob,
        log_prob_normalised=log_prob_normalised,
        storage_dtype=storage_dtype,
    )


def _fresh(
    state: LatentState,
    moments: Mapping[str, TransitionMoments],
    noise: LatentState | None,
    storage_dtype: torch.dtype,
    known_ode: bool,
) -> LatentState:
    """The sampled next state; `known_ode` saves a look at the device where every row is deterministic."""
    fresh: dict[str, Tensor] = {}
    for name, m in moments.items():
        mean = m.mean.detach()
        if noise is None:
            if not known_ode and bool((m.std > 0).any()):
                raise ValueError("a stochastic step needs `noise`, or the `next_state` to replay.")
            drawn = mean
        else:
            drawn = sample_next(TransitionMoments(mean, m.std.detach(), m.diffusion.detach()), noise[name])
        if storage_dtype != torch.float32:
            drawn = drawn.to(storage_dtype).to(torch.float32)
        mask = state.masks.get(name)
        # Pinned elements keep their values whatever the kernel says.
        fresh[name] = drawn if mask is None else torch.where(mask, drawn, state[name])
    return LatentState(fresh, state.masks)


def _log_prob(next_state: LatentState, moments: Mapping[str, TransitionMoments], normalised: bool) -> Tensor:
    """Mean over the active elements of all components; components count by their active elements."""
    means, counts = [], []
    for name, m in moments.items():
        mask = next_state.masks.get(name)
        means.append(log_prob(next_state[name], m, mask, normalised))
        counts.append(active_count(next_state[name], mask))
    return combine_row_means(means, counts)
