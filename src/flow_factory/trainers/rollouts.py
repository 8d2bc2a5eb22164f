"""The rollout of a cycle: prompts in, samples with trajectories out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from flow_factory.data_utils.loaders import PromptBatch
from flow_factory.hparams import SchedulerArguments
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.prefix import SharedPrefix
from flow_factory.rewards.buffer import RewardBuffer
from flow_factory.samples import BaseSample, Grid, NoiseKey, Purpose
from flow_factory.scheduler.windows import Candidates, resolve_candidates, select_window

STORAGE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RolloutPlan:
    """Everything about a cycle's rollout that is the same for all its prompts.

    Attributes:
        grid: The sigma grid.
        candidates: Steps that may be stochastic.
        window: Steps that are stochastic in this cycle; empty for ODE rollouts.
        noise_levels: eta per step, 0 outside the window.
        guidance: Guidance of rollout and replay.
        generation: The model-specific fields of `train:` or `eval:`.
        num_inference_steps, height, width: As configured.
        dynamics: Transition kernel.
        log_prob_normalised: Form of the log-probability.
        storage_dtype: Type in which latents are kept.
        path: The steps that are taken; None = all (see `scheduler.after_window_fraction`).
        outside_solver: Solver of the deterministic steps.
        share_initial_noise: All members of a group start from the same noise.
    """

    grid: Grid
    candidates: tuple[int, ...]
    window: tuple[int, ...]
    noise_levels: tuple[float, ...]
    guidance: GuidanceSpec
    generation: Any
    num_inference_steps: int
    height: int
    width: int
    dynamics: str
    log_prob_normalised: bool
    storage_dtype: torch.dtype
    path: tuple[int, ...] | None = None
    outside_solver: Literal["euler", "dpm2m"] = "euler"
    share_initial_noise: bool = False

    @property
    def num_steps(self) -> int:
        """Steps that are taken: the velocities that a row costs."""
        return self.grid.length if self.path is None else len(self.path)


@dataclass(frozen=True)
class SDESteps:
    """The steps that may be stochastic, resolved once per run.

    Attributes:
        grid: The grid they index.
        candidates: Their indices.
        exceeding: Those among an explicit `sde_steps` list whose noise exceeds the level they step to.
    """

    grid: Grid
    candidates: tuple[int, ...]
    exceeding: tuple[int, ...]


def resolve_sde_steps(arguments: SchedulerArguments, grid: Grid) -> SDESteps:
    """Resolves `scheduler.sde_steps` on the run's grid."""
    found = resolve_candidates(arguments.dynamics_type, grid.primary, arguments.noise_level, arguments.sde_steps)
    return SDESteps(grid, found.indices, found.exceeding)


def cycle_window(arguments: SchedulerArguments, steps: SDESteps, seed: int, cycle: int) -> tuple[int, ...]:
    """The stochastic steps of a cycle: the same for every rank and every member of every group; seed: `sde_seed`."""
    if arguments.dynamics_type == "ODE":
        return ()
    return select_window(
        Candidates(steps.candidates, steps.exceeding),
        arguments.num_sde_steps,
        arguments.sde_window,
        seed=seed,
        cycle=cycle,
        window_range=arguments.sde_window_range,
        interval=arguments.sliding_interval,
        stride=arguments.sliding_stride,
    )


def rollout_keys(batch: PromptBatch, seed: int, cycle: int) -> list[NoiseKey]:
    """Noise identities of a training batch: one per (cycle, group, member), whatever rank or batch it is in."""
    return [
        NoiseKey(seed, cycle, record.group_id, member)
        for record, member in zip(batch.records, batch.members, strict=True)
    ]


def step_generators(keys: Sequence[NoiseKey]) -> Callable[[int], list[torch.Generator]]:
    """Per-row generators of the SDE noise, by step."""
    return lambda step: [key.generator(Purpose.SDE, step) for key in keys]


