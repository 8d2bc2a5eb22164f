"""Steps that a group has in common are evaluated once per prompt, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.samples import BaseSample
from flow_factory.trainers.abc import BaseTrainer
from tests.trainers.support import make_trainer
from tests.trainers.test_grpo_run import updates

K = 12
# Window at steps 3 and 4 of 8, twelve samples of each of two prompts.
RUN: dict[str, Any] = {
    "train.share_initial_noise": True,
    "train.num_inference_steps": 8,
    "train.group_size": K,
    "train.unique_sample_num_per_epoch": 2,
    "train.per_device_batch_size": 2 * K,
    "train.max_epochs": 1,
    "scheduler.sde_steps": [3, 4],
    "scheduler.num_sde_steps": 2,
}


def trainer_of(pipeline: Path, folder: Path, shared: bool = True, **more: Any) -> BaseTrainer:
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(pipeline, folder, {**RUN, **{k.replace("__", "."): v for k, v in more.items()}})
    if not shared:  # the same noise, but every row walks alone
        original = trainer.adapter.inference
        trainer.adapter.inference = lambda *a, **k: original(*a, **{**k, "shared": None})  # type: ignore[method-assign]
    return trainer


def latents(samples: list[BaseSample]) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    return {
        (s.group_id, s.member): {index: state.only for index, state in s.trajectory.states.items()} for s in samples
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train__guidance_scale": 3.0},
        {"scheduler__outside_solver": "dpm2m"},
        {"scheduler__outside_solver": "dpm2m", "scheduler__after_window_fraction": 0.5},
        {"train__per_device_batch_size": 8},  # groups straddle batches
        {"data__sampler_type": "global_random"},  # and their members are mixed
        {"train__latent_storage_dtype": "bf16"},
    ],
)
def test_samples_are_those_of_rows_that_walk_alone(tiny_sd3_dir: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """To 1e-6 of latents of order 1: the products of another row count may round differently, nothing else."""
    found = []
    for shared in (True, False):
        trainer = trainer_of(tiny_sd3_dir, tmp_path / str(shared), shared, **more)
        samples = trainer.generate_samples(
            compute_log_prob=True, trajectory_indices=(0, 2, *trainer.replay_indices(), -1)
        )
        found.append((latents(samples), {(s.group_id, s.member): s.trajectory.log_probs for s in samples}))
    tolerance = 1e-6 if "train__latent_storage_dtype" not in more else 2e-2  # one step of bf16
    assert found[0][0].keys() == found[1][0].keys() and len(found[0][0]) == 2 * K
    for key, states in found[0][0].items():
        assert states.keys() == {0, 2, 3, 4, 5, 8}
        for index, state in states.items():
            scale = max(1.0, float(found[1][0][key][index].abs().max()))
            difference = float((state.float() - found[1][0][key][index].float()).abs().max())
            assert difference <= tolerance * scale, (key, index)


def test_members_are_one_until_the_window_and_differ_after_it(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_sd3_dir, tmp_path)
    samples = trainer.generate_samples(trajectory_indices=(0, 3, 4, -1))
    groups: dict[int, list[dict[int, torch.Tensor]]] = {}
    for (group, _), states in latents(samples).items():
        groups.setdefault(group, []).append(states)
    assert [len(members) for members in groups.values()] == [K, K]
    for members in groups.values():
        assert all(torch.equal(m[i], members[0][i]) for m in members for i in (0, 3))
        assert len({m[4].sum().item() for m in members}) == K == len({m[8].sum().item() for m in members})
    first, second = (members[0][0] for members in groups.values())
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({}, 3 + 5 * K),  # as counted on paper, a prompt: three steps for one row, five for twelve
        ({"train__per_device_batch_size": 8}, 3 + 5 * K),
        ({"data__sampler_type": "global_random"}, 3 + 5 * K),
        ({"scheduler__outside_solver": "dpm2m", "scheduler__after_window_fraction": 0.4}, 3 + 4 * K),
        ({"scheduler__sde_steps": [0, 4]}, 8 * K),  # nothing is common before step 0
        ({"train__share_initial_noise": False}, 8 * K),
    ],
)
def test_rows_are_counted_as_on_paper(tiny_sd3_dir: Path, tmp_path: Path, more: dict[str, Any], rows: int) -> None:
    trainer = trainer_of(tiny_sd3_dir, tmp_path, **more)
    trainer.generate_samples(compute_log_prob=True, trajectory_indices=trainer.replay_indices())
    assert trainer.adapter.bundle.rows == 2 * rows
    taken = trainer.rollout_plan.num_steps
    assert trainer.result.counts.get("rollout_rows_saved", 0) == 2 * (taken * K - rows)


def test_training_is_on_policy_and_says_what_was_saved(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    result = trainer_of(tiny_sd3_dir, tmp_path).start()
    assert updates(tmp_path)[0]["default/ratio_deviation_max"] == 0.0
    saved = 2 * 3 * (K - 1)
    assert result.counts["rollout_rows_saved"] == saved == updates(tmp_path, "cycle")[0]["rollout_rows_saved"]


def test_a_run_without_sharing_counts_nothing(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    result = trainer_of(tiny_sd3_dir, tmp_path, train__share_initial_noise=False).start()
    assert "rollout_rows_saved" not in result.counts
