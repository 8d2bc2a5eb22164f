"""Flow-GRPO: clipped policy gradients over the transitions of an SDE sampler.

Liu et al., "Flow-GRPO: Training Flow Matching Models via Online RL", arXiv 2505.05470. The dynamics may be any SDE of
`scheduler.dynamics`: Dance-SDE gives DanceGRPO (arXiv 2505.07818), a sliding window gives MixGRPO (arXiv 2507.21802).
The loss of a step is a function from the registry of policy losses; GRPO-Guard and Flow-DPPO are this trainer with
another one.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from flow_factory.contracts import ONLINE_EXECUTION_CONTRACT
from flow_factory.hparams import GRPOTrainingArguments
from flow_factory.models.step import StepOutput
from flow_factory.objectives.bound import PolicyLoss
from flow_factory.objectives.kl import kl_penalty
from flow_factory.samples import BaseSample, SampleBatch
from flow_factory.samples.reductions import active_count, combine_row_means
from flow_factory.scheduler.windows import noise_weights
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.functions import build_policy_loss
from flow_factory.trainers.replay import Transition, policy_step, valid_rows


class CoupledTrainer(BaseTrainer):
    """Samples groups with log-probabilities, scores them, and replays the stochastic steps under the new policy.

    Its arguments are `CoupledTrainingArguments`, whose `policy_loss` says what is minimised.
    """

    paradigm: ClassVar[str] = "coupled"
    execution_contract = ONLINE_EXECUTION_CONTRACT

    @functools.cached_property
    def objective(self) -> PolicyLoss:
        """The policy loss that the arguments name; what it needs decides what the rollout keeps."""
        return build_policy_loss(self.config)

    def sample(self) -> list[BaseSample]:
        """One rollout of the cycle's prompts; only the states around stochastic steps are kept."""
        return self.generate_samples(
            reward_buffer=self.reward_buffer,
            compute_log_prob=True,
            trajectory_indices=self.replay_indices(),
            stores=self.objective.stores,
        )

    def optimize(self, samples: list[BaseSample]) -> None:
        """`gradient_step_per_epoch` updates for each inner epoch."""
        by_sequence = "sequence_log_ratio" in self.objective.needs
        for repeat in range(self.training_args.num_inner_epochs):
            for batch in self.microbatches(samples, repeat):
                sequence: Tensor | None = None
                for transition in self.replay(batch):
                    if by_sequence and (sequence is None or self.at_update_boundary):  # the weights have changed
                        sequence = self.sequence_log_ratio(batch)
                    # The reference goes first: no variant may be switched while a graph waits for its backward.
                    reference = self.reference_forward(batch, transition)
                    with self.adapter.pin():
                        loss, metrics = self.step_loss(batch, transition, reference, sequence)
                        self.backward_step(loss, metrics)

    def reference_forward(self, batch: SampleBatch, transition: Transition) -> StepOutput | None:
        """The transition under the reference policy, or None if there is no KL term."""
        if self.training_args.kl_beta == 0:
            return None
        with torch.no_grad(), self.reference_policy():
            return self.replay_forward(batch, transition, self.training_args.reference_guidance)

    @torch.no_grad()
    def sequence_log_ratio(self, batch: SampleBatch) -> Tensor:
        """Mean of l - l_old over the trained steps of each sample under the present weights, [B]."""
        ratios: list[Tensor] = []
        for transition in self.replay(batch):
            log_prob = self.replay_forward(batch, transition).log_prob
            assert log_prob is not None
            ratios.append(log_prob - transition.old_log_prob)
        return torch.stack(ratios).mean(dim=0)

    def step_loss(
        self,
        batch: SampleBatch,
        transition: Transition,
        reference: StepOutput | None,
        sequence: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss of one transition of one micro-batch: the policy term, and the KL term if there is a reference."""
        policy = self.replay_forward(batch, transition)
        loss, metrics = self.policy_loss(batch, transition, policy, sequence)
        loss = self.step_weights[transition.index] * loss
        if reference is not None:
            kl = self._kl(policy, reference).mean()
            loss = loss + self.training_args.kl_beta * kl.to(loss.dtype)
            metrics["kl"] = kl.detach()
        return loss, metrics

    def policy_loss(
        self, batch: SampleBatch, transition: Transition, policy: StepOutput, sequence: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The policy term of one transition."""
        step = policy_step(transition, policy, self.rollout_plan.dynamics, sequence)
        advantages = batch.advantages.clamp(*self.training_args.adv_clip_range)
        return self.objective(step, advantages, valid_rows(batch, self.device))

    @functools.cached_property
    def step_weights(self) -> list[float]:
        """Factor of each step's policy term (`train.noise_weighting`)."""
        grid = self.rollout_plan.grid
        if self.training_args.noise_weighting == "none":
            return [1.0] * grid.length
        scheduler = self.config.scheduler_args
        return noise_weights(scheduler.dynamics_type, grid.primary, scheduler.noise_level).tolist()

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


class GRPOTrainer(CoupledTrainer):
    """Flow-GRPO, or what `train.policy_loss` makes of it."""

    training_args: GRPOTrainingArguments
