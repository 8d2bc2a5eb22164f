"""Runs the group-coupled trainers under torchrun and writes each rank's gradients; see test_group_ranks.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainers.decoupled_cases import FULL, SPREAD, run_of
from tests.trainers.two_processes import gradients

# Where a group's members lie: on both ranks for dgpo and crd; on one for dpo, which forms its pairs there.
SAMPLERS = {"dgpo": "group_distributed", "crd": "distributed_k_repeat", "dpo": "group_contiguous"}
# Two updates, so that the second is away from the old policies: a term of theirs is no longer zero.
TIMES = {"dgpo": 2, "crd": 2, "dpo": 2}


def changes_of(kind: str) -> dict[str, Any]:
    """Four prompts of four samples in batches of two rows."""
    return {
        **run_of(kind), **FULL[kind], **SPREAD, "train.unique_sample_num_per_epoch": 4,
        "train.num_train_timesteps": TIMES[kind], "train.gradient_step_per_epoch": 2,
        "data.sampler_type": SAMPLERS[kind],
    }  # fmt: skip


def main() -> None:
    from safetensors.torch import save_file

    pipeline, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    for kind in SAMPLERS:
        out = gradients(pipeline, folder / kind, {**changes_of(kind), "num_processes": 2})
        assert dist.get_world_size() == 2, "this test must run on two processes"
        save_file(out["gradients"], folder / f"{kind}-gradients-{rank}.safetensors")
        save_file(out["weights"], folder / f"{kind}-weights-{rank}.safetensors")
        (folder / f"{kind}-{rank}.json").write_text(json.dumps({"rewards": out["rewards"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
