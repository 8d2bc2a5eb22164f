"""Two processes fill condition caches together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes saw."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.data_utils.cache_rank", str(folder)],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    found = [json.loads(output) for output in outputs]
    assert [answer["world"] for answer in found] == [2, 2]
    return found


def test_ranks_share_the_encoding(ranks: list[dict[str, Any]]) -> None:
    """Each prompt is encoded by one rank, in the batches one process would cut, and both read everything."""
    first, second = (answer["whole"] for answer in ranks)
    assert first["rows_right"] and second["rows_right"]
    prompts = [f"prompt {i}" for i in range(21)]
    batches = [prompts[i : i + 4] for i in range(0, 21, 4)]
    assert first["encoded"] == batches[0::2] and second["encoded"] == batches[1::2]


def test_a_failing_rank_fails_both(ranks: list[dict[str, Any]]) -> None:
    """Pitfall 44: one rank's encoder error reaches the other instead of leaving it waiting."""
    assert ranks[0]["broken"]["error"] == "PeerFailedError: rank 1 failed: ValueError: encoder broke"
    assert ranks[1]["broken"]["error"] == "ValueError: encoder broke"
