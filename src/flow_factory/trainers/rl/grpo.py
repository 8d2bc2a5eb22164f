"""Flow-GRPO: clipped policy gradients over the transitions of an SDE sampler.

Liu et al., "Flow-GRPO: Training Flow Matching Models via Online RL", arXiv 2505.05470. The dynamics may be any SDE of
`scheduler.dynamics`: Dance-SDE gives DanceGRPO (arXiv 2505.07818), a sliding window gives MixGRPO (arXiv 2507.21802).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flow_factory.contracts import ONLINE_EXECUTION_CONTRACT
from flow_factory.hparams import GRPOTrainingArguments
from flow_factory.models.step import StepOutput
from flow_factory.objectives.grpo import grpo_loss
from flow_factory.objectives.kl import kl_penalty
from flow_factory.samples import BaseSample, SampleBatch
from flow_factory.samples.reductions import active_count, combine_row_means
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.replay import Transition


class GRPOTrainer(BaseTrainer):
    """Samples groups with log-probabilities, scores them, and replays the stochastic steps under the new policy."""

    paradigm: ClassVar[str] = "coupled"
    execution_contract = ONLINE_EXECUTION_CONTRACT
    training_args: GRPOTrainingArguments

    def sample(self) -> list[BaseSample]:
        """One rollout of the cycle's prompts; only the states around stochastic steps are kept."""
        return self.generate_samples(
            reward_buffer=self.reward_buffer, compute_log_prob=True, trajectory_indices=self.replay_indices()
        )

    def optimize(self, samples: list[BaseSample]) -> None:
        """`gradient_step_per_epoch` updates for each inner epoch."""
        for repeat in range(self.training_args.num_inner_epochs):
            for batch in self.microbatches(samples, repeat):
                for transition in self.replay(batch):
                    # The reference goes first: no variant may be switched while a graph waits for its backward.
                    reference = self.reference_forward(batch, transition)
                    with self.adapter.pin():
                        loss, metrics = self.step_loss(batch, transition, reference)
                        self.backward_step(loss, metrics)

    def reference_forward(self, batch: SampleBatch, transition: Transition) -> StepOutput | None:
        """The transition under the reference policy, or None if there is no KL term."""
        if self.training_args.kl_beta == 0:
            return None
        with torch.no_grad(), self.reference_policy():
            return self.replay_forward(batch, transition)

    def step_loss(
        self, batch: SampleBatch, transition: Transition, reference: StepOutput | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one transition of one micro-batch: the policy term, and the KL term if there is a reference."""
        policy = self.replay_forward(batch, transition)
        loss, metrics = self.policy_loss(batch, transition, policy)
        if reference is not None:
            kl = self._kl(policy, reference).mean()
            loss = loss + self.training_args.kl_beta * kl.to(loss.dtype)
            metrics["kl"] = kl.detach()
        return loss, metrics

    def policy_loss(
        self, batch: SampleBatch, transition: Transition, policy: StepOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy term; GRPO-Guard and DPPO differ from GRPO here and nowhere else."""
        assert policy.log_prob is not None
        advantages = batch.advantages.clamp(*self.training_args.adv_clip_range)
        return grpo_loss(policy.log_prob, transition.old_log_prob, advantages, self.training_args.clip_range)

    def _kl(self, policy: StepOutput, reference: StepOutput) -> Tensor:
        """KL estimate per row [B]; components of a joint model are weighted by their element counts."""
        terms = [
            kl_penalty(
                self.training_args.kl_type,
                velocity=velocity,
                velocity_ref=reference.velocity[name],
                mean=policy.mean[name],
                mean_ref=reference.mean[name],
                std=policy.std[name],
                diffusion=policy.diffusion[name],
                mask=policy.velocity.masks.get(name),
            )
            for name, velocity in policy.velocity.items()
        ]
        return combine_row_means(
            terms, [active_count(v, policy.velocity.masks.get(n)) for n, v in policy.velocity.items()]
        )
