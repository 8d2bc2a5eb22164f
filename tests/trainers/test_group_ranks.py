"""Groups over ranks: dgpo, crd and dpo on two processes equal one process with the same samples."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flow_factory.distributed import Comm
from flow_factory.samples import BaseSample, Condition, NoiseKey, Trajectory
from flow_factory.trainers.groups import over_groups
from tests.trainers.group_ranks import SAMPLERS, changes_of
from tests.trainers.test_noising import GRID
from tests.trainers.two_processes import gradients

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    for kind in SAMPLERS:
        (folder / kind / "data").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.trainers.group_ranks", str(tiny_sd3_dir), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("kind", SAMPLERS)
def test_two_processes_equal_one(two: Path, tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    """The gradient of the second update, to 1e-5 of its largest element, and the weights of the ranks bit for bit."""
    here, there = (load_file(two / f"{kind}-weights-{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(here[name], there[name]) for name in here)
    one = gradients(tiny_sd3_dir, tmp_path, {**changes_of(kind), "data.sampler_type": "auto"})["gradients"]
    both = load_file(two / f"{kind}-gradients-0.safetensors")
    assert one.keys() == both.keys()
    scale = max(float(g.abs().max()) for g in one.values())
    assert scale > 0
    worst = max(float((one[name] - both[name]).abs().max()) for name in one)
    assert worst <= 1e-5 * scale, worst / scale


def sample(group: int, member: int, source: int = 1) -> BaseSample:
    key = NoiseKey(0, 0, group, member)
    return BaseSample("p", "toy", source, 0, group, member, key, Condition(), Trajectory(GRID, ()))


def test_over_groups_does_not_depend_on_the_order_to_the_last_bit() -> None:
    """Ids beyond 2^63 and the same id in two datasets are groups of their own (pitfalls 12, 13)."""
    identities = [(g, m, s) for g, s in ((2**63 + 5, 1), (2**63 + 5, 2), (7, 1)) for m in range(5)]
    column = {identity: torch.rand(2, dtype=torch.float64) * 10.0 ** (i % 7) for i, identity in enumerate(identities)}

    def function(rows: torch.Tensor) -> torch.Tensor:
        assert rows.shape == (5, 2)
        return torch.cat([rows.sum(dim=0, keepdim=True).expand(5, 2), rows[:, :1]], dim=1)

    def run(order: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], torch.Tensor]:
        samples = [sample(g, m, s) for g, m, s in order]
        found = over_groups(samples, torch.stack([column[i] for i in order]), function, Comm.single())
        return dict(zip(order, found, strict=True))

    expected = run(identities)
    for identity in identities:
        assert expected[identity][2] == column[identity][0], "each member gets its own row back"
    assert expected[(2**63 + 5, 0, 1)][0] != expected[(2**63 + 5, 0, 2)][0]
    for seed in range(5):
        shuffled = random.Random(seed).sample(identities, len(identities))
        assert all(torch.equal(value, expected[identity]) for identity, value in run(shuffled).items())
