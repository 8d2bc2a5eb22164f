"""DiffusionNFT: Zheng et al., "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", arXiv 2509.16117.

The old policy v_old is the policy that sampled. On-policy it is the live one at the start of the cycle; off-policy it
is a slow average, which samples and is contrasted with, frozen for the whole cycle and moved at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from flow_factory.hparams import NFTTrainingArguments
from flow_factory.objectives.nft import nft_loss
from flow_factory.samples import BaseSample, LatentState, SampleBatch
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.replay import valid_rows
from flow_factory.trainers.rl.decoupled import DecoupledTrainer

OLD = "old"


class NFTTrainer(DecoupledTrainer):
    """Fits an implicit positive and un-fits an implicit negative velocity around the old policy's."""

    training_args: NFTTrainingArguments

    def _declare_model_variants(self) -> Sequence[str]:
        return (OLD,)

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """The old policy; on-policy it equals the live one when the rollout happens."""
        return self.snapshot(OLD) if self.training_args.off_policy else super().sampling_policy()

    def optimize(self, samples: list[BaseSample]) -> None:
        """One term per micro-batch and time."""
        for repeat in range(self.training_args.num_inner_epochs):
            for batch in self.microbatches(samples, repeat):
                for point in self.noised(batch, repeat):
                    self._term(batch, point)

    def _term(self, batch: SampleBatch, point: NoisedState) -> None:
        arguments = self.training_args
        old = self._old_velocity(batch, point)
        reference = self.reference_velocity(batch, point)
        with self.adapter.pin():
            velocity = self.velocity(batch, point)
            loss, metrics = nft_loss(
                velocity,
                velocity if old is None else old,
                point.state,
                point.clean,
                point.sigmas,
                batch.advantages,
                beta=arguments.nft_beta,
                adv_clip_range=arguments.adv_clip_range,
                mask=valid_rows(batch, self.device),
            )
            loss = self.add_kl(loss, metrics, velocity, reference, weight=arguments.kl_beta)
            self.backward_step(loss, metrics)

    def _old_velocity(self, batch: SampleBatch, point: NoisedState) -> LatentState | None:
        """v_old; None while the live weights are still those of the old policy, whose forward would be the same."""
        if self.before_first_update and not self.training_args.off_policy:
            return None
        return self.frozen_velocity(self.snapshot(OLD), batch, point)

    def _after_acquisition_cycle(self) -> None:
        self.own_snapshot(OLD).update(self.training_args.old_schedule(self.step))
