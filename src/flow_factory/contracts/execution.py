"""Execution contracts: where a trainer's examples come from and what judges them.

A contract is a class attribute of both the arguments class and the trainer class. It selects the acquisition driver
that runs the one training loop, and it decides which machinery (rewards, advantages) is built at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Acquisition(str, Enum):
    """Where the examples of a cycle come from."""

    GENERATION = "generation"
    DATASET = "dataset"


class Feedback(str, Enum):
    """What judges the examples of a cycle."""

    RUNTIME_REWARD = "runtime_reward"
    NONE = "none"


@dataclass(frozen=True)
class ExecutionContract:
    """One cell of the acquisition x feedback table.

    Attributes:
        acquisition: Whether a cycle generates its examples or reads them from a finite dataset.
        feedback: Whether reward models score the examples before optimisation.

    Raises:
        ValueError: If a dataset contract asks for runtime rewards; stored examples carry their own supervision.
    """

    acquisition: Acquisition
    feedback: Feedback

    def __post_init__(self) -> None:
        if self.acquisition is Acquisition.DATASET and self.feedback is Feedback.RUNTIME_REWARD:
            raise ValueError(
                "ExecutionContract(acquisition='dataset', feedback='runtime_reward') has no driver: stored examples "
                "carry their own supervision. Use feedback='none', or acquisition='generation'."
            )

    @property
    def generates(self) -> bool:
        """True if a cycle samples from the model."""
        return self.acquisition is Acquisition.GENERATION

    @property
    def needs_rewards(self) -> bool:
        """True if reward models and advantages take part in a cycle."""
        return self.feedback is Feedback.RUNTIME_REWARD


ONLINE_EXECUTION_CONTRACT = ExecutionContract(Acquisition.GENERATION, Feedback.RUNTIME_REWARD)
ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT = ExecutionContract(Acquisition.GENERATION, Feedback.NONE)
OFFLINE_EXECUTION_CONTRACT = ExecutionContract(Acquisition.DATASET, Feedback.NONE)
