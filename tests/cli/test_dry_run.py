"""`check --dry-run`: passes on a sound run, and fails on each of the faults it is there to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.cli.dry_run import run_dry, shrink
from flow_factory.errors import RunError
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.trainers.support import make_config
from tests.trainers.test_outside_trainers import OFFLINE


def test_a_sound_run_passes(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    config = make_config(tiny_sd3_dir, tmp_path, {"train.group_size": 4, "train.max_epochs": 50})
    report = run_dry(config)
    assert report.first_ratio_deviation == 0.0
    assert report.param_change_norm > 0 and (report.rollout_change or 0) > 0
    assert len(report.rewards["red"]) == 2 and not report.tied_rewards
    assert "4 prompts" in report.geometry
    assert not (tmp_path / "save").exists(), "a dry run leaves nothing in the run's own folder"


def test_it_is_small(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    big = {"train.group_size": 8, "train.unique_sample_num_per_epoch": 8, "train.per_device_batch_size": 4}
    small = shrink(make_config(tiny_sd3_dir, tmp_path, big), tmp_path).training_args
    assert (small.group_size, small.unique_sample_num_per_epoch, small.per_device_batch_size) == (2, 1, 2)


def test_tied_rewards_are_said_and_the_update_is_tried_all_the_same(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    rewards = [{"name": "same", "reward_model": "tests.trainers.rewards.Constant"}]
    report = run_dry(make_config(tiny_sd3_dir, tmp_path, {"rewards": rewards}))
    assert report.tied_rewards and report.param_change_norm > 0


def test_random_forwards_are_found(tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 2: an adapter whose replay is not its rollout."""
    original = SD3_5Adapter.predict_velocity

    def noisy(self: Any, *args: Any) -> Any:
        return original(self, *args).map(lambda v: v + 1e-3 * torch.randn_like(v))

    monkeypatch.setattr(SD3_5Adapter, "predict_velocity", noisy)
    with pytest.raises(RunError, match="the first on-policy ratio deviates from 1"):
        run_dry(make_config(tiny_sd3_dir, tmp_path))


def test_updates_too_small_to_matter_are_found(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 3: weights that move without moving the pictures."""
    with pytest.raises(RunError, match="give the same latents"):
        run_dry(make_config(tiny_sd3_dir, tmp_path, {"train.learning_rate": 1e-30}))


def test_broken_rewards_are_found(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    rewards = [{"name": "bad", "reward_model": "tests.trainers.rewards.NotANumber"}]
    with pytest.raises(RunError, match="bad") as caught:
        run_dry(make_config(tiny_sd3_dir, tmp_path, {"rewards": rewards}))
    assert "saved as" not in str(caught.value), "the dry run's folder is gone when the message is read"


def test_rewards_of_the_evaluation_are_tried_too(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    bad = [{"name": "bad", "reward_model": "tests.trainers.rewards.NotANumber"}]
    with pytest.raises(RunError, match="bad"):
        run_dry(make_config(tiny_sd3_dir, tmp_path, {"eval_rewards": bad}))


def test_shares_of_several_datasets_shrink_with_the_run(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Prompts per cycle given by dataset, or large weights, are the full run's."""
    folder = tmp_path / "data"
    datasets = [
        {"name": "a", "dataset_dir": str(folder), "train": {"unique_sample_num_per_epoch": 40}},
        {"name": "b", "dataset_dir": str(folder), "train": {"unique_sample_num_per_epoch": 60}},
    ]
    changes = {"data.datasets": datasets, "train.unique_sample_num_per_epoch": 100}
    assert shrink(make_config(tiny_sd3_dir, tmp_path, changes), tmp_path).training_args.unique_sample_num_per_epoch == 2


def test_a_trainer_on_stored_examples_makes_one_update(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    report = run_dry(make_config(tiny_sd3_dir, tmp_path, OFFLINE))
    assert report.rollout_change is None and report.param_change_norm > 0
