"""Child process of the fault-injection tests: saves checkpoints and kills itself at the n-th change of the disk."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from flow_factory.checkpoints import atomic
from flow_factory.checkpoints.checkpointer import Checkpointer


def state(step: int, way: int = 0) -> dict:
    generator = torch.Generator().manual_seed(1000 * way + step)
    return {
        "model": {"w": torch.randn(50, 50, generator=generator)},
        "optimizer": {"step": step, "m": torch.randn(50, 50, generator=generator)},
    }


def export(folder: Path) -> None:
    (folder / "lora").mkdir()
    (folder / "lora" / "weights.bin").write_bytes(b"x" * 1000)


def main(folder: str, steps: str, way: str, kill_at: str) -> None:
    calls = 0

    def kill(label: str) -> None:
        nonlocal calls
        calls += 1
        if calls == int(kill_at):
            sys.stdout.write(label)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    atomic._after_write = kill
    keeper = Checkpointer(folder, total_limit=2)
    for step in map(int, steps.split(",")):
        keeper.save(step, state(step, int(way)), {"progress": {"step": step}, "config": {"way": int(way)}}, export)


if __name__ == "__main__":
    for argument in sys.argv[4:]:  # several kill points, each in a forked child, so that torch is imported once
        child = os.fork()
        if child == 0:
            folder = Path(sys.argv[1]) / argument
            main(str(folder), sys.argv[2], sys.argv[3], argument)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        outcome = "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else str(status)
        sys.stdout.write(f"\t{argument}\t{outcome}\n")
        sys.stdout.flush()
