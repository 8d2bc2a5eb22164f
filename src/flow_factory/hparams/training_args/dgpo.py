"""Arguments of Direct Group Preference Optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flow_factory.hparams.decay import DecaySchedule
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_args._coupled import check_range_around_zero
from flow_factory.hparams.training_args._decoupled import MatchingTrainingArguments
from flow_factory.hparams.types import (
    Device,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SymmetricRange,
    TimestepRange,
    option,
)


@dataclass
class DGPOTrainingArguments(MatchingTrainingArguments):
    """Direct Group Preference Optimization (Luo et al. 2025, arXiv:2510.08425): DPO between halves of a group."""

    couples_groups: ClassVar[bool] = True
    distinct_times: ClassVar[bool] = True

    trainer_type: Literal["dgpo"] = option("dgpo", "Key of the trainer.")
    global_std: bool = option(False, "sum: divide by the std over the whole dataset's samples instead of the group's.")
    guidance_scale: NonNegativeFloat = option(
        4.5, "Guidance scale of the rollout (published: 4.5, or 1 with kl_cfg 4.5). The policy's loss is unguided."
    )
    dpo_beta: PositiveFloat = option(
        100.0, "Strength of the group preference, divided by group_size. Published: 100 (PickScore 10)."
    )
    use_shared_noise: bool = option(True, "One noise per group and time instead of one per sample and time.")
    clip_dsm: bool = option(
        True, "Cut the gradient of samples whose ratio exp(d_old - d) to the fast average has left clip_range."
    )
    clip_kl: bool = option(False, "Cut also the KL gradient of those samples.")
    clip_range: SymmetricRange = option(
        (-1e-4, 1e-4), "clip_dsm: the range (1 + lo, 1 + hi) of that ratio; a number c is (-c, c)."
    )
    adv_clip_range: SymmetricRange = option((-5.0, 5.0), "Advantages are clipped to (lo, hi); a number c is (-c, c).")
    switch_ema_ref: NonNegativeInt = option(
        200, "Optimizer steps after which the fast average samples instead of the live policy."
    )
    off_policy: bool = option(False, "The fast average samples from the first cycle on.")
    use_ema_ref: bool = option(False, "The fast average replaces the reference in the preference (not in the KL).")
    ema_ref_max_decay: Annotated[float, Field(ge=0, lt=1)] = option(0.3, "Largest decay of the fast average.")
    ema_ref_ramp_rate: NonNegativeFloat = option(
        0.001, "Its decay after n optimizer steps is min(ema_ref_ramp_rate n, ema_ref_max_decay)."
    )
    ema_ref_device: Device = option("auto", "Device that holds the fast average when it is a separate copy.")
    kl_type: Literal["v-based", "x-based"] = option(
        "v-based",
        "KL to the reference. v-based: mean squared difference of velocities; x-based: of predicted clean latents.",
    )
    kl_beta: NonNegativeFloat = option(0.0, "Weight of the KL term; 0: none.")
    kl_cfg: PositiveFloat = option(1.0, "Guidance scale of the reference, in preference and KL; up to 1: none.")
    timestep_range: TimestepRange = option(
        (0.0, 0.6),
        "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi). Of N steps those "
        "from int(N lo) to int(N hi) - 1.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.clip_range, "clip_range")
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")
        if self.clip_range[0] <= -1:
            raise FieldError("clip_range", "has no ratio below its lower bound; use lo > -1, for instance 1e-2.")
        if self.kl_cfg > 1 and self.use_ema_ref and self.kl_beta == 0:
            raise FieldError(
                "kl_cfg", "guides a reference that nothing uses, with use_ema_ref and kl_beta 0; use 1, or set kl_beta."
            )
        if self.clip_kl and not self.clip_dsm:
            raise FieldError("clip_kl", "cuts what clip_dsm cuts, which is off; set clip_dsm: true or clip_kl: false.")

    @property
    def fast_schedule(self) -> DecaySchedule:
        """Decay of the fast average, moved at every optimizer step."""
        return DecaySchedule(0, 0.0, self.ema_ref_ramp_rate, self.ema_ref_max_decay)
