"""Runs under torchrun with two processes and writes what each rank saw; see test_two_processes.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.support import make_trainer, weights


def gradients(pipeline: Path, folder: Path, changes: dict[str, Any], unsynchronised: bool = False) -> dict[str, Any]:
    """One cycle; returns the last reduced gradient and the weights after the step."""
    trainer = make_trainer(pipeline, folder, {"train.max_epochs": 1, "train.max_grad_norm": None, **changes})
    if unsynchronised:
        trainer.roles.primary.parallel = Unsynchronised()
    kept: dict[str, torch.Tensor] = {}
    optimizer = trainer.roles.primary.optimizers["adamw"]
    step = optimizer.step

    def keep(*args: Any) -> Any:
        kept.update(
            {n: p.grad.clone() for n, p in trainer.adapter.trainable_parameters().items() if p.grad is not None}
        )
        return step(*args)

    optimizer.step = keep  # type: ignore[method-assign]
    result = trainer.start()
    return {"gradients": kept, "weights": weights(trainer), "rewards": result.rewards, "eval": result.evaluations}


class Unsynchronised:
    """What a forgotten gradient reduction looks like."""

    def reduce_gradients(self, parameters: Any, comm: Any) -> None:
        """Does nothing."""


def main() -> None:
    from safetensors.torch import save_file

    pipeline, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    # One picture in the grid: rank 1 has none to show.
    changes = {"num_processes": 2, "eval.eval_freq": 1, "eval.per_device_batch_size": 2, "eval.num_grid_images": 1}
    for name in ("synchronised", "unsynchronised"):
        out = gradients(pipeline, folder / name, changes, name == "unsynchronised")
        assert dist.get_world_size() == 2, "this test must run on two processes"
        save_file(out["weights"], folder / f"{name}-weights-{rank}.safetensors")
        save_file(out["gradients"], folder / f"{name}-gradients-{rank}.safetensors")
        record = {"rewards": out["rewards"], "eval": out["eval"], "world_size": dist.get_world_size()}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
