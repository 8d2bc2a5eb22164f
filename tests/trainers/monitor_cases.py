"""One made-up cycle for test_monitoring.py, and one of two processes that measures its share of it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flow_factory.distributed import Comm
from flow_factory.rewards.smoke import make_sample
from flow_factory.samples import BaseSample, T2ISample
from flow_factory.samples.measures import measure_samples
from flow_factory.trainers.monitoring import measure_dataset, measure_groups

WEIGHTS = {"match": 2.0, "calm": -0.5}
SPLITS = ("halves", "strided", "all-on-one")


def make_cycle() -> list[BaseSample]:
    """Five groups of four noisy pictures of two datasets, their ids beyond 2^53, two of their scores failed."""
    generator = torch.Generator().manual_seed(11)
    samples: list[BaseSample] = []
    for group in range(5):
        base = torch.rand(3, 1, 1, generator=generator)
        for member in range(4):
            noise = 0.2 * torch.randn(3, 24, 20, generator=generator)
            sample = make_sample(
                T2ISample, ((base + noise).clamp(0, 1) * 255).byte(), "p", f"set{group % 2}", member, {}
            )
            sample.source_id, sample.group_id = group % 2, 2**63 + 5 - group
            scores = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
            sample.rewards = dict(zip(WEIGHTS, scores, strict=True))
            samples.append(sample)
    samples[6].rewards["calm"] = None
    samples[13].rewards["match"] = None
    return samples


def rows_of(split: str, count: int, rank: int) -> list[int]:
    """Which samples a rank of two holds."""
    return {
        "halves": list(range(rank * count // 2, (rank + 1) * count // 2)),
        "strided": list(range(count))[rank::2],
        "all-on-one": list(range(count)) if rank == 1 else [],
    }[split]


def measure(samples: list[BaseSample], comm: Comm) -> dict[str, Any]:
    """Everything the module measures, JSON-ready."""
    return {
        "groups": asdict(measure_groups(samples, comm, lambda _: WEIGHTS)),
        "dataset": measure_dataset("toy", measure_samples(samples), comm),
    }


def main(rank: int, folder: Path) -> None:
    """Writes measured-<rank>.json: the results for each split."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comm = Comm.current()
    results = {}
    for split in SPLITS:
        samples = make_cycle()
        results[split] = measure([samples[i] for i in rows_of(split, len(samples), rank)], comm)
    (folder / f"measured-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
