"""What the decoupled trainers share: rollouts that keep the final latents only, and velocities at noised states.

A decoupled objective needs nothing of the path that led to a sample, so rollouts may be deterministic and with any
solver. The order inside a loss term is always: frozen policies first, then, pinned, the trained forward and its
backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from flow_factory.contracts import ONLINE_EXECUTION_CONTRACT
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.snapshots import Snapshot
from flow_factory.objectives.matching import mean_square
from flow_factory.samples import BaseSample, LatentState, SampleBatch
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.noising import NoisedState


class DecoupledTrainer(BaseTrainer):
    """Samples groups, keeps their final latents, and leaves the objective to the subclass."""

    paradigm: ClassVar[str] = "decoupled"
    execution_contract = ONLINE_EXECUTION_CONTRACT

    def sample(self) -> list[BaseSample]:
        """One rollout of the cycle's prompts; of the trajectory only the final latents are kept."""
        return self.generate_samples(reward_buffer=self.reward_buffer, trajectory_indices=(-1,))

    # ------------------------------------------------------------------------------------------------ velocities
    def velocity(self, batch: SampleBatch, point: NoisedState, guidance_scale: float | None = None) -> LatentState:
        """The velocity at a noised state under the active weights.

        Args:
            batch: The micro-batch.
            point: It, noised.
            guidance_scale: Guidance of a reference, active above 1; None is none. Models whose guidance is a network
                input get the rollout's where there is none, since a network without it would be another network.
        """
        return self.adapter.predict(point.state, point.times, batch.condition, self._guidance(guidance_scale))

    def frozen_velocity(
        self,
        policy: AbstractContextManager[Any],
        batch: SampleBatch,
        point: NoisedState,
        guidance_scale: float | None = None,
    ) -> LatentState:
        """The same under a frozen policy, without a graph."""
        with torch.no_grad(), policy:
            return self.velocity(batch, point, guidance_scale)

    def reference_velocity(
        self, batch: SampleBatch, point: NoisedState, guidance_scale: float | None = None
    ) -> LatentState | None:
        """The reference's velocity, or None if there is no KL term."""
        if float(getattr(self.training_args, "kl_beta", 0.0)) == 0:
            return None
        return self.frozen_velocity(self.reference_policy(), batch, point, guidance_scale)

    def _guidance(self, scale: float | None) -> GuidanceSpec:
        if scale is None or scale <= 1:
            # Not `adapter.guidance(1.0)`: a model may count guidance from 0, or have a second kind in its own fields.
            return self.rollout_plan.guidance.unguided()
        return self.adapter.guidance(scale)

    # ------------------------------------------------------------------------------------------------ loss terms
    def add_kl(
        self,
        loss: Tensor,
        metrics: dict[str, Tensor],
        velocity: LatentState,
        reference: LatentState | None,
        *,
        weight: float | Tensor,
        name: str = "kl",
    ) -> Tensor:
        """The loss plus weight mean (v - v_ref)^2, averaged over rows; the plain mean is logged under `name`.

        Args:
            loss: What to add to.
            metrics: Receives the KL.
            velocity: v, with graph.
            reference: v_ref, or None for no term.
            weight: A number, or one per row, [B].
            name: Of the metric.
        """
        if reference is None:
            return loss
        kl = mean_square(velocity, reference.detach())
        metrics[name] = kl.detach().mean()
        return loss + (weight * kl).mean()

    # ------------------------------------------------------------------------------------------------ snapshots
    def own_snapshot(self, name: str) -> Snapshot:
        """A snapshot that `_declare_model_variants` declared, to be moved."""
        return self.adapter.weights.snapshots[name]

    @property
    def before_first_update(self) -> bool:
        """True while this cycle has changed no weights."""
        return self.step == self._cycle_start.optimizer_step
