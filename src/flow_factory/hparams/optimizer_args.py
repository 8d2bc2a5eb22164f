"""Optimizers per trainable role, and acceleration options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import (
    Fraction,
    LRScheduler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    option,
)

_ADAMW_ONLY = ("betas",)
_MUON_ONLY = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "fallback_betas", "fallback_eps")


@dataclass
class OptimizerArguments(Section):
    """One entry of `optimizers:`, for one trainable role."""

    name: Literal["default", "generator", "fake", "surrogate"] = option(
        "default", "Role whose parameters it steps: default, or a trainer's own (generator, fake, surrogate)."
    )
    optimizer: Literal["adamw", "muon"] = option("adamw", "Update rule: adamw or muon.")
    learning_rate: PositiveFloat = option(1e-5, "Learning rate.")
    weight_decay: NonNegativeFloat = option(1e-4, "Decoupled weight decay.")
    max_grad_norm: PositiveFloat | None = option(1.0, "Gradient norm above which gradients are scaled down; null: off.")
    update_frequency: PositiveInt = option(1, "Step this role at every so many updates.")
    lr_scheduler: LRScheduler = option(
        "constant", "Learning-rate schedule over this role's optimizer steps: constant, linear or cosine."
    )
    lr_warmup_steps: NonNegativeInt = option(0, "Optimizer steps of linear warm-up.")
    betas: tuple[Fraction, Fraction] = option((0.9, 0.999), "adamw: decay of the two moments.")
    eps: PositiveFloat | None = option(None, "Added to the denominator; null: 1e-8 for adamw, 1e-7 for muon.")
    momentum: Fraction = option(0.95, "muon: momentum.")
    nesterov: bool = option(True, "muon: Nesterov momentum.")
    ns_coefficients: tuple[float, float, float] = option((3.4445, -4.7750, 2.0315), "muon: Newton-Schulz coefficients.")
    ns_steps: PositiveInt = option(5, "muon: Newton-Schulz steps.")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw", "muon: scale of the update: match_rms_adamw, or original."
    )
    fallback_betas: tuple[Fraction, Fraction] = option((0.9, 0.999), "muon: betas of AdamW for non-matrices.")
    fallback_eps: PositiveFloat = option(1e-8, "muon: eps of AdamW for non-matrices.")

    def __post_init__(self) -> None:
        if self.eps is None:
            self.eps = 1e-8 if self.optimizer == "adamw" else 1e-7
        foreign = _MUON_ONLY if self.optimizer == "adamw" else _ADAMW_ONLY
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in foreign:
            if getattr(self, name) != defaults[name]:
                raise FieldError(name, f"has no effect with optimizer {self.optimizer!r}; remove it.")


@dataclass
class SharedAcceleration(Section):
    """An option that holds in rollout and in training."""

    name: Literal["attention_backend", "torch_compile"] = option(help="Which option.")
    params: dict[str, Any] = option(factory=dict, help="Its parameters.")


@dataclass
class RolloutAcceleration(Section):
    """An option that holds in rollouts only."""

    name: Literal["diffusers_cache"] = option(help="Which option.")
    params: dict[str, Any] = option(factory=dict, help="Its parameters.")


@dataclass
class AccelerationArguments(Section):
    """The `acceleration:` section."""

    shared: list[SharedAcceleration] = option(factory=list, help="Options for rollout and training.")
    rollout: list[RolloutAcceleration] = option(
        factory=list, help="Options for rollouts only. Lossy ones are refused for coupled trainers."
    )
