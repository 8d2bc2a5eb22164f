"""A short finished run for the commands that start from one; made once per session and copied, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flow_factory.models.abc import BaseAdapter
from tests.trainers.support import make_trainer

RANK, ALPHA = 6, 8  # alpha / rank is no power of two, so folding it rounds
CHANGES: dict[str, Any] = {
    "model.lora_rank": RANK,
    "model.lora_alpha": ALPHA,
    "model.lora_adapter_name": "style",
    "train.learning_rate": 3e-2,
    "train.max_epochs": 2,
    "eval.eval_freq": 1,
    "eval.num_inference_steps": 3,
    "log.save_freq": 1,
}


def train_run(pipeline: Path, folder: Path, changes: dict[str, Any] | None = None) -> tuple[Path, BaseAdapter[Any]]:
    """Two cycles with checkpoints 1 and 2, an average and evaluations.

    Returns:
        The run folder, and the adapter as training left it.
    """
    trainer = make_trainer(pipeline, folder, {**CHANGES, **(changes or {})})
    trainer.start()
    return folder / "save" / "run", trainer.adapter
