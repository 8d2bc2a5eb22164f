"""One of several processes of test_advantage_ranks.py: computes the advantages of its share of a cycle."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from flow_factory.advantage import AdvantageProcessor
from flow_factory.distributed import Comm
from flow_factory.errors import FlowFactoryError
from tests.advantage.cases import CASES, WEIGHTS, make_cycle


def rows_of(split: str, n: int, rank: int, world_size: int) -> list[int]:
    """Which rows of the cycle a rank holds."""
    return {
        "halves": list(range(rank * n // world_size, (rank + 1) * n // world_size)),
        "strided": list(range(n))[rank::world_size],
        "uneven": list(range(5)) if rank == 0 else list(range(5, n)),
        "all-on-one": list(range(n)) if rank == 1 else [],
    }[split]


def main(rank: int, world_size: int, folder: Path) -> None:
    """Writes result-<rank>.json: per case the rows of this rank, their advantages and the metrics, or the error."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    comm = Comm.current()
    results = []
    for split, aggregation, fault in CASES:
        samples = make_cycle()
        rows = rows_of(split, len(samples), rank, world_size)
        mine = [samples[i] for i in rows]
        if fault and rank == 1:
            mine[2].rewards["match"] = float("nan")
        processor = AdvantageProcessor(aggregation, global_std=True, gather=comm, group_size=4)
        result: dict = {"world_size": comm.world_size, "rows": rows}
        try:
            result["advantages"] = processor.compute(mine, None, WEIGHTS).tolist()
            result["metrics"] = processor.pop_advantage_metrics()
        except FlowFactoryError as error:
            result["error"] = str(error)
        results.append(result)
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
