"""The tiny examples of every online algorithm run as shipped, shortened to a cycle of a few pictures, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from flow_factory import build_trainer, load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    path
    for family in ("grpo", "grpo_guard", "dppo", "nft", "awm", "dpo", "dgpo", "crd")
    for path in sorted((ROOT / "examples" / family / "lora/sd3_5").glob("tiny*.yaml"))
]
SHORT = [
    "train.group_size=2",
    "train.unique_sample_num_per_epoch=2",
    "train.per_device_batch_size=4",
    "train.gradient_step_per_epoch=1",
    "eval.eval_freq=0",
    "log.save_freq=1",
]


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(p.relative_to(ROOT / "examples")) for p in EXAMPLES])
def test_a_tiny_example_runs_and_goes_on(path: Path, tmp_path: Path) -> None:
    for cycles in (1, 2):
        config = load_config(path, [*SHORT, f"log.save_dir={tmp_path}", f"train.max_epochs={cycles}"])
        result = build_trainer(config).start()
        assert result.counts["cycles"] == 1
    assert len(result.losses) == 2 and len(result.rewards) == 2
