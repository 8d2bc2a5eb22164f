"""Two gloo processes: one synchronised policy, equal to one process with the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flow_factory.hparams import save_config
from tests.trainers.support import make_config
from tests.trainers.two_processes import gradients

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for name in ("synchronised", "unsynchronised"):
        (folder / name / "data").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.trainers.two_processes", str(tiny_sd3_dir), str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_parameters_are_equal_on_both_ranks(two: Path) -> None:
    """Pitfall 20, 56."""
    assert json.loads((two / "synchronised-1.json").read_text())["world_size"] == 2
    a, b = (load_file(two / f"synchronised-weights-{rank}.safetensors") for rank in (0, 1))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_an_unsynchronised_policy_is_noticed(two: Path) -> None:
    a, b = (load_file(two / f"unsynchronised-weights-{rank}.safetensors") for rank in (0, 1))
    assert any(not torch.equal(a[n], b[n]) for n in a)


def test_equals_one_process_with_the_same_global_batch(two: Path, tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 20: gradients to 1e-6; rewards and evaluation means alike (pitfall 19: no prompt counted twice)."""
    one = gradients(tiny_sd3_dir, tmp_path, {"eval.eval_freq": 1, "eval.per_device_batch_size": 2})
    both = load_file(two / "synchronised-gradients-0.safetensors")
    assert one["gradients"].keys() == both.keys()
    for name, gradient in one["gradients"].items():
        assert (gradient - both[name]).abs().max().item() <= 1e-6, name
    record = json.loads((two / "synchronised-0.json").read_text())
    assert record["rewards"][0]["red"] == pytest.approx(one["rewards"][0]["red"], abs=1e-6)
    for mine, theirs in zip(one["eval"], record["eval"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5)


def _launch(folder: Path, config: Any, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    path = folder / "config.yaml"
    save_config(config, path)
    return subprocess.run(
        [sys.executable, "-m", "flow_factory.cli.app", "train", str(path)],
        env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def test_train_starts_the_workers_itself(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 42: num_processes: 2 runs two, without a launcher's help."""
    done = _launch(tmp_path, make_config(tiny_sd3_dir, tmp_path, {"num_processes": 2, "train.max_epochs": 1}))
    assert done.returncode == 0, done.stdout + done.stderr
    environment = json.loads((tmp_path / "save/run/environment.json").read_text())
    assert environment["world_size"] == 2


def test_an_exception_on_one_rank_ends_all(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 44: the failing rank's own message, exit code 1, and nobody left waiting."""
    changes = {
        "num_processes": 2,
        "rewards": [{"name": "bad", "reward_model": "tests.trainers.rewards.FailsOnRankOne"}],
    }
    done = _launch(tmp_path, make_config(tiny_sd3_dir, tmp_path, changes))
    assert done.returncode == 1
    assert "rank one is unwell" in done.stdout + done.stderr


def test_world_size_that_differs_from_the_config_is_an_error(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(make_config(tiny_sd3_dir, tmp_path, {"num_processes": 1}), path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "flow_factory.cli.app", "train", str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "but the launcher started 2" in " ".join((done.stdout + done.stderr).split())
