"""Arguments of DiffusionNFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flow_factory.hparams.decay import PRESETS, DecaySchedule, parse_decay
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_args._coupled import check_range_around_zero
from flow_factory.hparams.training_args._decoupled import MatchingTrainingArguments
from flow_factory.hparams.types import Device, NonNegativeFloat, PositiveFloat, SymmetricRange, option


@dataclass
class NFTTrainingArguments(MatchingTrainingArguments):
    """DiffusionNFT (Zheng et al. 2025, arXiv:2509.16117): contrasts implicit positive and negative velocities."""

    trainer_type: Literal["nft"] = option("nft", "Key of the trainer.")
    nft_beta: PositiveFloat = option(
        1.0, "b: how far the implicit positive and negative policies lie from the old policy; the recipes use 1 or 0.1."
    )
    off_policy: bool = option(
        False,
        "Sample and contrast with an old policy that follows the live one by old_model_decay. false: the old policy "
        "is the live one at the start of the cycle.",
    )
    old_model_decay: str | int = option(
        1,
        "off_policy: decay of the old policy at the end of a cycle, after n optimizer steps. Preset 1: "
        "min(0.001 n, 0.5); preset 2: 0 until n = 75, then min(0.0075 (n - 75), 0.999); or start-value-slope-end.",
    )
    adv_clip_range: SymmetricRange = option((-5.0, 5.0), "Advantages are clipped to (lo, hi); a number c is (-c, c).")
    kl_type: Literal["v-based"] = option(
        "v-based", "KL to the reference. v-based: mean squared difference of velocities."
    )
    kl_beta: NonNegativeFloat = option(0.0, "Weight of the KL term; the published recipe uses 1e-4. 0: none.")
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")
        if self.off_policy and self.old_schedule.copies:
            raise FieldError(
                "old_model_decay",
                "copies the live policy every cycle, so nothing is off-policy; use preset 1 or 2, a schedule that "
                "grows (0-0.0-0.001-0.5), or off_policy: false.",
            )

    @property
    def old_schedule(self) -> DecaySchedule:
        """Decay of the old policy, moved at the end of each cycle."""
        schedule = parse_decay(self.old_model_decay, "old_model_decay")
        return schedule if self.off_policy else PRESETS[0]
