"""Arguments of online Diffusion-DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.training_args._decoupled import DecoupledTrainingArguments
from flow_factory.hparams.training_args._free_times import FreeTimes
from flow_factory.hparams.types import Device, NonNegativeFloat, NonNegativeInt, PositiveFloat, option


@dataclass
class DPOTrainingArguments(FreeTimes, DecoupledTrainingArguments):
    """Online Diffusion-DPO (Wallace et al. 2023, arXiv:2311.12908) on the best and the worst sample of each group."""

    smallest_micro_batch: ClassVar[int] = 2

    trainer_type: Literal["dpo"] = option("dpo", "Key of the trainer.")
    guidance_scale: NonNegativeFloat = option(
        4.5, "Guidance scale of the rollout (the published recipe's). The loss is unguided."
    )
    beta: PositiveFloat = option(
        2000.0,
        "Strength of the preference against the distance from the reference, on mean squared errors (Diffusion-DPO's "
        "scale). The published online recipe for SD3.5-M uses 100.",
    )
    num_train_timesteps: NonNegativeInt = option(
        1, "Training times per pair; 0: as many as timestep_range holds of the rollout's steps."
    )
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    def optimized_batches(self, rollout_batches: int, world_size: int) -> int:
        """Micro-batches of pairs per pass: one pair per group, a group on one rank."""
        pairs = max(self.unique_sample_num_per_epoch // world_size, 1)
        return pairs // self.pairs_per_batch(pairs)

    def pairs_per_batch(self, pairs: int) -> int:
        """Pairs in a micro-batch: at most `per_device_batch_size` rows, and equally many in every micro-batch."""
        limit = max(self.per_device_batch_size // 2, 1)
        return max(size for size in range(1, limit + 1) if pairs % size == 0)
