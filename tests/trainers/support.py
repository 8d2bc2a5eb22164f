"""Small runs for trainer tests: a random SD3 pipeline, a few prompts, seconds on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flow_factory.hparams import Arguments, load_config_from_mapping
from flow_factory.rewards.abc import PointwiseRewardModel
from flow_factory.samples import BaseSample
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.build import build_trainer

PROMPTS = ("a red circle", "two blue squares", "a green star", "the number 7", "a cross", "three dots", "a line", "sky")


class MeanRed(PointwiseRewardModel):
    """Mean of the red channel: differs between any two pictures, so that no group is tied."""

    required_fields = ("image",)

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        return [s.image[0].double().mean().item() / 255 for s in samples]  # type: ignore[attr-defined]


def base_mapping(pipeline: Path, folder: Path) -> dict[str, Any]:
    """A GRPO run of four prompts x two samples in two batches of four."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    (data / "test.txt").write_text("\n".join(PROMPTS[:3]) + "\n")
    return {
        "num_processes": 1,
        "mixed_precision": "no",
        "data": {
            "cache_dir": str(folder / "cache"),
            "datasets": [
                {"name": "toy", "dataset_dir": str(data), "train": {"split": "train"}, "eval": {"split": "test"}}
            ],
        },
        "model": {
            "model_type": "sd3-5",
            "model_name_or_path": str(pipeline),
            "finetune_type": "lora",
            "lora_rank": 2,
            "lora_alpha": 4,
        },
        "scheduler": {
            "dynamics_type": "Flow-SDE",
            "noise_level": 0.7,
            "num_sde_steps": 2,
            "sde_steps": [0, 1, 2],
        },
        "train": {
            "trainer_type": "grpo",
            "max_epochs": 2,
            "resolution": 32,
            "num_inference_steps": 4,
            "guidance_scale": 1.0,
            "max_sequence_length": 8,
            "group_size": 2,
            "unique_sample_num_per_epoch": 4,
            "per_device_batch_size": 4,
            "gradient_step_per_epoch": 1,
            "learning_rate": 1e-3,
            "ema_decay": 0.9,
            "ema_update_interval": 1,
            "seed": 7,
        },
        "eval": {"eval_freq": 0, "resolution": 32, "num_inference_steps": 2, "max_sequence_length": 8, "seed": 3},
        "rewards": [{"name": "red", "reward_model": f"{__name__}.MeanRed"}],
        "log": {"save_dir": str(folder / "save"), "run_name": "run", "logging_backend": "none", "save_freq": 0},
    }


def make_config(pipeline: Path, folder: Path, changes: dict[str, Any] | None = None) -> Arguments:
    """The base run with dotted changes, for example `{"train.max_epochs": 1}`."""
    mapping = copy.deepcopy(base_mapping(pipeline, folder))
    for path, value in (changes or {}).items():
        node = mapping
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return load_config_from_mapping(mapping, origin="the test")


def make_trainer(pipeline: Path, folder: Path, changes: dict[str, Any] | None = None) -> BaseTrainer:
    """A trainer of `make_config`."""
    return build_trainer(make_config(pipeline, folder, changes))


def weights(trainer: BaseTrainer) -> dict[str, torch.Tensor]:
    """Copies of the trainable parameters."""
    return {name: p.detach().clone() for name, p in trainer.adapter.trainable_parameters().items()}


def assert_same_tree(a: Any, b: Any, place: str = "") -> None:
    """Bit-for-bit equality of nested dicts, lists, tensors and numbers."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{place}: tensors differ"
    elif isinstance(a, dict):
        assert list(a) == list(b) or set(a) == set(b), f"{place}: keys {sorted(a)} and {sorted(b)}"
        for key in a:
            assert_same_tree(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{place}: lengths {len(a)} and {len(b)}"
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_tree(x, y, f"{place}[{number}]")
    else:
        assert a == b, f"{place}: {a!r} and {b!r}"
