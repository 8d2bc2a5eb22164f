"""Objectives whose gradient of one sample needs numbers of its whole group, at the present weights.

The members of a group lie in different micro-batches and on different ranks. So each training time is walked twice: a
first pass without gradients measures all samples and gathers them over ranks, the second differentiates one micro-batch
after the other with the group's numbers at hand. Updates happen between two times only (`hparams` holds that), so all
members of a group are measured, and differentiated, under the same weights. What frozen policies say is computed in the
first pass and kept for the second.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flow_factory.samples import BaseSample, LatentState, SampleBatch
from flow_factory.trainers.groups import over_groups
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.rl.decoupled import DecoupledTrainer


@dataclass(frozen=True)
class Measured:
    """What the first pass found out about a micro-batch at one time.

    Attributes:
        columns: [B, C] float64, what `group_function` takes.
        kept: Numbers of frozen policies that the loss needs again, [B] each.
        reference: v_ref for the KL term, or None.
    """

    columns: Tensor
    kept: dict[str, Tensor]
    reference: LatentState | None


class GroupCoupledTrainer(DecoupledTrainer):
    """Walks time by time; a subclass says what is measured, what a group makes of it, and the loss."""

    shares_times: ClassVar[bool] = False

    @property
    def shares_noise(self) -> bool:
        """Whether all members of a group are noised with the same noise."""
        return False

    @abstractmethod
    def measure(self, batch: SampleBatch, point: NoisedState) -> Measured:
        """The first pass over a micro-batch; called without gradients."""

    @abstractmethod
    def group_function(self, columns: Tensor) -> Tensor:
        """[K, C] of a complete group to [K, D], a row for each member."""

    @abstractmethod
    def loss_term(
        self, batch: SampleBatch, point: NoisedState, measured: Measured, of_group: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the micro-batch, with its rows of `group_function`'s result, [B, D]; called pinned."""

    def optimize(self, samples: list[BaseSample]) -> None:
        """One term per time and micro-batch."""
        for repeat in range(self.training_args.num_inner_epochs):
            for number in range(self.num_train_times):
                self._train_time(samples, number, repeat)

    def _train_time(self, samples: list[BaseSample], number: int, repeat: int) -> None:
        measured: list[Measured] = []
        order: list[BaseSample] = []
        for batch in self.microbatches(samples, repeat):
            with torch.no_grad():
                measured.append(self.measure(batch, self._point(batch, number, repeat)))
            order.extend(batch)
        columns = torch.cat([part.columns.cpu() for part in measured])
        of_group = over_groups(order, columns, self.group_function, self.comm).split([len(m.columns) for m in measured])
        for batch, found, rows in zip(self.microbatches(samples, repeat), measured, of_group, strict=True):
            point = self._point(batch, number, repeat)
            with self.adapter.pin():
                loss, metrics = self.loss_term(batch, point, found, rows.to(self.device))
                updated = self.backward_step(loss, metrics)
            if updated:
                self.after_update()

    def after_update(self) -> None:
        """Called after each optimizer step: where a snapshot that follows every update is moved."""

    def keep(self, velocity: LatentState | None) -> LatentState | None:
        """A velocity as it waits for the second pass: on the CPU, if that is where the samples are."""
        if velocity is None or not self.training_args.offload_samples_to_cpu:
            return velocity
        return velocity.to("cpu")

    def back(self, velocity: LatentState | None) -> LatentState | None:
        """A kept velocity on the training device."""
        return None if velocity is None else velocity.to(self.device)

    def _point(self, batch: SampleBatch, number: int, repeat: int) -> NoisedState:
        return self.noised_at(batch, number, repeat, shared_noise=self.shares_noise, shared_times=self.shares_times)
