"""Checkpoints of several ranks: one writes, all learn what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "two_rank_script.py"


def test_rank_0_writes_and_failures_reach_every_rank(tmp_path):
    """Pitfall 44: an error of one rank does not leave the others waiting."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=90) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    main, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    saved = str(tmp_path / "checkpoints" / "checkpoint-000001")
    assert main["none"] == other["none"] == "None"
    assert main["saved"] == other["saved"] == main["latest"] == other["latest"] == saved
    assert main["failed"] == "OSError: disk full"
    assert other["failed"] == "PeerFailedError: rank 0 failed: OSError: disk full"
    assert main["loaded"] == other["loaded"] == "0 [0.0, 0.0] {'rank': 0}"
    for case in ("damaged", "damaged latest"):
        assert main[case].startswith("InputError") and "meta.json" in main[case]
        assert other[case].startswith("PeerFailedError: rank 0 failed: InputError") and "meta.json" in other[case]
