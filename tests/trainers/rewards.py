"""Reward models of the trainer tests."""

from __future__ import annotations

from collections.abc import Sequence

from flow_factory.rewards.abc import PointwiseRewardModel
from flow_factory.samples import BaseSample


class Constant(PointwiseRewardModel):
    """The same score for every picture."""

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        return [1.0 for _ in samples]


class NotANumber(PointwiseRewardModel):
    """A broken score."""

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        return [float("nan") for _ in samples]


class FailsOnRankOne(PointwiseRewardModel):
    """Scores on rank 0 and raises on rank 1."""

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        import os

        if os.environ.get("RANK") == "1":
            raise ArithmeticError("rank one is unwell")
        return [float(s.member) for s in samples]
