"""The first on-policy ratio, through the path a trainer takes: rows, samples, shuffling, stacking, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import BaseSample, NoiseKey, Purpose, Trajectory
from tests.models.support import PROMPTS, make_adapter, stir

LEVELS = (0.7, 0.0, 0.7, 0.0)
ROWS = 4


def sample(adapter: SD3_5Adapter, dynamics: str, scale: float, **keywords: Any) -> list[BaseSample]:
    """Two prompts with two members each, as in a cycle."""
    encoded = adapter.encode_prompt(PROMPTS[:2], None, need_negative=scale > 1)
    prompts = [encoded.row(0), encoded.row(1)]
    keys = [NoiseKey(seed=1, cycle=0, group_id=row // 2, member=row % 2) for row in range(ROWS)]
    out = adapter.inference(
        adapter.collate_conditions([prompts[row // 2] for row in range(ROWS)]),
        initial_generators=[key.generator(Purpose.INITIAL) for key in keys],
        step_generators=lambda step: [key.generator(Purpose.SDE, step) for key in keys],
        num_inference_steps=4,
        guidance=adapter.guidance(scale),
        height=32,
        width=24,
        noise_levels=LEVELS,
        dynamics=dynamics,
        compute_log_prob=True,
        trajectory_indices="sde",
        **keywords,
    )
    assert out.media is not None
    return [
        adapter.make_sample(
            media=out.media[row],
            prompt=PROMPTS[row // 2],
            source="toy",
            source_id=0,
            index=row // 2,
            group_id=row // 2,
            member=row % 2,
            key=keys[row],
            condition=prompts[row // 2],
            trajectory=out.trajectory.row(row),
        )
        for row in range(ROWS)
    ]


def replay(adapter: SD3_5Adapter, samples: list[BaseSample], dynamics: str, scale: float, **keywords: Any) -> Tensor:
    """Ratios of all stored transitions of one micro-batch, in float64, [steps, B]."""
    condition = adapter.collate_conditions([s.condition for s in samples])  # type: ignore[misc]
    trajectory = Trajectory.stack([s.trajectory for s in samples])
    ratios = []
    for index in trajectory.sde_steps:
        with adapter.pin():
            out = adapter.forward(
                trajectory.states[index],
                trajectory.grid.times(index, len(samples)),
                condition,
                adapter.guidance(scale),
                dynamics=dynamics,
                noise_level=trajectory.noise_levels[index],
                next_state=trajectory.states[index + 1],
                compute_log_prob=True,
                **keywords,
            )
            assert out.log_prob is not None and out.log_prob.requires_grad
            ratios.append((out.log_prob - trajectory.log_probs[index]).detach().double().exp())
    return torch.stack(ratios)


@pytest.mark.parametrize("dynamics", ["Flow-SDE", "Dance-SDE", "CPS", "DDIM-eta"])
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_first_ratio_is_exactly_one(stirred: SD3_5Adapter, dynamics: str, scale: float) -> None:
    """Pitfall 2: first on-policy ratio is not 1."""
    with stirred.rollout():
        samples = sample(stirred, dynamics, scale)
    stirred.train()
    shuffled = [samples[i] for i in (2, 0, 3, 1)]
    ratios = replay(stirred, shuffled, dynamics, scale)
    assert ratios.shape == (2, ROWS)
    assert torch.equal(ratios, torch.ones_like(ratios))


@pytest.mark.parametrize("dynamics", ["Flow-SDE", "CPS"])
def test_ratio_is_one_for_states_stored_in_half_precision(stirred: SD3_5Adapter, dynamics: str) -> None:
    """Pitfall 2: next state stored in a lower precision than the log-prob saw."""
    samples = sample(stirred, dynamics, 4.5, storage_dtype=torch.bfloat16)
    assert samples[0].trajectory.states[0].only.dtype == torch.bfloat16
    ratios = replay(stirred, samples[::-1], dynamics, 4.5)
    assert torch.equal(ratios, torch.ones_like(ratios))


def test_ratio_is_one_with_gradient_checkpointing_and_unnormalised_log_probs(tiny_sd3_dir: Path) -> None:
    """Pitfall 2, under recomputation; the unnormalised form of CPS."""
    adapter = make_adapter(tiny_sd3_dir, {"train.enable_gradient_checkpointing": True})
    stir(adapter)
    samples = sample(adapter, "CPS", 4.5, log_prob_normalised=False)
    ratios = replay(adapter, samples, "CPS", 4.5, log_prob_normalised=False)
    assert torch.equal(ratios, torch.ones_like(ratios))


def test_another_batch_composition_stays_close(stirred: SD3_5Adapter) -> None:
    samples = sample(stirred, "Flow-SDE", 1.0)
    ratios = replay(stirred, samples[:1], "Flow-SDE", 1.0)
    assert (ratios - 1).abs().max() <= 1e-6


def test_the_ratio_notices_a_changed_weight(stirred: SD3_5Adapter) -> None:
    samples = sample(stirred, "Flow-SDE", 1.0)
    stir(stirred, scale=1e-2, seed=9)
    ratios = replay(stirred, samples, "Flow-SDE", 1.0)
    assert (ratios - 1).abs().max() > 1e-6
