"""Reward hacking made visible: statistics of each cycle's samples against the band of the first cycle.

The first cycle is sampled before any update. For each statistic x its P groups give a mean m and a standard deviation
s over groups, which is mostly that of the prompts. A later cycle has other prompts, so even a policy that does not
change departs from m, by a standard error of s sqrt(1/P + 1/P); smoothing over cycles, y <- y + a (x - y), leaves
s sqrt(1/P + a / (2 - a) / P). The band is m -+ t times this. t is the quantile that a Student variable with the degrees
of freedom of s exceeds as rarely as a normal one exceeds `log.monitor_band`, since with few prompts s is uncertain too;
then the next cycles help to estimate it (about their own means), until it has `SPREAD_DEGREES` degrees of freedom.

An alarm needs both: a smoothed statistic outside its band, and a smoothed reward above the first cycle's by more than
`REWARD_RISE` of the same standard errors. Needs no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

SMOOTHING = 0.2
"""Weight a of the newest cycle in the smoothed values."""
SPREAD_DEGREES = 30
"""Degrees of freedom with which the spread over prompts is known well enough: the first cycle alone from 31 prompts."""
REWARD_RISE = 1.0
"""Standard errors by which the smoothed reward must exceed the first cycle's mean to have risen."""
RESOLUTION = 1e-3
"""Smallest half-width of a band, in the statistics' own units: below it there is nothing to be seen in a picture."""

_REWARD = "reward"
# Statistic to what samples are like when it is too low, and when it is too high.
_LOOKS: dict[str, tuple[str, str]] = {
    "brightness": ("dark", "washed out or overexposed"),
    "saturation": ("gray", "lurid"),
    "contrast": ("flat", "harsh"),
    "edge_energy": ("blurred or empty", "grainy, sharpened or full of small things"),
    "high_frequency_ratio": ("blurred or empty", "noisy, or textured by a fine pattern"),
    "motion": ("frozen, or slower than they should be", "flickering, jerky or hurried"),
    "loudness": ("silent or faint", "overdriven or full of noise"),
    "diversity": ("all alike within a group", "unlike each other where they were not, for example noise"),
    "diversity_relative": ("all alike within a group", "unlike each other where they were not, for example noise"),
}


@dataclass(frozen=True)
class MonitorBand:
    """What a policy that does not change would show of one statistic.

    Attributes:
        mean: Mean over the first cycle's groups.
        groups: Number of those.
        squares: Squared deviations of groups from the mean of their cycle, summed.
        degrees: Degrees of freedom of that sum.
    """

    mean: float
    groups: int
    squares: float
    degrees: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MonitorBand:
        """The band of the first cycle, from one value per group."""
        mean = mean_of(values)
        return cls(mean, len(values), math.fsum((value - mean) ** 2 for value in values), len(values) - 1)

    def refined(self, values: Sequence[float]) -> MonitorBand:
        """With a later cycle's spread too, as long as it is needed; the mean stays the first cycle's."""
        if self.degrees >= SPREAD_DEGREES:
            return self
        other = MonitorBand.of(values)
        return replace(self, squares=self.squares + other.squares, degrees=self.degrees + other.degrees)

    @property
    def spread(self) -> float:
        """Standard deviation over groups; 0 if there never was more than one."""
        return math.sqrt(self.squares / self.degrees) if self.degrees else 0.0

    @property
    def standard_error(self) -> float:
        """Standard deviation of a smoothed later value about `mean`, if nothing has changed but the prompts."""
        return self.spread * math.sqrt((1 + SMOOTHING / (2 - SMOOTHING)) / self.groups)

    def limits(self, width: float) -> tuple[float, float]:
        """Lower and upper end.

        Args:
            width: `log.monitor_band`: half-width in standard errors, were the spread exactly known.

        Returns:
            (-inf, inf) for a single group, which says nothing about the spread.
        """
        if not self.degrees:
            return -math.inf, math.inf
        half = max(student_quantile(width, self.degrees) * self.standard_error, RESOLUTION)
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Alarm:
    """A statistic that has left its band while the reward rose; also the row of kind "alarm" in metrics.jsonl.

    Attributes:
        statistic: Its name, for example "brightness".
        value: Its smoothed value.
        first: Its mean in the first cycle.
        low: Lower end of its band.
        high: Upper end.
        reward: The smoothed reward (weighted sum).
        reward_first: The reward's mean in the first cycle.
    """

    statistic: str
    value: float
    first: float
    low: float
    high: float
    reward: float
    reward_first: float

    @property
    def advice(self) -> str:
        """What to look at."""
        look = _LOOKS.get(self.statistic, ("unlike the first cycle's", "unlike the first cycle's"))
        return (
            f"look at the newest samples: are they {look[self.value > self.high]}? If they are, the reward is being "
            f"gamed (guidance/rewards.md, 'Reward hacking')"
        )

    @property
    def message(self) -> str:
        """One sentence for the log."""
        side = "above" if self.value > self.high else "below"
        return (
            f"{self.statistic} {self.value:.4g} is {side} the first cycle's band [{self.low:.4g}, {self.high:.4g}] "
            f"while the reward has risen from {self.reward_first:.4g} to {self.reward:.4g}: {self.advice}."
        )

    def row(self) -> dict[str, Any]:
        """The row's metrics."""
        return {**asdict(self), "message": self.message}


