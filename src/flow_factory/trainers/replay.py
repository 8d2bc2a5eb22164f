"""From samples to optimisation terms: micro-batches, and the stored transitions of coupled objectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_factory.errors import RunError
from flow_factory.models.abc import BaseAdapter
from flow_factory.samples import (
    BaseSample,
    ComponentTimes,
    LatentState,
    Purpose,
    SampleBatch,
    Trajectory,
    make_generator,
)


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
    """

    index: int
    times: ComponentTimes
    noise_level: float
    state: LatentState
    next_state: LatentState
    old_log_prob: Tensor
    old_mean: LatentState | None


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
        )
