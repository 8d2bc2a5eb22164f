"""From samples to optimisation terms: micro-batches, and the stored transitions of coupled objectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_factory.errors import RunError
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.step import StepOutput
from flow_factory.objectives.policy_step import PolicyStep
from flow_factory.samples import (
    BaseSample,
    ComponentTimes,
    LatentState,
    Purpose,
    SampleBatch,
    Trajectory,
    make_generator,
)
from flow_factory.scheduler.dynamics import transition_coefficients
from flow_factory.scheduler.names import parse_dynamics


@dataclass(frozen=True)
class Transition:
    """One stored stochastic step of a micro-batch.

    Attributes:
        index: Grid index of the step.
        times: Its times, batch B.
        noise_level: eta of the step.
        state: The state before the step, batch B.
        next_state: The state after it, as sampled.
        old_log_prob: Log-probability under the policy that sampled, [B].
        old_mean: Transition mean under that policy, if the rollout kept it.
        old_velocity: Velocity under that policy, likewise.
    """

    index: int
    times: ComponentTimes
    noise_level: float
    state: LatentState
    next_state: LatentState
    old_log_prob: Tensor
    old_mean: LatentState | None = None
    old_velocity: LatentState | None = None


def microbatches(
    samples: Sequence[BaseSample],
    adapter: BaseAdapter,
    batch_size: int,
    *,
    device: torch.device,
    shuffle_seed: int | None,
    cycle: int,
    repeat: int = 0,
) -> Iterator[SampleBatch]:
    """Stacks samples into micro-batches on `device`, one at a time.

    Every micro-batch has `batch_size` rows, as in the rollout: matrix products of another row count may round
    differently, and the first on-policy ratio would no longer be exactly 1. A short last batch keeps its own size.

    Args:
        samples: This rank's samples.
        adapter: Collates the conditions.
        batch_size: Rows per micro-batch.
        device: Where to put them.
        shuffle_seed: Run seed for the row order, or None to keep the rollout's order.
        cycle: Rollout iteration, part of the shuffle's identity.
        repeat: Number of the pass over the samples (inner epoch), part of the shuffle's identity.
    """
    order = list(range(len(samples)))
    if shuffle_seed is not None:
        generator = make_generator(shuffle_seed, Purpose.SHUFFLE, cycle=cycle, step=repeat)
        order = torch.randperm(len(samples), generator=generator).tolist()
    for start in range(0, len(order), batch_size):
        rows = [samples[i] for i in order[start : start + batch_size]]
        yield SampleBatch(
            samples=rows,
            condition=adapter.collate_conditions([s.condition for s in rows]).to(device),
            trajectory=Trajectory.stack([s.trajectory for s in rows]).to(device),
            advantages=torch.tensor([_advantage(s) for s in rows], dtype=torch.float32, device=device),
        )


def _advantage(sample: BaseSample) -> float:
    """The sample's advantage; 0 where nothing judges (no-feedback trainers), an error where it was forgotten."""
    if sample.advantage is None and sample.rewards:
        raise RunError(
            f"sample {sample.index}/{sample.member} of {sample.source!r} has rewards but no advantage: call "
            f"compute_advantages() before microbatches()."
        )
    return sample.advantage or 0.0


def transitions(batch: SampleBatch, device: torch.device) -> Iterator[Transition]:
    """The stored stochastic steps of a micro-batch, from noise to data."""
    trajectory = batch.trajectory
    for index in trajectory.sde_steps:
        yield Transition(
            index=index,
            times=trajectory.grid.times(index, len(batch), device),
            noise_level=trajectory.noise_levels[index],
            state=trajectory.states[index],
            next_state=trajectory.states[index + 1],
            old_log_prob=trajectory.log_probs[index],
            old_mean=trajectory.means.get(index),
            old_velocity=trajectory.velocities.get(index),
        )


def policy_step(
    transition: Transition, output: StepOutput, dynamics: str, sequence_log_ratio: Tensor | None = None
) -> PolicyStep:
    """A stored transition under the current policy, as policy losses see it.

    Args:
        transition: What the rollout stored.
        output: The same step replayed, with its log-probability.
        dynamics: The transition kernel.
        sequence_log_ratio: [B], for losses that need it.
    """
    assert output.log_prob is not None
    kernel = parse_dynamics(dynamics)
    times = next(iter(transition.times.components.values()))
    eta = torch.full_like(times.sigma, transition.noise_level)
    coefficients = transition_coefficients(kernel, times.sigma, times.sigma_next, eta, transition.times.index)
    declared: dict[str, Tensor] = {} if sequence_log_ratio is None else {"sequence_log_ratio": sequence_log_ratio}
    if transition.old_mean is not None:
        declared["old_mean"] = _flat(transition.old_mean)
    if transition.old_velocity is not None:
        declared["old_velocity"] = _flat(transition.old_velocity)
    return PolicyStep(
        dynamics=kernel.value,
        log_prob=output.log_prob,
        old_log_prob=transition.old_log_prob,
        mean=_flat(output.mean),
        velocity=_flat(output.velocity),
        next_state=_flat(transition.next_state).to(output.mean[next(iter(output.mean))].dtype),
        std=next(iter(output.std.values())),
        spread=_spread(output),
        sigma=times.sigma,
        h=times.sigma - times.sigma_next,
        velocity_scale=coefficients.v_scale.abs(),
        active=_flat_mask(output.mean),
        declared=declared,
    )


def valid_rows(batch: SampleBatch, device: torch.device) -> Tensor:
    """bool [B], False for samples whose scoring failed: nothing is known about them."""
    return torch.tensor([None not in sample.rewards.values() for sample in batch], device=device)


def _flat(state: LatentState) -> Tensor:
    """All components of each row one after another, [B, D]."""
    parts = [x.reshape(x.shape[0], -1) for _, x in state.items()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _flat_mask(state: LatentState) -> Tensor | None:
    if not state.masks:
        return None
    everything = {name: torch.ones_like(x, dtype=torch.bool) for name, x in state.items()}
    return _flat(
        LatentState({n: state.masks[n].expand_as(x) if n in state.masks else x for n, x in everything.items()})
    )


def _spread(output: StepOutput) -> Tensor:
    """q of each element: [B, 1] for one component, [B, D] for several, which may step differently."""
    if len(output.std) == 1:
        return next(iter(output.std.values())).unsqueeze(1)
    return _flat(
        LatentState({n: output.std[n].view(-1, *([1] * (x.dim() - 1))).expand_as(x) for n, x in output.mean.items()})
    )