class HackingMonitor:
    """Bands, smoothed values and alarms of a run. It draws no conclusions from a run without rewards.

    Args:
        width: `log.monitor_band`.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self.bands: dict[str, MonitorBand] = {}
        self.smoothed: dict[str, float] = {}
        self.alarmed: set[str] = set()

    def limits(self) -> dict[str, tuple[float, float]]:
        """Lower and upper end of the band of each statistic seen so far."""
        return {name: band.limits(self.width) for name, band in self.bands.items() if name != _REWARD}

    def observe(self, statistics: Mapping[str, Sequence[float]], rewards: Sequence[float]) -> list[Alarm]:
        """Takes one cycle's numbers; the first time a name appears, they define the centre of its band.

        Args:
            statistics: Name to one value per group.
            rewards: Mean weighted reward of each group; empty without rewards.

        Returns:
            New alarms. One per statistic, until its smoothed value has come back into the inner half of its band.
        """
        for name, values in {**statistics, **({_REWARD: rewards} if rewards else {})}.items():
            if name in self.bands:
                self.bands[name] = self.bands[name].refined(values)
            else:
                self.bands[name] = MonitorBand.of(values)
                self.smoothed[name] = self.bands[name].mean
            self.smoothed[name] += SMOOTHING * (mean_of(values) - self.smoothed[name])
        return [alarm for name in statistics if (alarm := self._judge(name)) is not None]

    def reward_has_risen(self) -> bool:
        """Whether the smoothed reward exceeds the first cycle's mean by more than chance explains."""
        if _REWARD not in self.bands:
            return False
        band = self.bands[_REWARD]
        return self.smoothed[_REWARD] > band.mean + REWARD_RISE * band.standard_error

    def state_dict(self) -> dict[str, Any]:
        """Bands, smoothed values and standing alarms, for checkpoints."""
        bands = {name: asdict(band) for name, band in self.bands.items()}
        return {"bands": bands, "smoothed": dict(self.smoothed), "alarmed": sorted(self.alarmed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.bands = {name: MonitorBand(**band) for name, band in state["bands"].items()}
        self.smoothed = dict(state["smoothed"])
        self.alarmed = set(state["alarmed"])

    def _judge(self, name: str) -> Alarm | None:
        band, value = self.bands[name], self.smoothed[name]
        low, high = band.limits(self.width)
        if name in self.alarmed:
            # Not at the very edge, where a value that wavers would raise the alarm again and again.
            if abs(value - band.mean) <= (high - low) / 4:
                self.alarmed.remove(name)
            return None
        if low <= value <= high or not self.reward_has_risen():
            return None
        self.alarmed.add(name)
        return Alarm(name, value, band.mean, low, high, self.smoothed[_REWARD], self.bands[_REWARD].mean)


@functools.cache
def student_quantile(sigmas: float, degrees: int) -> float:
    """The t that a Student variable exceeds in magnitude as rarely as a standard normal one exceeds `sigmas`.

    The distribution function for whole degrees of freedom is the finite sum of Abramowitz & Stegun 26.7.3-4 in
    theta = atan(t / sqrt(n)); it is inverted by bisection.

    Args:
        sigmas: Above 0 and at most 6, beyond which the normal probability is too close to 1 to be inverted well.
        degrees: Degrees of freedom n, at least 1.
    """
    wanted = 2 * NormalDist().cdf(sigmas) - 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _student_within(middle, degrees) < wanted:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_within(theta: float, degrees: int) -> float:
    """P(|T| < sqrt(n) tan(theta)) for n = `degrees`."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = total = 0.0
    for power in range(odd, degrees - 1, 2):
        # Even n: 1, 1/2 cos^2, 3/8 cos^4, ...; odd n: cos, 2/3 cos^3, 8/15 cos^5, ...
        term = (cosine if odd else 1.0) if power == odd else term * cosine**2 * (power - 1) / power
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def mean_of(values: Sequence[float]) -> float:
    """Mean with one rounding, whatever the order: ranks may hand over groups in any."""
    return math.fsum(values) / len(values)
