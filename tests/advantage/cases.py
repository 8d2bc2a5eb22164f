"""Samples with rewards, made the same way in the test process and in the worker processes."""

from __future__ import annotations

import random
from typing import Any

import torch

from flow_factory.samples import BaseSample, Condition, Grid, NoiseKey, Trajectory

WEIGHTS: dict[str, Any] = {"match": 1.0, "bright": {"shapes": 0.5, "numbers": 0.25}, "ocr": 2.0}
# How the cycle is divided between two processes, the estimator, and whether a score on rank 1 is made NaN.
CASES = [
    ("halves", "sum", False),
    ("strided", "gdpo", False),
    ("strided", "sum", True),
    ("uneven", "sum", False),
    ("all-on-one", "gdpo", False),
    ("uneven", "per_prompt", False),
]


def make_sample(group_id: int, member: int, source: str = "shapes", **fields: Any) -> BaseSample:
    """A sample without media or trajectory."""
    grid = Grid.single(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    return BaseSample(
        prompt=f"prompt {group_id}",
        source=source,
        source_id={"shapes": 0, "numbers": 1}[source],
        index=0,
        group_id=group_id,
        member=member,
        key=NoiseKey(0, 0, group_id, member),
        condition=Condition(),
        trajectory=Trajectory(grid, (0.0,)),
        **fields,
    )


def make_cycle(groups: int = 6, size: int = 4) -> list[BaseSample]:
    """Groups of two sources with 64-bit ids next to each other, awkward rewards, a constant group and a failure."""
    rng = random.Random(11)
    samples = []
    for g in range(groups):
        source = "shapes" if g % 2 == 0 else "numbers"
        for member in range(size):
            sample = make_sample(2**62 + g // 2, member, source)
            sample.rewards = {"match": 0.1 if g == 2 else rng.random(), "bright": 0.3 if g == 2 else rng.random() * 100}
            if source == "numbers":
                sample.rewards["ocr"] = None if (g, member) == (3, 1) else rng.random()
            samples.append(sample)
    return samples
