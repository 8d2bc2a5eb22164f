"""Reward models of the trainer tests."""

from __future__ import annotations

from collections.abc import Sequence

from flow_factory.hparams import RewardArguments
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


class Closing(PointwiseRewardModel):
    """Counts how often it is built and closed."""

    built = 0
    closed = 0

    def __init__(self, config: RewardArguments) -> None:
        super().__init__(config)
        type(self).built += 1

    @classmethod
    def reset(cls) -> None:
        cls.built = cls.closed = 0

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        return [float(s.member) for s in samples]

    def close(self) -> None:
        type(self).closed += 1


class Hangs(PointwiseRewardModel):
    """Waits for an answer that never comes, and tells the test that it waits."""

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        import signal
        import threading
        import time

        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        time.sleep(3600)
        return [0.0 for _ in samples]


class NeverScores(PointwiseRewardModel):
    """A judge that is always down."""

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        return [None for _ in samples]


class WantsVideo(PointwiseRewardModel):
    """A reward for another kind of output."""

    required_fields = ("video",)

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        return [0.0 for _ in samples]


class SometimesScores(PointwiseRewardModel):
    """A judge that is down for the second member of every group."""

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        return [None if s.member == 1 else float(s.member) for s in samples]
