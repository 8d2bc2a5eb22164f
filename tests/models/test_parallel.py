"""Gradient reduction over two gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.models.parallel import Parallel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    command = [sys.executable, "-m", "tests.models.parallel_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(store)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    return [json.loads(output) for output in outputs]


def test_ranks_start_with_the_weights_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["different"] != ranks[1]["different"]
    assert ranks[0]["equal"] == ranks[1]["equal"] == ranks[0]["different"]


def test_gradients_are_means_over_ranks_and_missing_ones_count_as_zero(ranks: list[dict[str, Any]]) -> None:
    """Pitfall 56: missing gradient sync leaves ranks different without an error."""
    both, one, none = ([r["reduced"][i] for r in ranks] for i in range(3))
    assert both[0] == both[1] == [[1.5] * 3] * 2
    assert ranks[0]["local"][1] is None and ranks[1]["local"][1] == [[2.0] * 3] * 2
    assert one[0] == one[1] == [[1.0] * 3] * 2
    assert none == [None, None], "a parameter without a gradient anywhere is left to the optimizer as in one process"


def test_one_process_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    strategy = Parallel.create("replicated")
    strategy.reduce_gradients([parameter], Comm.single())
    assert parameter.grad is None
    with pytest.raises(InputError, match="'replicated'"):
        Parallel.create("fsdp9")
