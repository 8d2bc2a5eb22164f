"""Arguments of algorithms that train the transitions of the rollout: GRPO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import Paradigm
from flow_factory.hparams.types import Device, NonNegativeFloat, SymmetricRange, option


@dataclass
class CoupledTrainingArguments(TrainingArguments):
    """Base of the policy-gradient algorithms. Each names its `policy_loss`, as a field or as a constant."""

    paradigm: ClassVar[Paradigm] = "coupled"

    global_std: bool = option(True, "sum: divide by the std over the whole dataset's samples instead of the group's.")
    advantage_aggregation: str = option(
        "gdpo",
        "The advantage estimator. sum: weighted sum of the rewards, then group mean and std; gdpo: each reward "
        "normalised in its group first; rloo, best_of, rank, reinforce, per_prompt; a registered one, or a dotted path "
        "to a function.",
    )
    advantage_params: dict[str, Any] = option(factory=dict, help="Keyword parameters of the advantage estimator.")
    adv_clip_range: SymmetricRange = option((-5.0, 5.0), "Advantages are clipped to (lo, hi); a number c is (-c, c).")
    noise_weighting: Literal["none", "tempflow"] = option(
        "none",
        "Weight of each step's policy term. none: 1; tempflow: q / mean q, so that noisy early steps count more "
        "(TempFlow-GRPO).",
    )
    share_initial_noise: bool = option(
        False,
        "All samples of a group start from the same noise. The steps before the first stochastic one are then the same "
        "for all of them and are evaluated once per prompt.",
    )
    kl_type: Literal["v-based", "x-based", "transition", "transition_dt"] = option(
        "x-based",
        "KL to the reference: mean squared difference of velocities (v-based) or of transition means (x-based), the "
        "exact Gaussian KL (transition), or h times that (transition_dt: Flow-GRPO's published kl_beta).",
    )
    kl_beta: NonNegativeFloat = option(0.0, "Weight of the KL term; 0: none.")
    ref_param_device: Device = option("auto", "Device that holds reference weights when they are a separate copy.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range_around_zero(self.adv_clip_range, "adv_clip_range")
        if self.reference_guidance is not None and self.kl_beta == 0:
            name = "kl_cfg" if hasattr(self, "kl_cfg") else "kl_guidance_scale"
            raise FieldError(name, "has no effect with kl_beta 0; set kl_beta, or remove it.")

    @property
    def reference_guidance(self) -> float | None:
        """Guidance scale of the reference in the KL term; None: that of the rollout."""
        return getattr(self, "kl_cfg", None)

    def get_preprocess_guidance_scale(self) -> float:
        """Negative conditions are also needed where only the reference is guided."""
        return max(self.guidance_scale, self.reference_guidance or 0.0)


def check_range_around_zero(value: tuple[float, float], field: str) -> None:
    """Raises a FieldError unless lo < 0 < hi."""
    low, high = value
    if not low < 0 < high:
        size = max(abs(low), abs(high)) or 1e-4
        raise FieldError(field, f"must be (lo, hi) with lo < 0 < hi, for instance [{-size}, {size}] or {size}.")
