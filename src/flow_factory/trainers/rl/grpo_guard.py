"""GRPO-Guard: GRPO with a centred, normalised ratio and gradients of equal size at every step.

Wang et al., "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping", arXiv
2510.22319. The loss is `objectives.grpo_guard`; everything else is GRPO's.
"""

from __future__ import annotations

from flow_factory.hparams import GRPOGuardTrainingArguments
from flow_factory.trainers.rl.grpo import CoupledTrainer


class GRPOGuardTrainer(CoupledTrainer):
    """The rollout keeps the transition means of the policy that sampled; the loss compares with them."""

    training_args: GRPOGuardTrainingArguments
