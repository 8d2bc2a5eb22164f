"""Arguments of online Diffusion-DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flow_factory.hparams.training_args._decoupled import DecoupledTrainingArguments
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.hparams.types import Device, NonNegativeFloat, NonNegativeInt, PositiveFloat, TimestepRange, option


@dataclass
class DPOTrainingArguments(DecoupledTrainingArguments):
    """Online Diffusion-DPO (Wallace et al. 2023, arXiv:2311.12908) on the best and the worst sample of each group."""

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
    weighting_scheme: Literal["logit_normal", "uniform"] = option(
        "logit_normal", "How training times are drawn: logit_normal or uniform."
    )
    logit_mean: float = option(0.0, "logit_normal: mean before the sigmoid.")
    logit_std: PositiveFloat = option(1.0, "logit_normal: standard deviation before the sigmoid.")
    time_shift: PositiveFloat = option(1.0, "Shift k of sigma: k s / (1 + (k-1) s); larger means noisier times.")
    timestep_range: TimestepRange = option(
        (0.0, 0.99), "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi)."
    )
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    @property
    def time_sampling(self) -> TimeSampling:
        """How training times are drawn."""
        return TimeSampling(
            self.weighting_scheme,
            self.num_train_timesteps,
            self.timestep_range,
            self.time_shift,
            self.logit_mean,
            self.logit_std,
        )

    def optimized_batches(self, rollout_batches: int, world_size: int) -> int:
        """Micro-batches of pairs per pass: one pair per group, a group on one rank."""
        pairs = max(self.unique_sample_num_per_epoch // world_size, 1)
        return pairs // self.pairs_per_batch(pairs)

    def pairs_per_batch(self, pairs: int) -> int:
        """Pairs in a micro-batch: at most `per_device_batch_size` rows, and equally many in every micro-batch."""
        limit = max(self.per_device_batch_size // 2, 1)
        return max(size for size in range(1, limit + 1) if pairs % size == 0)
