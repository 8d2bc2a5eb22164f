"""Arguments of Flow-GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flow_factory.hparams.training_args._coupled import CoupledTrainingArguments, check_range_around_zero
from flow_factory.hparams.types import NonNegativeFloat, SymmetricRange, option


@dataclass
class GRPOTrainingArguments(CoupledTrainingArguments):
    """Flow-GRPO (Liu et al. 2025, arXiv:2505.05470): a clipped policy gradient on the rollout's SDE transitions."""

    trainer_type: Literal["grpo"] = option("grpo", "Key of the trainer.")
    clip_range: SymmetricRange = option(
        (-1e-4, 1e-4),
        "The ratio is clipped to (1 + lo, 1 + hi); a number c is (-c, c). Log-probs are means over latent elements, "
        "so the ratio is much closer to 1 than one of summed log-probs and the clip range is small.",
    )
    policy_loss: str = option(
        "grpo",
        "The loss of a step. grpo: PPO's clip; gspo: the clip on the ratio of the whole trajectory; reinforce: no "
        "ratio; grpo-guard, dppo: the losses of those trainers (with this clip_range; published for guard: 2e-6); a "
        "registered one, or a dotted path to a function.",
    )
    policy_loss_params: dict[str, Any] = option(factory=dict, help="Keyword parameters of the policy loss.")
    kl_cfg: NonNegativeFloat | None = option(
        None, "Guidance scale of the reference in the KL term; null: that of the rollout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.clip_range, "clip_range")


__all__ = ["GRPOTrainingArguments", "check_range_around_zero"]
