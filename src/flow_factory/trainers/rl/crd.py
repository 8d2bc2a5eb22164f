"""Centered Reward Distillation: Zhu et al., arXiv 2603.14128.

The implicit reward of the policy, relative to an old policy, is regressed on the external reward; both are centred
within the prompt's group. Two snapshots move at the end of a cycle: the old policy of the loss, and the policy that
samples, which the paper decouples from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flow_factory.hparams import CRDTrainingArguments
from flow_factory.hparams.training_args.crd import ADAPTIVE_KL_FLOOR
from flow_factory.objectives.crd import (
    adaptive_kl_weights,
    centred,
    crd_loss,
    implicit_reward,
    normalised_error,
)
from flow_factory.objectives.matching import advantage_bound, mean_absolute, mean_square, unit_reward
from flow_factory.samples import LatentState, SampleBatch
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.replay import valid_rows
from flow_factory.trainers.rl.group_coupled import GroupCoupledTrainer, Measured

OLD = "old"
SAMPLING = "sampling"


class CRDTrainer(GroupCoupledTrainer):
    """Matches the policy's centred implicit reward to the centred external one."""

    training_args: CRDTrainingArguments

    def _declare_model_variants(self) -> Sequence[str]:
        return (OLD, SAMPLING) if self.training_args.use_old_for_loss else (SAMPLING,)

    def needs_reference(self) -> bool:
        """For the KL term, and for the loss unless the old policy serves it."""
        return self.training_args.kl_beta > 0 or not self.training_args.use_old_for_loss

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """Its own snapshot."""
        return self.snapshot(SAMPLING)

    def measure(self, batch: SampleBatch, point: NoisedState) -> Measured:
        """r_theta, R, A and whether it was scored of each row, and what the loss needs of the frozen policies."""
        arguments = self.training_args
        policy = self.snapshot(OLD) if arguments.use_old_for_loss else self.reference_policy()
        error_old = self._error(self.frozen_velocity(policy, batch, point), point)
        reference = self.reference_velocity(batch, point, arguments.kl_cfg)
        error = self._error(self.velocity(batch, point), point)
        rewards = unit_reward(batch.advantages, arguments.adv_clip_range)
        scored = valid_rows(batch, self.device)
        columns = [implicit_reward(error, error_old), rewards, batch.advantages.double(), scored.double()]
        return Measured(torch.stack(columns, dim=1), {"error_old": error_old}, self.keep(reference))

    def group_function(self, columns: Tensor) -> Tensor:
        """Means of r_theta, and centred R."""
        implicit, rewards, advantages, scored = columns.unbind(dim=1)
        return centred(implicit, rewards, advantages, self.training_args.weight_temp, scored.bool())

    def loss_term(
        self, batch: SampleBatch, point: NoisedState, measured: Measured, of_group: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The regression of centred rewards, and the KL term to the guided reference."""
        arguments = self.training_args
        velocity = self.velocity(batch, point)
        implicit = implicit_reward(self._error(velocity, point), measured.kept["error_old"])
        loss, metrics = crd_loss(
            implicit,
            of_group,
            beta=arguments.crd_beta,
            bound=advantage_bound(arguments.adv_clip_range),
            loss_type=arguments.crd_loss_type,
            mask=valid_rows(batch, self.device),
        )
        weight: float | Tensor = arguments.kl_beta
        if arguments.reward_adaptive_kl:
            rewards = unit_reward(batch.advantages, arguments.adv_clip_range)
            weight = weight * adaptive_kl_weights(rewards, arguments.kl_beta, ADAPTIVE_KL_FLOOR)
        return self.add_kl(loss, metrics, velocity, self.back(measured.reference), weight=weight), metrics

    def _error(self, velocity: LatentState, point: NoisedState) -> Tensor:
        error = mean_square(velocity, point.target)
        if not self.training_args.adaptive_logp:
            return error
        return normalised_error(error, mean_absolute(velocity, point.target), adaptive=True)

    def _after_acquisition_cycle(self) -> None:
        arguments = self.training_args
        self.own_snapshot(SAMPLING).update(arguments.sampling_schedule(self.step))
        if arguments.use_old_for_loss:
            self.own_snapshot(OLD).update(arguments.old_schedule(self.step))
