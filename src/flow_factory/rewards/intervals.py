"""Confidence intervals of mean rewards, by bootstrap over prompts.

The samples of one prompt are alike (an easy prompt stays easy), so the prompt is the unit that is drawn again, with all
its samples: the cluster bootstrap (Davison & Hinkley, Bootstrap Methods and their Application, 1997, section 3.8) with
percentile intervals (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). A paired comparison draws
the differences of the same prompts and noises, whose spread is smaller than that of the two means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEVEL = 0.95
RESAMPLES = 10_000
_CHUNK = 1_000_000  # drawn indices held at once


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Attributes:
        mean: Over all values.
        low: Lower end; None with fewer than two units, which say nothing about the spread.
        high: Upper end, or None.
        values: How many values.
        units: How many units (prompts).
    """

    mean: float
    low: float | None
    high: float | None
    values: int
    units: int

    def to_mapping(self) -> dict[str, float | int | None]:
        """Plain data for JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "values": self.values, "units": self.units}


def bootstrap_mean(
    values: Sequence[float],
    units: Sequence[int],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The mean of all values, with a percentile interval from resampling whole units.

    Args:
        values: One number per sample.
        units: The unit (prompt) of each sample; units may have different numbers of samples.
        level: Confidence level, in (0, 1).
        resamples: Bootstrap replicates.
        seed: Seed of the draws, which come from a generator of their own.

    Raises:
        ValueError: If there are no values, or not one unit for each.
    """
    if not values or len(values) != len(units):
        raise ValueError(f"a mean needs values with one unit each, not {len(values)} values and {len(units)} units")
    x = torch.tensor(values, dtype=torch.float64)
    mean = x.mean().item()
    _, index = torch.unique(torch.tensor(units, dtype=torch.int64), return_inverse=True)
    n = int(index.max()) + 1
    if n < 2:
        return Interval(mean, None, None, len(values), n)
    # Deviations from the mean keep the sums small, so that equal values give an interval of exactly zero width.
    sums = torch.zeros(n, dtype=torch.float64).index_add_(0, index, x - mean)
    counts = torch.zeros(n, dtype=torch.float64).index_add_(0, index, torch.ones_like(x))
    generator = torch.Generator().manual_seed(seed)
    means = []
    done, chunk = 0, max(1, _CHUNK // n)
    while done < resamples:
        drawn = torch.randint(n, (min(chunk, resamples - done), n), generator=generator)
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
        done += drawn.shape[0]
    tail = (1 - level) / 2
    low, high = torch.quantile(torch.cat(means), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(mean, mean + low, mean + high, len(values), n)