def rollout_batch(
    adapter: BaseAdapter,
    batch: PromptBatch,
    plan: RolloutPlan,
    keys: Sequence[NoiseKey],
    *,
    compute_log_prob: bool,
    trajectory_indices: Sequence[int],
    stores: frozenset[str] = frozenset(),
    solver: Literal["dynamics", "pipeline"] = "dynamics",
    policy_version: int = 0,
    store_device: torch.device | None = None,
    shared: SharedPrefix | None = None,
    should_stop: Callable[[], None] | None = None,
) -> list[BaseSample]:
    """Generates one sample per row of a prompt batch.

    Args:
        adapter: The model; its active variant samples.
        batch: Prompts, with their collated condition.
        plan: The cycle's plan.
        keys: Identity of each row's randomness.
        compute_log_prob: Whether stochastic steps compute their log-probability.
        trajectory_indices: Grid indices of the states to keep.
        stores: What else the objective needs of stochastic steps ("mean", "velocity").
        solver: "dynamics", or "pipeline" for evaluation.
        policy_version: Optimizer steps the sampling weights have seen.
        store_device: Where trajectories are kept; None leaves them on the model's device.
        shared: The steps that groups have in common, where `plan.share_initial_noise`.
        should_stop: Called before every step; it may raise to drop the cycle.
    """
    starts = [replace(key, member=0) for key in keys] if plan.share_initial_noise else keys
    output = adapter.inference(
        batch.condition,
        initial_generators=[key.generator(Purpose.INITIAL) for key in starts],
        step_generators=step_generators(keys),
        num_inference_steps=plan.num_inference_steps,
        guidance=plan.guidance,
        noise_levels=plan.noise_levels,
        height=plan.height,
        width=plan.width,
        generation=plan.generation,
        dynamics=plan.dynamics,
        log_prob_normalised=plan.log_prob_normalised,
        compute_log_prob=compute_log_prob,
        trajectory_indices=trajectory_indices,
        stores=stores,
        storage_dtype=plan.storage_dtype,
        solver=solver,
        outside_solver=plan.outside_solver,
        path=plan.path,
        shared=shared,
        shared_keys=[(record.source_id, key) for record, key in zip(batch.records, starts, strict=True)],
        should_stop=should_stop,
    )
    trajectory = output.trajectory if store_device is None else output.trajectory.to(store_device)
    assert output.media is not None
    samples: list[BaseSample] = []
    for row, (record, member, key) in enumerate(zip(batch.records, batch.members, keys, strict=True)):
        samples.append(
            adapter.make_sample(
                media=output.media[row],
                inputs=None if batch.inputs is None else batch.inputs[row],
                generation=plan.generation,
                prompt=record.prompt,
                negative_prompt=record.negative_prompt,
                source=record.source,
                source_id=record.source_id,
                index=record.index,
                group_id=record.group_id,
                member=member,
                key=key,
                metadata=record.metadata,
                condition=batch.condition.row(row),
                trajectory=trajectory.row(row),
                policy_version=policy_version,
            )
        )
    return samples


def collect_samples(
    batches: Iterable[PromptBatch],
    generate: Callable[[PromptBatch], list[BaseSample]],
    reward_buffer: RewardBuffer | None,
    before_batch: Callable[[], None],
    after_batch: Callable[[int], None],
) -> list[BaseSample]:
    """Walks the cycle's batches and hands the samples to the reward buffer as they come.

    Args:
        batches: The cycle's prompt batches on this rank.
        generate: Turns one batch into samples.
        reward_buffer: Receives the samples of each batch, or None.
        before_batch: Called before each batch; may raise to drop the cycle.
        after_batch: Called with the number of new samples.
    """
    samples: list[BaseSample] = []
    for batch in batches:
        before_batch()
        new = generate(batch)
        if reward_buffer is not None:
            reward_buffer.add(new)
        samples.extend(new)
        after_batch(len(new))
    return samples
