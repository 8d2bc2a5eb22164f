"""Which steps of a rollout are stochastic.

Only those steps have a transition density, so they are the ones a coupled objective trains. One window serves a whole
cycle: every member of every group, on every rank. It is a function of (seed, cycle) and of nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.samples.noise import Purpose, derive_seed
from flow_factory.scheduler.dynamics import effective_std
from flow_factory.scheduler.names import Dynamics, parse_dynamics

WindowPolicy = Literal["random", "contiguous", "sliding"]


@dataclass(frozen=True)
class Candidates:
    """Steps that may be stochastic.

    Attributes:
        indices: Grid indices, ascending; never the last step.
        exceeding: Steps before the last one whose effective std exceeds the noise level they step to. With the
            default choice they were left out of `indices`; in an explicit list they are kept, and worth a warning.
    """

    indices: tuple[int, ...]
    exceeding: tuple[int, ...]


def resolve_candidates(
    dynamics: Dynamics | str, sigmas: Tensor, noise_level: float, sde_steps: Sequence[int] | None = None
) -> Candidates:
    """Candidate steps of a grid.

    Args:
        dynamics: One of the five kernels.
        sigmas: The grid, [T + 1], from noise to data.
        noise_level: eta.
        sde_steps: An explicit list of grid indices, taken as given; None = all steps i <= T - 2 whose effective std
            q_i is at most sigma_{i+1} (late steps of a shifted grid would add more noise than their target holds).

    Returns:
        No indices for ODE dynamics or a noise level of 0.

    Raises:
        InputError: For an index that is not on the grid, is repeated, or is the last step (its target sigma is 0, so
            its log-prob overflows).
    """
    dynamics = parse_dynamics(dynamics)
    if not dynamics.stochastic or noise_level == 0:
        return Candidates((), ())
    steps = sigmas.shape[0] - 1
    over = [
        q > s for q, s in zip(effective_std(dynamics, sigmas, noise_level).tolist(), sigmas[1:].tolist(), strict=True)
    ]
    if sde_steps is None:
        inner = range(steps - 1)
        return Candidates(tuple(i for i in inner if not over[i]), tuple(i for i in inner if over[i]))

    for i in sde_steps:
        if not 0 <= i < steps:
            raise InputError(
                f"scheduler.sde_steps contains {i}, but the grid has {steps} steps (0 to {steps - 1}). Use indices "
                f"from 0 to {steps - 2}."
            )
        if i == steps - 1:
            raise InputError(
                f"scheduler.sde_steps contains {i}, the last of {steps} steps, which ends at data and is never "
                f"stochastic. Use indices from 0 to {steps - 2}."
            )
    if len(set(sde_steps)) != len(sde_steps):
        raise InputError(f"scheduler.sde_steps {list(sde_steps)} names a step twice. Name each step once.")
    chosen = tuple(sorted(sde_steps))
    return Candidates(chosen, tuple(i for i in chosen if over[i]))


def select_window(
    candidates: Candidates | Sequence[int],
    num_sde_steps: int | None,
    policy: WindowPolicy = "random",
    *,
    seed: int,
    cycle: int,
    window_range: tuple[int, int] | None = None,
    interval: int = 25,
    stride: int = 1,
) -> tuple[int, ...]:
    """The stochastic steps of one cycle.

    Args:
        candidates: From `resolve_candidates`, or grid indices.
        num_sde_steps: Window size; None = every candidate (inside `window_range`).
        policy: "random": drawn without replacement. "contiguous": neighbouring steps with a random start (the fast
            variant of Flow-GRPO, arXiv 2505.05470). "sliding": neighbouring steps that move from high noise to low by
            `stride` every `interval` cycles, and start again after the last full window (MixGRPO, arXiv 2507.21802).
        seed: The window's seed (scheduler.seed, else the run's). "sliding" does not use it.
        cycle: Rollout iteration, from 0.
        window_range: (lo, hi): only steps lo <= i < hi.
        interval: Cycles between two moves of a sliding window.
        stride: Steps per move of a sliding window.

    Returns:
        Grid indices, ascending.

    Raises:
        InputError: If no such window exists, or for an unknown policy.
    """
    indices = candidates.indices if isinstance(candidates, Candidates) else tuple(sorted(candidates))
    lo, hi = window_range if window_range is not None else (0, max(indices, default=0) + 1)
    allowed = [i for i in indices if lo <= i < hi]
    size = len(allowed) if num_sde_steps is None else num_sde_steps
    where = f"steps {allowed}" + (f" of scheduler.sde_window_range ({lo}, {hi})" if window_range is not None else "")
    if not allowed:
        raise InputError(_none_allowed(candidates, indices, window_range))
    if not 1 <= size <= len(allowed):
        raise InputError(
            f"scheduler.num_sde_steps is {size}, but {len(allowed)} step(s) can be stochastic ({where}). Use 1 to "
            f"{len(allowed)}, or name the steps in scheduler.sde_steps."
        )
    rng = random.Random(derive_seed(seed, Purpose.WINDOW, cycle=cycle))
    if policy == "random":
        # Python promises the sequence of random() across versions, not that of sample().
        ranked = sorted((rng.random(), i) for i in allowed)
        return tuple(sorted(i for _, i in ranked[:size]))
    if policy not in ("contiguous", "sliding"):
        raise InputError(f"unknown window policy {policy!r} (scheduler.sde_window): random, contiguous or sliding.")

    members = set(allowed)
    starts = [i for i in allowed if all(j in members for j in range(i, i + size))]
    if not starts:
        raise InputError(
            f"scheduler.sde_window {policy!r} needs {size} neighbouring steps, but {where} hold none. Lower "
            f"scheduler.num_sde_steps, or name neighbouring steps in scheduler.sde_steps."
        )
    if policy == "contiguous":
        start = starts[int(rng.random() * len(starts))]
    else:
        if interval < 1 or stride < 1:
            raise InputError(
                f"scheduler.sliding_interval {interval} and scheduler.sliding_stride {stride} must be at least 1."
            )
        stops = starts[::stride]
        start = stops[(cycle // interval) % len(stops)]
    return tuple(range(start, start + size))


def _none_allowed(
    candidates: Candidates | Sequence[int], indices: Sequence[int], window_range: tuple[int, int] | None
) -> str:
    if indices and window_range is not None:
        return (
            f"no step can be stochastic: of the candidates {list(indices)}, none is in scheduler.sde_window_range "
            f"{window_range} (lo <= step < hi). Widen the range."
        )
    if isinstance(candidates, Candidates) and candidates.exceeding:
        return (
            f"no step can be stochastic: steps {list(candidates.exceeding)} would add more noise than their target "
            f"level holds. Lower scheduler.noise_level, take more steps, or name the steps in scheduler.sde_steps."
        )
    return (
        "no step can be stochastic. Use SDE dynamics (scheduler.dynamics_type), scheduler.noise_level above 0 and at "
        "least 2 steps (the last one never is)."
    )


def steps_taken(length: int, window: Sequence[int], fraction: float = 1.0) -> tuple[int, ...]:
    """Which steps of a grid are evaluated: all up to the last stochastic one, and a share of those after it.

    MixGRPO-Flash (arXiv 2507.21802) finishes a rollout with fewer and longer deterministic steps of a solver of higher
    order. The points that stay are spaced evenly in the index; a step ends where the next one starts, the last one at
    the end of the grid.

    Args:
        length: T, steps of the grid.
        window: The stochastic steps.
        fraction: Share of the steps after the window that are taken, in (0, 1]; at least one is.

    Returns:
        Grid indices at which a step starts, ascending.
    """
    after = max(window, default=-1) + 1
    remaining = length - after
    taken = max(1, math.ceil(remaining * fraction - 1e-9)) if remaining else 0
    return (*range(after), *(after + number * remaining // taken for number in range(taken)))


def noise_weights(dynamics: Dynamics | str, sigmas: Tensor, noise_level: float) -> Tensor:
    """TempFlow-GRPO's noise-aware weight of each step: q_i over the mean of q over steps 0..T-2, float64 [T].

    arXiv 2508.04324: a step's policy term counts by how much noise, and so how much exploration, the step has. The last
    step is never stochastic and takes no part in the mean. On SD3's grid of 10 steps with eta 0.7 the mean is 1 / 2.25.
    """
    std = effective_std(dynamics, sigmas, noise_level)
    return std / std[:-1].mean()
