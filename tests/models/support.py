"""Adapters of the tiny pipeline for tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from flow_factory.distributed import Comm
from flow_factory.hparams import load_config_from_mapping
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.sd3_5.adapter import SD3_5Adapter

BASE: dict[str, Any] = {
    "mixed_precision": "no",
    "model": {"model_type": "sd3-5", "finetune_type": "lora", "lora_rank": 4, "lora_alpha": 8},
    "scheduler": {"dynamics_type": "Flow-SDE", "noise_level": 0.7},
    "train": {
        "trainer_type": "grpo",
        "resolution": 32,
        "max_sequence_length": 10,
        "num_inference_steps": 4,
        "group_size": 2,
        "unique_sample_num_per_epoch": 2,
        "per_device_batch_size": 2,
        "gradient_step_per_epoch": 1,
        "seed": 11,
    },
    "rewards": {"name": "dark", "reward_model": "brightness"},
}
PROMPTS = ["red dot", "blue bar", "star"]


def make_adapter(
    folder: Path, changes: dict[str, Any] | None = None, comm: Comm | None = None, prepare: bool = True
) -> SD3_5Adapter:
    """An adapter with dotted changes to the base configuration, for example `{"model.finetune_type": "full"}`."""
    mapping = copy.deepcopy(BASE)
    mapping["data"] = {"dataset_dir": str(folder)}
    mapping["model"]["model_name_or_path"] = str(folder)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node = mapping
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    adapter = SD3_5Adapter(load_config_from_mapping(mapping), comm or Comm.single())
    if prepare:
        adapter.prepare()
    return adapter


def plain_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """The pipeline as a user loads it."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(str(folder))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators(seeds: list[int]) -> list[torch.Generator]:
    """CPU generators."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def stir(adapter: BaseAdapter[Any], role: str = "default", scale: float = 0.05, seed: int = 5) -> None:
    """Moves a role's weights away from where they start (B = 0), so that the variant matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.trainable_parameters(role).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
