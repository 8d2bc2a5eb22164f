"""Which times a decoupled objective trains: the choice as a value, and the steps of a grid that it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TimeStrategy = Literal["uniform", "logit_normal", "discrete", "discrete_with_init", "discrete_wo_init"]


@dataclass(frozen=True)
class TimeSampling:
    """How the training times of one sample are drawn (`scheduler/training_times.py` draws them).

    Attributes:
        strategy: "uniform" and "logit_normal" draw sigma freely; the discrete ones draw steps of the rollout's grid:
            any ("discrete"), step 0 always and any others ("discrete_with_init"), any but step 0 ("discrete_wo_init").
        count: Times per sample; 0 = as many as the range has steps.
        timestep_range: (lo, hi), fractions of the axis from noise to data.
        time_shift: k of the shift on sigma, for the free strategies.
        logit_mean: Mean before the sigmoid ("logit_normal").
        logit_std: Standard deviation before the sigmoid.
    """

    strategy: TimeStrategy
    count: int
    timestep_range: tuple[float, float]
    time_shift: float = 1.0
    logit_mean: float = 0.0
    logit_std: float = 1.0

    @property
    def discrete(self) -> bool:
        """True if times are steps of the grid."""
        return self.strategy.startswith("discrete")

    def steps(self, num_steps: int) -> tuple[int, ...]:
        """Grid indices int(N lo) .. int(N hi) - 1 of an N-step grid, with or without step 0 as the strategy says."""
        low, high = (math.floor(num_steps * bound + 1e-9) for bound in self.timestep_range)
        if self.strategy == "discrete_with_init":
            return (0, *range(max(low, 1), high))
        return tuple(range(max(low, 1) if self.strategy == "discrete_wo_init" else low, high))

    def num_times(self, num_steps: int) -> int:
        """Times per sample on an N-step grid; 0 where the range holds no step and none were asked for."""
        if self.count and not (self.discrete and not self.steps(num_steps)):
            return self.count
        return len(self.steps(num_steps))
