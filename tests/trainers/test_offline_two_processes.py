"""Stored examples on two gloo processes: the same global batches, noise and times, so the same gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.offline_support import make_dataset, offline_trainer
from tests.trainers.offline_two_processes import CASES, observe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline-two")
    for name, (_, kind, _, _) in CASES.items():
        sizes = ((32, 32), (32, 64)) if name == "mixed" else ((32, 32),)
        make_dataset(folder / f"{name}-data", kind, 17 if name == "mixed" else 8, sizes)
        (folder / f"{name}-two").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.trainers.offline_two_processes", str(tiny_sd3_dir), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_bit_for_bit(two: Path, name: str) -> None:
    """Pitfall 20."""
    a, b = (load_file(two / f"{name}-{rank}.safetensors") for rank in (0, 1))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(two: Path, tiny_sd3_dir: Path, name: str) -> None:
    key, _, one, _ = CASES[name]
    alone = observe(offline_trainer(tiny_sd3_dir, two / f"{name}-one", two / f"{name}-data", key, one))
    together = load_file(two / f"{name}-0.safetensors")
    assert alone.keys() == together.keys() and len(alone["losses"]) > 1
    torch.testing.assert_close(together["losses"], alone["losses"], rtol=0, atol=1e-5)
    first = [entry for entry in alone if entry.startswith("gradient 0 ")]
    assert first and any(bool(alone[entry].any()) for entry in first)
    for entry in first:
        assert (alone[entry] - together[entry]).abs().max().item() <= 1e-6, entry
