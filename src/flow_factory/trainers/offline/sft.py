"""Supervised fine-tuning: flow matching on stored demonstrations.

Lipman et al., "Flow Matching for Generative Modeling", arXiv 2210.02747.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT
from flow_factory.data_utils.offline_plan import plan_offline_data
from flow_factory.data_utils.offline_train_data import OfflineBatch, build_offline_train_dataloader
from flow_factory.hparams import Arguments, SFTTrainingArguments
from flow_factory.objectives.flow_matching import flow_matching_loss
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.offline.noised_arms import noised_arms


class SFTTrainer(BaseTrainer):
    """Draws the velocity towards the one that leads back to each demonstration."""

    paradigm: ClassVar[str] = "decoupled"
    execution_contract = OFFLINE_EXECUTION_CONTRACT
    training_args: SFTTrainingArguments

    def __init__(self, config: Arguments) -> None:
        self.stored = plan_offline_data(config)  # what is wrong with the data is said before a model loads
        super().__init__(config)

    def _build_train_dataloader(self) -> tuple[Any, dict[str, Any]]:
        for line in self.stored.describe():
            self.tracker.display.line(line)
        return build_offline_train_dataloader(self.config, self.adapter, self.comm, self.stored)

    def optimize_batch(self, batch: OfflineBatch) -> None:
        """One loss term for each training time of the batch."""
        arguments, adapter = self.training_args, self.adapter
        condition = adapter.prepare_condition_state(batch.condition.to(self.device))
        times = noised_arms(
            adapter,
            replace(batch, condition=condition),
            arguments.time_sampling,
            seed=arguments.seed,
            data_epoch=self.progress.data_epoch,
        )
        for arms in times:
            noised = arms["target"]
            with adapter.pin():
                velocity = adapter.predict(noised.state, noised.times, condition, adapter.offline_guidance())
                self.backward_step(*flow_matching_loss(velocity, noised.target, noised.sigma))
