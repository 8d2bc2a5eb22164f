"""One of two ranks that fill condition caches together; prints one JSON line. RANK comes from the environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flow_factory.distributed import Comm
from flow_factory.errors import FlowFactoryError
from tests.data_utils.helpers import FakeAdapter
from tests.data_utils.test_condition_cache import make_cache, record, same


def fill(folder: Path, comm: Comm, broken: bool) -> dict[str, Any]:
    """Fills a cache with both ranks; on a rank that is broken, the encoder raises."""
    adapter = FakeAdapter()
    cache = make_cache(folder, adapter, batch_size=4, shard_rows=4)
    if broken:
        cache._encode = lambda records: (_ for _ in ()).throw(ValueError("encoder broke"))
    records = [record(f"prompt {i}") for i in range(21)]
    try:
        cache.prepare(records, comm)
    except (FlowFactoryError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    rows_right = all(same(cache.row(r), FakeAdapter().encode_prompt([r.prompt], None, True)) for r in records)
    return {"encoded": adapter.encoded, "rows_right": rows_right}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    comm = Comm.current()
    answer = {
        "world": comm.world_size,
        "broken": fill(folder / "broken", comm, broken=rank == 1),
        "whole": fill(folder / "whole", comm, broken=False),
    }
    print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
