"""Two gloo processes: one synchronised policy, equal to one process with the same global batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flow_factory.errors import InputError, RunError
from flow_factory.hparams import save_config
from flow_factory.launch import _raise_for_workers
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


@pytest.mark.parametrize("when", ["while the workers start", "while they train"])
def test_a_signal_ends_all_workers_with_its_code(tiny_sd3_dir: Path, tmp_path: Path, when: str) -> None:
    """Pitfall 43: 128 + signal, no worker left behind, and a state to go on from once training has begun."""
    config = make_config(tiny_sd3_dir, tmp_path, {"num_processes": 2, "train.max_epochs": None})
    save_config(config, tmp_path / "config.yaml")
    # The workers' environment carries this word, so that they can be told from all other processes.
    mark = f"FLOW_FACTORY_TEST_MARK={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "flow_factory.cli.app", "train", str(tmp_path / "config.yaml")],
        env={**ENVIRONMENT, **dict([mark.split("=", 1)])}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        rows = tmp_path / "save/run/metrics.jsonl"
        _wait_until(
            (lambda: len(_marked(mark)) > 1) if "start" in when else (lambda: rows.exists() and rows.stat().st_size > 0)
        )
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    _wait_until(lambda: not _marked(mark), seconds=10)
    if "train" in when:
        assert "Run the same command again" in " ".join(output.split())
        assert list((tmp_path / "save/run/checkpoints").glob("checkpoint-*"))


def test_workers_end_when_their_parent_is_killed(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The parent cannot pass a SIGKILL on; the launcher notices that it has gone, and the workers save and end."""
    config = make_config(tiny_sd3_dir, tmp_path, {"num_processes": 2, "train.max_epochs": None})
    save_config(config, tmp_path / "config.yaml")
    mark = f"FLOW_FACTORY_TEST_MARK={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "flow_factory.cli.app", "train", str(tmp_path / "config.yaml")],
        env={**ENVIRONMENT, **dict([mark.split("=", 1)])}, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        rows = tmp_path / "save/run/metrics.jsonl"
        _wait_until(lambda: rows.exists() and rows.stat().st_size > 0)
    finally:
        process.kill()
        process.wait()
    _wait_until(lambda: not _marked(mark), seconds=60)
    assert list((tmp_path / "save/run/checkpoints").glob("checkpoint-*"))


def _marked(mark: str) -> list[int]:
    """Processes that run with this word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


def _wait_until(condition: Callable[[], bool], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_the_error_of_a_rank_is_reported_not_its_peers(tmp_path: Path) -> None:
    """Pitfall 44: whichever worker writes its report first, the exit code is that of the cause."""
    for rank, (code, typed) in enumerate([(1, False), (2, True)]):
        report = {"code": code, "message": f"rank {rank}", "typed": typed, "rank": rank, "time": float(rank)}
        (tmp_path / f"{rank}.exit").write_text(json.dumps(report))
    with pytest.raises(InputError, match="rank 1"):
        _raise_for_workers(tmp_path, 2, 1, None)


def test_a_killed_worker_is_the_cause_not_the_broken_connection_of_its_peer(tmp_path: Path) -> None:
    """A worker that was killed reports nothing; the other one's error alone would mislead."""
    report = {"code": 1, "message": "Connection closed by peer", "typed": False, "rank": 0, "time": 0.0}
    (tmp_path / "0.exit").write_text(json.dumps(report))
    with pytest.raises(RunError, match=r"^1 of 2 workers .* killed, .* Another one reports: Connection closed"):
        _raise_for_workers(tmp_path, 2, 1, None)
