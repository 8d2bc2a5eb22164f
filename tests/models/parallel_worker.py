"""Two ranks of `test_parallel`; prints one JSON line per rank."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from flow_factory.distributed import Comm
from flow_factory.models import parallel
from flow_factory.models.bundle import ModelBundle
from flow_factory.models.parallel import Parallel


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    comm = Comm.current()
    assert comm.world_size == 2
    parallel.BUCKET_ELEMENTS = 4  # several buckets, one of them smaller than its parameter
    strategy = Parallel.create("replicated")

    torch.manual_seed(rank)
    layers = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("both", "one", "none")})
    bundle = ModelBundle({"net": layers})
    root = strategy.prepare(bundle)
    parameters = list(root.parameters())
    different = [p.tolist() for p in parameters]
    strategy.broadcast_parameters(parameters, comm)
    equal = [p.tolist() for p in parameters]

    # Rank r sees input r + 1; the layer "one" is only used on rank 1, "none" nowhere.
    x = torch.full((1, 3), float(rank + 1))
    loss = layers["both"](x).sum() + (layers["one"](x).sum() if rank == 1 else 0.0)
    loss.backward()
    local = [None if p.grad is None else p.grad.tolist() for p in parameters]
    strategy.reduce_gradients(parameters, comm)
    reduced = [None if p.grad is None else p.grad.tolist() for p in parameters]
    json.dump({"different": different, "equal": equal, "local": local, "reduced": reduced}, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
