"""Flow-DPPO: a trust region by the divergence of each step from the policy that sampled, in place of a ratio clip.

Ping et al., "Flow-DPPO: Divergence Proximal Policy Optimization for Flow Matching Models", arXiv 2606.11025. The loss
is `objectives.dppo`; everything else is GRPO's.
"""

from __future__ import annotations

from flow_factory.hparams import DPPOTrainingArguments
from flow_factory.trainers.rl.grpo import CoupledTrainer


class DPPOTrainer(CoupledTrainer):
    """The rollout keeps the transition means, or the velocities, of the policy that sampled."""

    training_args: DPPOTrainingArguments
