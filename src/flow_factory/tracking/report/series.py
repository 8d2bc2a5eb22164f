"""From rows of metrics to series, and from long series to short ones that look the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Points of a curve on the page: two a pixel of the widest chart.
POINT_LIMIT = 1000
# Counters of 64 bits; what is larger was never counted, and would not fit into a float.
LARGEST_INTEGER = 2**63


@dataclass(frozen=True)
class Series:
    """A quantity over cycles or optimizer steps.

    Attributes:
        x: Cycles or steps, ascending.
        y: Values; NaN and infinities are kept.
        low: Lower edge of the spread at each x, if there is one.
        high: Its upper edge.
        total: Points before thinning.
    """

    x: tuple[int, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    total: int = 0

    def __len__(self) -> int:
        return len(self.x)

    @property
    def thinned(self) -> bool:
        """Whether points were left out."""
        return self.total > len(self.x)

    def take(self, kept: Sequence[int]) -> Series:
        """The points at these indices; the total stays."""

        def of(column: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(column[i] for i in kept) if column else ()

        return Series(of(self.x), of(self.y), of(self.low), of(self.high), total=self.total)

    @property
    def has_band(self) -> bool:
        """Whether the spread is known anywhere."""
        return any(math.isfinite(low) and math.isfinite(high) for low, high in zip(self.low, self.high, strict=True))

    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for value in self.y if math.isfinite(value)]


def is_number(value: Any) -> bool:
    """Whether a metric can be drawn: an integer beyond any float cannot."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= LARGEST_INTEGER)


def extract(
    rows: Iterable[Mapping[str, Any]], key: str, axis: str, low: str | None = None, high: str | None = None
) -> Series:
    """One metric of some rows.

    Args:
        rows: Rows of one kind.
        key: The metric; rows without it are passed over.
        axis: "cycle" or "step".
        low: Metric that is the lower edge of the spread.
        high: Metric that is the upper edge.

    Returns:
        The series; where an x occurs twice (a cycle that was run again) the later row counts.
    """
    found: dict[int, tuple[float, float, float]] = {}
    has_band = low is not None and high is not None
    for row in rows:
        if not is_number(row.get(key)):
            continue
        y = float(row[key])
        edges = (row.get(low or ""), row.get(high or ""))
        below, above = (float(e) if is_number(e) else math.nan for e in edges)  # type: ignore[arg-type]
        found[row[axis]] = (y, below, above)
    ordered = sorted(found.items())
    y_low_high = [values for _, values in ordered]
    return Series(
        x=tuple(x for x, _ in ordered),
        y=tuple(v[0] for v in y_low_high),
        low=tuple(v[1] for v in y_low_high) if has_band else (),
        high=tuple(v[2] for v in y_low_high) if has_band else (),
        total=len(ordered),
    )


def with_spread(mean: Series, spread: Series) -> Series:
    """A mean with a band of one spread to each side; where the spread is not known, there is no band (NaN)."""
    widths = dict(zip(spread.x, spread.y, strict=True))
    deltas = [widths.get(x, math.nan) for x in mean.x]
    return Series(
        x=mean.x,
        y=mean.y,
        low=tuple(y - d for y, d in zip(mean.y, deltas, strict=True)),
        high=tuple(y + d for y, d in zip(mean.y, deltas, strict=True)),
        total=mean.total,
    )


def kept_points(series: Series, limit: int = POINT_LIMIT) -> list[int]:
    """Which points of a long series to draw so that it keeps its outline.

    The points are cut into runs of equal length; of each the lowest and the highest value stay, so no spike is lost and
    every point that stays is one of the run's own. The first and the last point stay, and so does everything that is
    not a number.

    Args:
        series: Any series.
        limit: Points wanted, at least 4; up to that many all of them stay.

    Returns:
        Ascending indices; a few more than `limit` where values are not numbers.
    """
    count = len(series)
    if count <= limit:
        return list(range(count))
    buckets = max(1, limit // 2 - 1)
    keep = {0, count - 1} | {i for i, value in enumerate(series.y) if not math.isfinite(value)}
    if len(keep) > limit:  # a series of NaN is as telling with fewer of them
        keep = {0, count - 1}
    for bucket in range(buckets):
        start, end = bucket * count // buckets, (bucket + 1) * count // buckets
        inside = [i for i in range(start, end) if math.isfinite(series.y[i])]
        if inside:
            keep |= {min(inside, key=series.y.__getitem__), max(inside, key=series.y.__getitem__)}
    return sorted(keep)


def running_mean(y: Sequence[float], window: int, at: Sequence[int]) -> tuple[float, ...]:
    """Mean over a centred window that is cut off at the ends; values that are not numbers are left out.

    Args:
        y: Values.
        window: Odd length of the window.
        at: Indices at which the mean is wanted. Each is a sum of its own: with running sums, one value of 1e20 would
            leave nothing of those after it.
    """
    half, means = window // 2, []
    for i in at:
        inside = [v for v in y[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        means.append(math.fsum(v / len(inside) for v in inside) if inside else math.nan)
    return tuple(means)


def exponential_mean(y: Sequence[float], weight: float) -> tuple[float, ...]:
    """Moving average that starts at the first value and gives `weight` to each newer one; gaps leave it as it was."""
    smoothed: list[float] = []
    for value in y:
        former = smoothed[-1] if smoothed else value
        smoothed.append(former + weight * (value - former) if math.isfinite(value - former) else former)
    return tuple(smoothed)


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly spaced, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]
