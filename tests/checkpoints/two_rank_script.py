"""Two ranks over gloo saving, failing and loading together; prints what each saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flow_factory.checkpoints.checkpointer import Checkpointer
from flow_factory.distributed import Comm
from flow_factory.errors import FlowFactoryError


def outcome(call) -> str:
    try:
        return str(call())
    except (FlowFactoryError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    keeper = Checkpointer(Path(folder) / "checkpoints", Comm.current(), total_limit=1)

    def broken(target: Path) -> None:
        raise OSError("disk full")

    own = {"model": {"rank": rank, "w": torch.full((2,), float(rank))}}
    seen = {
        "none": outcome(keeper.latest),
        "saved": outcome(lambda: keeper.save(1, own, {"rank": rank})),
        "failed": outcome(lambda: keeper.save(2, own, {}, broken)),
        "latest": outcome(keeper.latest),
    }
    parts, meta = keeper.load(keeper.folder / "checkpoint-000001")
    seen["loaded"] = f"{parts['model']['rank']} {parts['model']['w'].tolist()} {meta}"
    if rank == 0:
        (keeper.folder / "checkpoint-000001" / "meta.json").write_text("{}")
    dist.barrier()
    seen["damaged"] = outcome(lambda: keeper.load(keeper.folder / "checkpoint-000001"))
    seen["damaged latest"] = outcome(keeper.latest)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
