"""Arguments of Flow-DPPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.training_args._coupled import CoupledTrainingArguments
from flow_factory.hparams.types import NonNegativeFloat, PositiveFloat, option


@dataclass
class DPPOTrainingArguments(CoupledTrainingArguments):
    """Flow-DPPO (Ping et al. 2026, arXiv:2606.11025): a trust region by the divergence of a step, not by its ratio."""

    policy_loss: ClassVar[str] = "dppo"

    trainer_type: Literal["dppo"] = option("dppo", "Key of the trainer.")
    kl_guidance_scale: NonNegativeFloat | None = option(
        None, "Guidance scale of the reference in the KL term; null: that of the rollout."
    )
    kl_mask_type: Literal["v-based", "x-based"] = option(
        "x-based",
        "Divergence of the step from the policy that sampled. x-based: the exact KL per element; v-based: mean squared "
        "difference of velocities.",
    )
    kl_mask_threshold: PositiveFloat = option(
        1e-6,
        "Divergence from which on a sample is pushed no further away. Published: 1e-5 (x-based, Flow-SDE), 1e-6 "
        "(v-based, CPS).",
    )

    @property
    def reference_guidance(self) -> float | None:
        """Guidance scale of the reference in the KL term; None: that of the rollout."""
        return self.kl_guidance_scale
