"""Arguments of GRPO-Guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.training_args._coupled import CoupledTrainingArguments, check_range_around_zero
from flow_factory.hparams.types import NonNegativeFloat, SymmetricRange, option


@dataclass
class GRPOGuardTrainingArguments(CoupledTrainingArguments):
    """GRPO-Guard (Wang et al. 2025, arXiv:2510.22319): GRPO with a normalised ratio and gradients of equal size."""

    policy_loss: ClassVar[str] = "grpo-guard"

    trainer_type: Literal["grpo-guard"] = option("grpo-guard", "Key of the trainer.")
    global_std: bool = option(
        False,
        "sum: divide by the std over the whole dataset's samples instead of the group's (published: the group's).",
    )
    clip_range: SymmetricRange = option(
        (-2e-6, 2e-6),
        "The normalised ratio is clipped to (1 + lo, 1 + hi); a number c is (-c, c). Published: 2e-6 to 4e-6. The "
        "ratio is centred and the same at every step, hence so much smaller than GRPO's.",
    )
    kl_cfg: NonNegativeFloat | None = option(
        None, "Guidance scale of the reference in the KL term; null: that of the rollout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.clip_range, "clip_range")
