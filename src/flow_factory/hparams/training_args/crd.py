"""Arguments of Centered Reward Distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.decay import DecaySchedule, parse_decay
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_args._coupled import check_range_around_zero
from flow_factory.hparams.training_args._decoupled import MatchingTrainingArguments
from flow_factory.hparams.types import (
    Device,
    NonNegativeFloat,
    PositiveFloat,
    SymmetricRange,
    TimestepRange,
    option,
)

# KL weight of the best sample of a group is kl_beta, that of the worst is this.
ADAPTIVE_KL_FLOOR = 1e-4


@dataclass
class CRDTrainingArguments(MatchingTrainingArguments):
    """Centered Reward Distillation (Zhu et al. 2026, arXiv:2603.14128): regression of rewards, centred per prompt."""

    couples_groups: ClassVar[bool] = True

    trainer_type: Literal["crd"] = option("crd", "Key of the trainer.")
    crd_beta: PositiveFloat = option(1.0, "Factor of the policy's implicit reward that is matched to the reward.")
    crd_loss_type: Literal["mse", "bce"] = option("mse", "Regression (mse) or cross-entropy of sigmoids (bce).")
    use_old_for_loss: bool = option(
        True, "The implicit reward compares with the old policy; false: with the reference, unguided."
    )
    adaptive_logp: bool = option(True, "Divide each matching error by its (detached) mean absolute error.")
    weight_temp: float = option(
        -1.0,
        "Weights of the mean that is subtracted within a group. Below 0: uniform; above 0: softmax(R / T) and "
        "softmax(-R / T), two losses averaged; 0: the same at T = 1 over members with positive and negative advantage.",
    )
    old_model_decay: str | int = option(
        "0-0.25-0.005-0.999",
        "Decay of the old policy at the end of a cycle after n optimizer steps, start-value-slope-end: value for "
        "n < start, then min(value + (n - start) slope, end). Or a preset 0, 1, 2 as nft's.",
    )
    sampling_model_decay: str | int = option(
        "75-0.0-0.0075-0.999", "Decay of the policy that samples, in the same form."
    )
    adv_clip_range: SymmetricRange = option(
        (-5.0, 5.0), "Advantages are clipped to (lo, hi) and mapped to rewards in [0, 1]; a number c is (-c, c)."
    )
    kl_type: Literal["v-based"] = option(
        "v-based", "KL to the reference. v-based: mean squared difference of velocities."
    )
    kl_beta: NonNegativeFloat = option(0.1, "Weight of the KL term; 0: none.")
    kl_cfg: PositiveFloat = option(4.5, "Guidance scale of the reference in the KL term; up to 1: none.")
    reward_adaptive_kl: bool = option(
        True, "KL weight grows with the reward of the sample, from 1e-4 (reward 0) to kl_beta (reward 1)."
    )
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")
    timestep_range: TimestepRange = option(
        (0.0, 0.99),
        "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi). Of N steps those "
        "from int(N lo) to int(N hi) - 1.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")
        parse_decay(self.old_model_decay, "old_model_decay")
        parse_decay(self.sampling_model_decay, "sampling_model_decay")
        if self.reward_adaptive_kl and self.kl_beta < ADAPTIVE_KL_FLOOR:
            raise FieldError(
                "kl_beta",
                f"must be at least {ADAPTIVE_KL_FLOOR:g} with reward_adaptive_kl, which scales the KL weight from "
                f"{ADAPTIVE_KL_FLOOR:g} up to it; raise it, or set reward_adaptive_kl: false.",
            )

    @property
    def old_schedule(self) -> DecaySchedule:
        """Decay of the old policy of the loss."""
        return parse_decay(self.old_model_decay, "old_model_decay")

    @property
    def sampling_schedule(self) -> DecaySchedule:
        """Decay of the policy that samples."""
        return parse_decay(self.sampling_model_decay, "sampling_model_decay")

    def get_preprocess_guidance_scale(self) -> float:
        """The reference is guided only where there is a KL term."""
        return super().get_preprocess_guidance_scale() if self.kl_beta > 0 else self.guidance_scale
