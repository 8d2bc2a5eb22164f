"""Direct Group Preference Optimization: Luo et al., arXiv 2510.08425.

All members of a group are noised alike, to the same times. Their weight W = sigmoid(sum c) belongs to the complete
group; d_old comes from a fast average of the weights that follows every optimizer step, and samples after a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from flow_factory.hparams import DGPOTrainingArguments
from flow_factory.objectives.dgpo import dgpo_loss, group_weight, preference_terms
from flow_factory.objectives.matching import mean_square, predicted_clean
from flow_factory.samples import SampleBatch
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.rl.group_coupled import GroupCoupledTrainer, Measured

FAST = "fast_ema"


class DGPOTrainer(GroupCoupledTrainer):
    """Weighs each sample's matching error by its advantage and by how unsure the whole group still is."""

    training_args: DGPOTrainingArguments
    shares_times: ClassVar[bool] = True

    @property
    def shares_noise(self) -> bool:
        """One noise per group and time, unless it is switched off."""
        return self.training_args.use_shared_noise

    def _declare_model_variants(self) -> Mapping[str, str]:
        return {FAST: self.training_args.ema_ref_device}

    def needs_reference(self) -> bool:
        """For the KL term, and for the preference unless the fast average takes its place."""
        return self.training_args.kl_beta > 0 or not self.training_args.use_ema_ref

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """The live policy, later (or with `off_policy` from the start) the fast average."""
        arguments = self.training_args
        if arguments.off_policy or self.step > arguments.switch_ema_ref:
            return self.snapshot(FAST)
        return super().sampling_policy()

    def measure(self, batch: SampleBatch, point: NoisedState) -> Measured:
        """d, d_ref and d_old of each row; a policy that nothing needs is not evaluated."""
        arguments = self.training_args
        kept: dict[str, Tensor] = {}
        reference = None
        if self.needs_reference():
            reference = self.frozen_velocity(self.reference_policy(), batch, point, arguments.kl_cfg)
            kept["error_ref"] = mean_square(reference, point.target)
        if arguments.clip_dsm or arguments.use_ema_ref:
            kept["old_error"] = mean_square(self.frozen_velocity(self.snapshot(FAST), batch, point), point.target)
        error = mean_square(self.velocity(batch, point), point.target)
        error_ref = kept["old_error" if arguments.use_ema_ref else "error_ref"]
        terms = preference_terms(self._advantages(batch), error, error_ref, arguments.dpo_beta, arguments.group_size)
        return Measured(terms.unsqueeze(1), kept, self.keep(reference if arguments.kl_beta > 0 else None))

    def group_function(self, columns: Tensor) -> Tensor:
        """W, the same for all members."""
        return group_weight(columns).expand_as(columns)

    def loss_term(
        self, batch: SampleBatch, point: NoisedState, measured: Measured, of_group: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """mean W A d, and the KL term."""
        arguments = self.training_args
        velocity = self.velocity(batch, point)
        loss, cut, metrics = dgpo_loss(
            mean_square(velocity, point.target),
            self._advantages(batch),
            of_group[:, 0],
            measured.kept["old_error"] if arguments.clip_dsm else None,
            arguments.clip_range,
        )
        reference = self.back(measured.reference)
        if reference is not None and arguments.kl_type == "x-based":
            velocity = predicted_clean(point.state, velocity, point.sigmas)
            reference = predicted_clean(point.state, reference, point.sigmas)
        weight = arguments.kl_beta * torch.ones_like(cut, dtype=torch.float64)
        if arguments.clip_kl:
            weight = weight.masked_fill(cut, 0.0)
        return self.add_kl(loss, metrics, velocity, reference, weight=weight), metrics

    def _advantages(self, batch: SampleBatch) -> Tensor:
        return batch.advantages.double().clamp(*self.training_args.adv_clip_range)

    def after_update(self) -> None:
        """The fast average follows every optimizer step."""
        self.own_snapshot(FAST).update(self.training_args.fast_schedule(self.step))
