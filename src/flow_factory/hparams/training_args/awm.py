"""Arguments of Advantage Weighted Matching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from flow_factory.hparams.training_args._coupled import check_range_around_zero
from flow_factory.hparams.training_args._decoupled import MatchingTrainingArguments
from flow_factory.hparams.types import Device, NonNegativeFloat, SymmetricRange, option


@dataclass
class AWMTrainingArguments(MatchingTrainingArguments):
    """Advantage Weighted Matching (Xue et al. 2025, arXiv:2509.25050): PPO on matching errors as log-probabilities."""

    trainer_type: Literal["awm"] = option("awm", "Key of the trainer.")
    awm_weighting: Literal["Uniform", "t", "t**2", "huber", "ghuber"] = option(
        "Uniform",
        "Pseudo log-prob of a sample with matching error m at noise level s: -m (Uniform), -s m (t), -s^2 m (t**2), "
        "-s sqrt(m) (huber) or -s m^p / p (ghuber, p = ghuber_power).",
    )
    ghuber_power: Annotated[float, Field(gt=0, le=1)] = option(0.25, "ghuber: power p.")
    clip_range: SymmetricRange = option(
        (-1e-4, 1e-4),
        "The ratio of pseudo log-probs is clipped to (1 + lo, 1 + hi); a number c is (-c, c). With one update per "
        "cycle the ratio is 1 and the clip never binds (recipes: 1).",
    )
    adv_clip_range: SymmetricRange = option(
        (-5.0, 5.0), "Advantages are clipped to (lo, hi) and divided by the larger bound; a number c is (-c, c)."
    )
    off_policy: bool = option(False, "Sample with the fast average of the weights (decay min(0.001 n, 0.3)).")
    kl_type: Literal["v-based"] = option(
        "v-based", "KL to the reference. v-based: mean squared difference of velocities."
    )
    kl_beta: NonNegativeFloat = option(0.0, "Weight of the KL term to the reference; 0: none.")
    ema_kl_beta: NonNegativeFloat = option(
        0.0, "Weight of the KL term to the fast average of the weights, which moves at the end of a cycle; 0: none."
    )
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.clip_range, "clip_range")
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")

    @property
    def needs_fast_ema(self) -> bool:
        """Whether the fast average is kept at all."""
        return self.off_policy or self.ema_kl_beta > 0
