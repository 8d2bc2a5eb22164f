"""Trainers defined outside the package, for the other two contracts: they run, resume and start from YAML by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError, Interrupted
from flow_factory.trainers.state import run_state
from tests.trainers.outside import RegressionTrainer, ShrinkTrainer
from tests.trainers.support import assert_same_tree, make_config, make_trainer
from tests.trainers.test_resume import metrics

OFFLINE = {"train": {"trainer_type": "tests.trainers.outside.RegressionTrainer", "max_epochs": 2, "resolution": 32,
                     "max_sequence_length": 8, "learning_rate": 1e-3, "gradient_accumulation_steps": 2,
                     "ema_decay": 0.9, "seed": 7},
           "rewards": []}  # fmt: skip
NO_FEEDBACK = {"train.trainer_type": "tests.trainers.outside.ShrinkTrainer", "rewards": []}


def test_dataset_trainer_runs_to_clean_exhaustion(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, OFFLINE)
    assert isinstance(trainer, RegressionTrainer)
    result = trainer.start()
    assert trainer.progress.data_epoch == 2
    assert trainer.progress.rollout_iteration == 0
    assert result.counts["optimizer_steps"] == 4 == trainer.step
    assert trainer.reward_buffer is None and trainer.advantage_processor is None
    assert trainer.adapter.bundle.training


def test_dataset_trainer_resumes_between_epochs_and_inside_one(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    whole = make_trainer(tiny_sd3_dir, _folder(tmp_path, "whole"), OFFLINE)
    whole.start()
    folder = _folder(tmp_path, "parts")
    first = make_trainer(tiny_sd3_dir, folder, OFFLINE)
    first.interrupt_after = 1  # type: ignore[attr-defined]  # the window of two batches is finished first
    with pytest.raises(Interrupted, match="the epoch was left before batch 2"):
        first.start()
    assert first.step < whole.step
    second = make_trainer(tiny_sd3_dir, folder, OFFLINE)
    second.start()
    assert_same_tree(run_state(second), run_state(whole))
    assert metrics(folder) == metrics(tmp_path / "whole"), "the row of the epoch tells of the part before it too"
    assert second.batches_seen + first.batches_seen == whole.batches_seen  # type: ignore[attr-defined]


def test_the_learning_rate_decays_over_all_steps_of_all_epochs(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Two epochs of two updates: not over two steps, as many as there are epochs."""
    train = {**OFFLINE["train"], "lr_scheduler": "linear"}  # type: ignore[dict-item]
    make_trainer(tiny_sd3_dir, tmp_path, {**OFFLINE, "train": train}).start()
    rates = [row["default/learning_rate"] for row in metrics(tmp_path) if row["kind"] == "update"]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_failing_batch_leaves_the_epoch(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, OFFLINE)
    trainer.fail_at = 3  # type: ignore[attr-defined]  # after the first optimizer step
    before = trainer.progress
    with pytest.raises(ZeroDivisionError):
        trainer.start()
    assert trainer.progress == before


def test_no_feedback_trainer_runs_and_resumes(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    whole = make_trainer(tiny_sd3_dir, _folder(tmp_path, "whole"), {**NO_FEEDBACK, "train.max_epochs": 2})
    assert isinstance(whole, ShrinkTrainer)
    assert whole.reward_buffer is None and whole.advantage_processor is None
    result = whole.start()
    assert whole.progress.rollout_iteration == 2 and len(result.losses) == 2
    folder = _folder(tmp_path, "parts")
    make_trainer(tiny_sd3_dir, folder, {**NO_FEEDBACK, "train.max_epochs": 1}).start()
    second = make_trainer(tiny_sd3_dir, folder, {**NO_FEEDBACK, "train.max_epochs": 2})
    second.start()
    assert_same_tree(run_state(second), run_state(whole))


def test_training_rewards_on_a_no_feedback_trainer_are_an_error(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rewards"):
        make_config(tiny_sd3_dir, tmp_path, {"train.trainer_type": "tests.trainers.outside.ShrinkTrainer"})


def test_contract_is_not_settable_from_yaml(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="execution_contract"):
        make_config(tiny_sd3_dir, tmp_path, {"train.execution_contract": "offline"})


def test_python_api_returns_histories(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    from flow_factory import build_trainer, load_config
    from flow_factory.hparams import save_config

    save_config(make_config(tiny_sd3_dir, tmp_path), tmp_path / "config.yaml")
    result = build_trainer(load_config(tmp_path / "config.yaml", ["train.max_epochs=1"])).start()
    assert len(result.losses) == 1 and set(result.rewards[0]) >= {"red"}
    assert result.checkpoint is not None and result.checkpoint.is_dir()
    assert result.counts.items() >= {"cycles": 1, "optimizer_steps": 1, "samples": 8}.items()
    assert {"rollout", "feedback", "optimize", "total"} <= set(result.timings)


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_lora_of_the_checkpoint_loads_in_plain_diffusers(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 24, 27: the exported LoRA is not empty and changes a plain pipeline's picture."""
    from diffusers import StableDiffusion3Pipeline
    from safetensors.torch import load_file

    result = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1}).start()
    assert result.checkpoint is not None
    folder = result.checkpoint / "lora"
    exported = load_file(folder / "pytorch_lora_weights.safetensors")
    assert exported and all(bool(t.abs().sum() > 0) for t in exported.values())
    assert not [k for k in exported if ".default" in k or not k.startswith("transformer.")]
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(tiny_sd3_dir, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def picture() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt", "max_sequence_length": 8}
        return pipe("a red circle", generator=generator, guidance_scale=1.0, **call).images[0]

    plain = picture()
    pipe.load_lora_weights(folder)
    assert not torch.equal(plain, picture())
