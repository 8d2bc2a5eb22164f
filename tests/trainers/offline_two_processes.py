"""Runs under torchrun with two processes: one epoch on stored examples; see test_offline_two_processes.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from flow_factory.trainers.abc import BaseTrainer
from tests.trainers.offline_support import offline_trainer
from tests.trainers.support import weights

# Four rows per optimizer step, once as two batches in a row and once as one batch on each of two ranks.
ONE: dict[str, Any] = {"train.max_epochs": 1, "train.max_grad_norm": None, "train.gradient_accumulation_steps": 2}
TWO: dict[str, Any] = {**ONE, "num_processes": 2, "train.gradient_accumulation_steps": 1}
# Of mixed sizes a global batch has one size, so the rows of a batch are halved instead.
MIXED_ONE: dict[str, Any] = {
    "train.max_epochs": 1, "train.max_grad_norm": None, "train.gradient_accumulation_steps": 1,
    "train.per_device_batch_size": 4, "train.image_sizing": "buckets", "train.num_train_timesteps": 2,
}  # fmt: skip
MIXED_TWO: dict[str, Any] = {**MIXED_ONE, "num_processes": 2, "train.per_device_batch_size": 2}
CASES = {
    "sft": ("sft", "demonstration", ONE, TWO),
    "offline-dpo": ("offline-dpo", "preference", {**ONE, "train.beta": 20.0}, {**TWO, "train.beta": 20.0}),
    "mixed": ("sft", "demonstration", MIXED_ONE, MIXED_TWO),
}


def observe(trainer: BaseTrainer) -> dict[str, torch.Tensor]:
    """Runs it; the gradients of every step, the weights after the last and the losses."""
    found: dict[str, torch.Tensor] = {}
    optimizer = trainer.roles.primary.optimizers["adamw"]
    step = optimizer.step

    def keep(*args: Any) -> Any:
        for name, parameter in trainer.adapter.trainable_parameters().items():
            if parameter.grad is not None:
                found[f"gradient {trainer.step} {name}"] = parameter.grad.clone()
        return step(*args)

    optimizer.step = keep  # type: ignore[method-assign]
    losses = trainer.start().losses
    found |= {f"weight {name}": value for name, value in weights(trainer).items()}
    return {**found, "losses": torch.tensor(losses, dtype=torch.float64)}


def main() -> None:
    pipeline, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for name, (key, _, _, two) in CASES.items():
        trainer = offline_trainer(pipeline, folder / f"{name}-two", folder / f"{name}-data", key, two)
        assert trainer.comm.world_size == 2, "this test must run on two processes"
        save_file(observe(trainer), folder / f"{name}-{os.environ['RANK']}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
