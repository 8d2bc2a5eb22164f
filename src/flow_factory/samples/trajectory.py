"""The denoising grid and what a rollout stores along it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flow_factory.samples.states import ComponentTimes, LatentState, StepTimes


@dataclass(frozen=True)
class Grid:
    """The sigma grid of a rollout, copied from the pipeline's scheduler.

    Attributes:
        sigmas: Component name to float32 [T + 1], from noise to data; the last entry is usually 0.
        timesteps: Component name to [T], the network's time input of each step.
    """

    sigmas: Mapping[str, Tensor]
    timesteps: Mapping[str, Tensor]

    @classmethod
    def single(cls, sigmas: Tensor, timesteps: Tensor) -> Grid:
        """The grid of a model with one component, called "latent"."""
        return cls({"latent": sigmas}, {"latent": timesteps})

    @property
    def length(self) -> int:
        """T, the number of steps (not always num_inference_steps)."""
        return next(iter(self.timesteps.values())).shape[0]

    @property
    def primary(self) -> Tensor:
        """Sigmas [T + 1] of the first component, which windows and time ranges are counted on."""
        return next(iter(self.sigmas.values()))

    def times(
        self, index: int, batch_size: int, device: torch.device | str = "cpu", next_index: int | None = None
    ) -> ComponentTimes:
        """Times of step `index`, the same for each of `batch_size` rows.

        Args:
            index: Where the step starts.
            batch_size: B.
            device: Where the tensors are made.
            next_index: Where it ends; None = at the next point. A solver may leave points out.

        Raises:
            IndexError: If `index` is not in [0, T).
        """
        end = index + 1 if next_index is None else next_index
        if not 0 <= index < self.length:
            raise IndexError(f"step {index} is not on a grid of {self.length} steps (0 to {self.length - 1}).")
        components = {
            name: StepTimes(
                sigma=sigmas[index].to(device).expand(batch_size),
                sigma_next=sigmas[end].to(device).expand(batch_size),
                timestep=self.timesteps[name][index].to(device).expand(batch_size),
            )
            for name, sigmas in self.sigmas.items()
        }
        return ComponentTimes(
            components, torch.full((batch_size,), index, dtype=torch.int64, device=device), self.length
        )


@dataclass(frozen=True)
class Trajectory:
    """What a rollout stored, for a batch ([B, ...] tensors) or for one row (no batch dimension).

    Attributes:
        grid: The grid walked.
        noise_levels: eta of each step, length T; 0 where the step was deterministic.
        states: Grid index i in 0..T to the state *before* step i (0 = initial noise, T = final latents).
        log_probs: Step index to the log-probability of its transition, [B] (or a scalar for a row).
        means: Step index to the transition mean, kept only where an objective needs it; float32 whatever the storage
            dtype, so that a replay with the same weights gives the same bits.
        velocities: Step index to the velocity, likewise.
    """

    grid: Grid
    noise_levels: tuple[float, ...]
    states: Mapping[int, LatentState] = field(default_factory=dict)
    log_probs: Mapping[int, Tensor] = field(default_factory=dict)
    means: Mapping[int, LatentState] = field(default_factory=dict)
    velocities: Mapping[int, LatentState] = field(default_factory=dict)

    @property
    def sde_steps(self) -> tuple[int, ...]:
        """Indices of the stochastic steps, in order."""
        return tuple(i for i, eta in enumerate(self.noise_levels) if eta > 0)

    def row(self, index: int) -> Trajectory:
        """Row `index` as views without the batch dimension."""
        return Trajectory(
            self.grid,
            self.noise_levels,
            {i: s.row(index) for i, s in self.states.items()},
            {i: lp[index] for i, lp in self.log_probs.items()},
            {i: m.row(index) for i, m in self.means.items()},
            {i: v.row(index) for i, v in self.velocities.items()},
        )

    def to(self, device: torch.device | str) -> Trajectory:
        """Moves the stored tensors (not the grid) to `device`."""
        return Trajectory(
            self.grid,
            self.noise_levels,
            {i: s.to(device) for i, s in self.states.items()},
            {i: lp.to(device) for i, lp in self.log_probs.items()},
            {i: m.to(device) for i, m in self.means.items()},
            {i: v.to(device) for i, v in self.velocities.items()},
        )

    @staticmethod
    def stack(rows: Sequence[Trajectory]) -> Trajectory:
        """Joins row trajectories into a batch; the inverse of `row`.

        Raises:
            ValueError: If the rows were walked with different noise levels (a window must not differ inside a batch).
        """
        first = rows[0]
        if any(row.noise_levels != first.noise_levels for row in rows):
            raise ValueError("trajectories with different SDE windows cannot share a batch: one window per cycle.")
        return Trajectory(
            first.grid,
            first.noise_levels,
            {i: LatentState.stack([row.states[i] for row in rows]) for i in first.states},
            {i: torch.stack([row.log_probs[i] for row in rows]) for i in first.log_probs},
            {i: LatentState.stack([row.means[i] for row in rows]) for i in first.means},
            {i: LatentState.stack([row.velocities[i] for row in rows]) for i in first.velocities},
        )
