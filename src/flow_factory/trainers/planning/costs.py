"""Rows through the network for one sample's prediction: asked from the adapter's own code, on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flow_factory.hparams.training_times import TimeSampling
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.shapes.runner import ShapeRuns, UnknownShapesError
from flow_factory.samples import ComponentTimes, Condition, Grid, LatentState
from flow_factory.trainers.noising import free_times
from flow_factory.trainers.planning.evaluations import Range

_CPU = torch.device("cpu")
_SIGMAS = 33  # where freely drawn times are looked at, to find whether guidance is on at some of them only


class Batch:
    """A state and a condition of the same rows, as a network gets them.

    Args:
        runs: The skeleton.
        rows: Conditions of single rows, from which the batch is filled up; None if they are not known.
        count: B.
        size: Height and width in pixels.
        generation: The model-specific fields.
        grid: Where the states come from; None: latents as they are drawn.
    """

    def __init__(
        self,
        runs: ShapeRuns,
        rows: Sequence[Condition] | None,
        count: int,
        size: tuple[int, int],
        generation: Any,
        grid: Grid | None = None,
    ) -> None:
        adapter = runs.adapter
        self.condition: Any = None
        if rows:
            taken = [rows[number % len(rows)] for number in range(count)]
            self.condition = adapter.prepare_condition_state(adapter.collate_conditions(taken))
        generators = [torch.Generator().manual_seed(0) for _ in range(count)]
        state = adapter.prepare_latents(self.condition, generators, *size, generation)
        if grid is not None and self.condition is not None:
            state = adapter.initial_state(state, grid, self.condition)
        self.state: LatentState = state
        self.count = count


class Costs:
    """Rows of one sample's prediction under some guidance.

    Args:
        runs: The skeleton.
        one: A batch of one row.
    """

    def __init__(self, runs: ShapeRuns, one: Batch) -> None:
        self._runs, self._one = runs, one

    def at(self, times: ComponentTimes, guidance: GuidanceSpec) -> int:
        """At these times. Where the adapter cannot be asked: one, and one more if guidance is active."""
        if self._one.condition is not None:
            try:
                return self._runs.rows(self._one.state, times, self._one.condition, guidance)
            except UnknownShapesError:
                pass
        return 1 + guidance.active(times)

    def on_grid(self, grid: Grid, guidance: GuidanceSpec) -> tuple[int, ...]:
        """At every step of a grid."""
        return tuple(self.at(grid.times(step, 1, _CPU), guidance) for step in range(grid.length))

    def at_training_times(self, sampling: TimeSampling, grid: Grid, guidance: GuidanceSpec) -> Range:
        """At the times that a decoupled objective may draw."""
        if sampling.discrete:
            return Range.over([self.at(grid.times(i, 1, _CPU), guidance) for i in sampling.steps(grid.length)] or [1])
        windowed = guidance.sigma_window is not None or guidance.step_window is not None
        sigmas = torch.linspace(0, 1, _SIGMAS + 2)[1:-1] if windowed else torch.tensor([0.5])
        of = self._runs.adapter
        times = [
            free_times(self._one.state, sigma.reshape(1), of.timestep_for_sigma, of.component_sigma) for sigma in sigmas
        ]
        return Range.over([self.at(t, guidance) for t in times])
