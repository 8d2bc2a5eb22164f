"""Diffusion-DPO on stored preferences.

Wallace et al., "Diffusion Model Alignment Using Direct Preference Optimization", arXiv 2311.12908: chosen and rejected
media of a pair, the policy and the reference see one condition, one noise and one time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT
from flow_factory.data_utils.offline_plan import plan_offline_data
from flow_factory.data_utils.offline_train_data import OfflineBatch, build_offline_train_dataloader
from flow_factory.hparams import Arguments, OfflineDPOTrainingArguments
from flow_factory.objectives.dpo import dpo_loss
from flow_factory.objectives.matching import mean_square
from flow_factory.samples import Condition
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.offline.noised_arms import noised_arms


class OfflineDPOTrainer(BaseTrainer):
    """Lowers the matching error of chosen media against the reference's further than that of rejected ones."""

    paradigm: ClassVar[str] = "decoupled"
    execution_contract = OFFLINE_EXECUTION_CONTRACT
    training_args: OfflineDPOTrainingArguments

    def __init__(self, config: Arguments) -> None:
        self.stored = plan_offline_data(config)  # what is wrong with the data is said before a model loads
        super().__init__(config)

    def needs_reference(self) -> bool:
        """The loss is measured from the reference."""
        return True

    def _build_train_dataloader(self) -> tuple[Any, dict[str, Any]]:
        for line in self.stored.describe():
            self.tracker.display.line(line)
        return build_offline_train_dataloader(self.config, self.adapter, self.comm, self.stored)

    def optimize_batch(self, batch: OfflineBatch) -> None:
        """One loss term for each training time of the batch's pairs."""
        arguments = self.training_args
        condition = self.adapter.prepare_condition_state(batch.condition.to(self.device))
        times = noised_arms(
            self.adapter,
            replace(batch, condition=condition),
            arguments.time_sampling,
            seed=arguments.seed,
            data_epoch=self.progress.data_epoch,
        )
        for arms in times:
            chosen, rejected = arms["chosen"], arms["rejected"]
            with torch.no_grad(), self.reference_policy():
                chosen_ref, rejected_ref = self._errors(chosen, condition), self._errors(rejected, condition)
            with self.adapter.pin():
                chosen_error, rejected_error = self._errors(chosen, condition), self._errors(rejected, condition)
                loss, metrics = dpo_loss(chosen_error, rejected_error, chosen_ref, rejected_ref, arguments.beta)
                metrics["chosen_error"] = chosen_error.detach().mean()
                metrics["rejected_error"] = rejected_error.detach().mean()
                self.backward_step(loss, metrics)

    def _errors(self, arm: NoisedState, condition: Condition) -> Tensor:
        """Matching errors [B] under the active weights."""
        velocity = self.adapter.predict(arm.state, arm.times, condition, self.adapter.offline_guidance())
        return mean_square(velocity, arm.target)
