"""What a run returns: histories, counts, timings and where its files are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TrainingResult:
    """The outcome of `BaseTrainer.start()`.

    The histories cover the whole run, also the cycles before a resume; `timings` and `counts` cover this process.

    Attributes:
        run_dir: The run folder.
        checkpoint: The newest checkpoint of the run, or None if none was written.
        rewards: One mapping per cycle: reward name to the mean over its samples; "total" is the weighted sum.
        losses: Mean loss of every optimizer step of the first role.
        evaluations: One mapping per evaluation: "cycle" and "<dataset>/<reward>" to the mean.
        counts: "cycles", "optimizer_steps", "samples" of this process group; "network_rows" are the rows that went
            through the trained components in its cycles (evaluations apart), "trained_rows" those with gradients;
            "rollout_rows_saved" are velocities that sharing a group's first steps has saved.
        timings: Seconds spent in "rollout", "feedback", "optimize", "evaluate", "checkpoint", "total".
    """

    run_dir: Path
    checkpoint: Path | None = None
    rewards: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    def history(self) -> dict[str, Any]:
        """The part that a checkpoint carries, so that histories survive a resume."""
        return {"rewards": self.rewards, "losses": self.losses, "evaluations": self.evaluations}

    def load_history(self, state: dict[str, Any]) -> None:
        """The inverse of `history`."""
        self.rewards = list(state["rewards"])
        self.losses = list(state["losses"])
        self.evaluations = list(state["evaluations"])

    def to_mapping(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return {**asdict(self), "run_dir": str(self.run_dir), "checkpoint": self.checkpoint and str(self.checkpoint)}
