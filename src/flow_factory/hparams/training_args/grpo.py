"""Arguments of Flow-GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import Paradigm
from flow_factory.hparams.types import Device, NonNegativeFloat, SymmetricRange, option


@dataclass
class GRPOTrainingArguments(TrainingArguments):
    """Flow-GRPO (Liu et al. 2025, arXiv:2505.05470): a clipped policy gradient on the rollout's SDE transitions."""

    paradigm: ClassVar[Paradigm] = "coupled"

    trainer_type: Literal["grpo"] = option("grpo", "Key of the trainer.")
    global_std: bool = option(True, "sum: divide by the std over the whole dataset's samples instead of the group's.")
    advantage_aggregation: str = option(
        "gdpo",
        "How several rewards become one advantage: sum (weighted sum, then group mean and std), gdpo (each reward "
        "normalised in its group first), a registered estimator, or a dotted path to a function.",
    )
    clip_range: SymmetricRange = option(
        (-1e-4, 1e-4),
        "The ratio is clipped to (1 + lo, 1 + hi); a number c is (-c, c). Log-probs are means over latent elements, "
        "so the ratio is much closer to 1 than one of summed log-probs and the clip range is small.",
    )
    adv_clip_range: SymmetricRange = option((-5.0, 5.0), "Advantages are clipped to (lo, hi); a number c is (-c, c).")
    kl_type: Literal["v-based", "x-based", "transition", "transition_dt"] = option(
        "x-based",
        "KL to the reference: mean squared difference of velocities (v-based) or of transition means (x-based), the "
        "exact Gaussian KL (transition), or h times that (transition_dt: Flow-GRPO's published kl_beta).",
    )
    kl_beta: NonNegativeFloat = option(0.0, "Weight of the KL term; 0: none.")
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.clip_range, "clip_range")
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")


def check_range_around_zero(value: tuple[float, float], field: str) -> None:
    """Raises a FieldError unless lo < 0 < hi."""
    low, high = value
    if not low < 0 < high:
        size = max(abs(low), abs(high)) or 1e-4
        raise FieldError(field, f"must be (lo, hi) with lo < 0 < hi, for instance [{-size}, {size}] or {size}.")
