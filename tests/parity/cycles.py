"""Configurations of one training cycle of a case."""

from __future__ import annotations

from pathlib import Path

from flow_factory.hparams import Arguments, load_config_from_mapping
from flow_factory.hparams.training_args import training_args_keys
from tests.parity.bench import Bench, set_path
from tests.trainers.support import base_mapping

CYCLES = [key for key in ("grpo", "nft") if key in training_args_keys()]


def cycle_config(bench: Bench, trainer: str, folder: Path) -> Arguments:
    """One optimizer step on two prompts of two samples each."""
    case = bench.case
    mapping = base_mapping(bench.folder, folder)
    mapping["model"] |= {"model_type": case.key, "target_components": list(case.components)}
    setting = case.settings[-1]
    for section in ("train", "eval"):
        del mapping[section]["max_sequence_length"]  # a field of another model
        mapping[section] |= {"resolution": list(case.size), **case.generation, **setting.generation}
    mapping["train"] |= {
        "trainer_type": trainer,
        "max_epochs": 1,
        "num_inference_steps": case.steps,
        "guidance_scale": setting.scale,
        "unique_sample_num_per_epoch": 2,
        "per_device_batch_size": 2,
        "ema_decay": 0.0,
    }
    mapping["scheduler"] = {"dynamics_type": "Flow-SDE", "noise_level": 0.7, "sde_steps": [0, 1], "num_sde_steps": 1}
    if trainer != "grpo":
        mapping["scheduler"] = {"dynamics_type": "ODE"}
    for path, value in case.train.items():
        set_path(mapping, path, value)
    return load_config_from_mapping(mapping, origin=f"the {trainer} cycle of {case.name}")
