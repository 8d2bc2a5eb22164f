"""Arguments of Diffusion-DPO on stored preferences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.training_args._offline import OfflineFlowMatchingTrainingArguments
from flow_factory.hparams.types import Device, PositiveFloat, option


@dataclass
class OfflineDPOTrainingArguments(OfflineFlowMatchingTrainingArguments):
    """Diffusion-DPO (Wallace et al. 2023, arXiv:2311.12908) on stored pairs of a chosen and a rejected medium."""

    supervision: ClassVar[Literal["demonstration", "preference"] | None] = "preference"

    trainer_type: Literal["offline-dpo"] = option("offline-dpo", "Key of the trainer.")
    beta: PositiveFloat = option(
        2000.0,
        "Strength of the preference against the distance from the reference, on mean squared errors (Diffusion-DPO's "
        "scale).",
    )
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")
