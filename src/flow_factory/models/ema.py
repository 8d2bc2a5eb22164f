"""Exponential moving averages of weights: the decay of each update, and the average itself.

With n = number of updates made before this one, d = `decay`, w = `flat_updates`, N = `ramp_updates`:

| schedule           | decay of update n                                                                     |
|--------------------|---------------------------------------------------------------------------------------|
| `constant`         | d                                                                                     |
| `power`            | min(d, (1 + n) / (10 + n)), the usual warm-up of averages                              |
| `linear`           | d min(1, n / N)                                                                       |
| `piecewise_linear` | 0 for n < w, then d min(1, (n - w) / N): DiffusionNFT's flat, ramp and cap             |
| `cosine`           | d (1 - cos(pi min(1, n / N))) / 2                                                     |
| `warmup_cosine`    | 0 for n < w, then d (1 - cos(pi min(1, (n - w) / N))) / 2                              |

A decay of 0 copies the weights; the average is `average <- decay average + (1 - decay) weights`, in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flow_factory.models.snapshots import Snapshot


@dataclass(frozen=True)
class EmaSchedule:
    """The decay as a function of the number of updates so far; the module docstring holds the formulas.

    Attributes:
        kind: One of the schedule names.
        decay: d, the final decay, in [0, 1].
        flat_updates: w, used by `piecewise_linear` and `warmup_cosine`.
        ramp_updates: N, at least 1, used by all but `constant` and `power`.
    """

    kind: str = "power"
    decay: float = 0.995
    flat_updates: int = 0
    ramp_updates: int = 100

    def __post_init__(self) -> None:
        kinds = ("constant", "power", "linear", "piecewise_linear", "cosine", "warmup_cosine")
        if self.kind not in kinds:
            raise ValueError(f"EmaSchedule(kind={self.kind!r}): the schedules are {', '.join(kinds)}.")
        if not 0.0 <= self.decay <= 1.0 or self.ramp_updates < 1 or self.flat_updates < 0:
            raise ValueError(
                f"EmaSchedule needs decay in [0, 1], ramp_updates >= 1 and flat_updates >= 0; got decay={self.decay}, "
                f"ramp_updates={self.ramp_updates}, flat_updates={self.flat_updates}."
            )

    def __call__(self, n: int) -> float:
        """The decay of update number `n`, counted from 0."""
        if self.kind == "constant":
            return self.decay
        if self.kind == "power":
            return min(self.decay, (1 + n) / (10 + n))
        flat = self.flat_updates if self.kind in ("piecewise_linear", "warmup_cosine") else 0
        if n < flat:
            return 0.0
        fraction = min(1.0, (n - flat) / self.ramp_updates)
        if self.kind in ("linear", "piecewise_linear"):
            return self.decay * fraction
        return self.decay * (1.0 - math.cos(math.pi * fraction)) / 2.0


class Ema:
    """Moves a snapshot towards its role's weights every `interval` optimizer steps.

    Args:
        snapshot: Holds the average; it starts as a copy of the weights.
        schedule: Decay of each update.
        interval: Optimizer steps between updates.
    """

    def __init__(self, snapshot: Snapshot, schedule: EmaSchedule, interval: int = 1) -> None:
        if interval < 1:
            raise ValueError(f"Ema(interval={interval}): the interval counts optimizer steps and is at least 1.")
        self.snapshot = snapshot
        self.schedule = schedule
        self.interval = interval
        self.updates = 0

    def step(self, optimizer_step: int) -> float | None:
        """Called after every optimizer step, counted from 1; returns the decay used, or None between updates."""
        if optimizer_step % self.interval != 0:
            return None
        decay = self.schedule(self.updates)
        self.snapshot.update(decay)
        self.updates += 1
        return decay

    def state_dict(self) -> dict[str, int]:
        """The counter; the average itself is saved with the snapshots."""
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the counter."""
        self.updates = int(state["updates"])
