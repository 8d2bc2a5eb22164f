"""The first on-policy ratio, through the path a trainer takes: rows, samples, shuffling, stacking, replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.samples import BaseSample, NoiseKey, Purpose, Trajectory


def on_policy_samples(
    adapter: BaseAdapter[Any],
    conditions: Sequence[Any],
    guidance: GuidanceSpec,
    *,
    size: tuple[int, int],
    levels: Sequence[float],
    steps: int,
    members: int = 2,
    **keywords: Any,
) -> list[BaseSample]:
    """Samples of some prompts with several members each, as in a cycle.

    Args:
        adapter: The model.
        conditions: One encoded row per prompt.
        guidance: Of the rollout.
        size: Height and width in pixels.
        levels: eta of each step of the grid.
        steps: num_inference_steps.
        members: Samples per prompt.
        keywords: Passed on to `inference`.
    """
    rows = [prompt for prompt in range(len(conditions)) for _ in range(members)]
    keys = [NoiseKey(seed=1, cycle=0, group_id=prompt, member=i % members) for i, prompt in enumerate(rows)]
    out = adapter.inference(
        adapter.collate_conditions([conditions[prompt] for prompt in rows]),
        initial_generators=[key.generator(Purpose.INITIAL) for key in keys],
        step_generators=lambda step: [key.generator(Purpose.SDE, step) for key in keys],
        num_inference_steps=steps,
        guidance=guidance,
        height=size[0],
        width=size[1],
        noise_levels=levels,
        compute_log_prob=True,
        trajectory_indices="sde",
        **keywords,
    )
    assert out.media is not None
    return [
        adapter.make_sample(
            media=out.media[row],
            prompt=str(prompt),
            source="toy",
            source_id=0,
            index=prompt,
            group_id=prompt,
            member=row % members,
            key=keys[row],
            condition=conditions[prompt],
            trajectory=out.trajectory.row(row),
        )
        for row, prompt in enumerate(rows)
    ]


def replayed_ratios(
    adapter: BaseAdapter[Any], samples: Sequence[BaseSample], guidance: GuidanceSpec, dynamics: str, **keywords: Any
) -> Tensor:
    """Ratios of all stored transitions of one micro-batch, in float64, [steps, B]."""
    condition = adapter.collate_conditions([s.condition for s in samples])
    trajectory = Trajectory.stack([s.trajectory for s in samples])
    ratios = []
    for index in trajectory.sde_steps:
        with adapter.pin():
            out = adapter.forward(
                trajectory.states[index],
                trajectory.grid.times(index, len(samples)),
                condition,
                guidance,
                dynamics=dynamics,
                noise_level=trajectory.noise_levels[index],
                next_state=trajectory.states[index + 1],
                compute_log_prob=True,
                **keywords,
            )
            assert out.log_prob is not None and out.log_prob.requires_grad
            ratios.append((out.log_prob - trajectory.log_probs[index]).detach().double().exp())
    return torch.stack(ratios)
