"""Two processes give what one process gives, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flow_factory.advantage import AdvantageProcessor
from tests.advantage.cases import CASES, WEIGHTS, make_cycle

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    """Results of two gloo processes, [rank][case]; each process has its own string hash salt."""
    folder = tmp_path_factory.mktemp("ranks")
    procs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.advantage.rank_worker", str(rank), "2", str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(rank + 1)},
        )
        for rank in range(2)
    ]
    try:
        codes = [proc.wait(timeout=120) for proc in procs]
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
    assert codes == [0, 0]
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert all(case["world_size"] == 2 for rank in results for case in rank)
    return results


@pytest.mark.parametrize("number", [i for i, (_, _, fault) in enumerate(CASES) if not fault])
def test_two_processes_equal_one_exactly(ranks, number):
    """Pitfalls 12 and 14: ids beyond 2^53 survive the gather, and no rank's hash salt matters."""
    single = AdvantageProcessor(CASES[number][1], global_std=True, group_size=4)
    expected = single.compute(make_cycle(), None, WEIGHTS).tolist()
    metrics = single.pop_advantage_metrics()
    got: dict[int, float] = {}
    for rank in ranks:
        got.update(zip(rank[number]["rows"], rank[number]["advantages"], strict=True))
        assert rank[number]["metrics"] == metrics
    assert [got[i] for i in range(len(expected))] == expected
    assert sum(a != 0 for a in expected) > len(expected) / 2


def test_an_error_on_one_rank_reaches_all(ranks):
    """Pitfall 44: the other rank fails too, instead of waiting in the gather; both go on to the next case."""
    number = next(i for i, (_, _, fault) in enumerate(CASES) if fault)
    first, second = (rank[number]["error"] for rank in ranks)
    assert second.startswith("reward 'match' is nan for prompt")
    assert first.startswith("rank 1 failed: RunError: reward 'match' is nan")
