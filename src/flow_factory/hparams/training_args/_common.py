"""What all training arguments share: length, optimiser, seeds, EMA, resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from flow_factory.contracts import ONLINE_EXECUTION_CONTRACT, ExecutionContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.run_args import settle_resolution
from flow_factory.hparams.types import (
    Device,
    Fraction,
    LRScheduler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Resolution,
    Section,
    option,
)

if TYPE_CHECKING:
    TrainerKey = Any  # so that a subclass may narrow the field to a Literal
else:
    TrainerKey = str

Paradigm = Literal["coupled", "decoupled", "distillation"]


@dataclass
class CommonTrainingArguments(Section):
    """Fields of the `train:` section for every trainer.

    Class attributes:
        execution_contract: Where a cycle's examples come from and what judges them; not settable from YAML.
        paradigm: "coupled" trainers need SDE transition densities; "decoupled" ones noise final latents again.
        required_trainable_roles: Live copies that are trained, in order; the first owns the base routes.
        smallest_micro_batch: Rows that a forward must have at least; 2 where pairs are compared.
    """

    execution_contract: ClassVar[ExecutionContract] = ONLINE_EXECUTION_CONTRACT
    paradigm: ClassVar[Paradigm] = "decoupled"
    required_trainable_roles: ClassVar[tuple[str, ...]] = ("default",)
    smallest_micro_batch: ClassVar[int] = 1

    trainer_type: TrainerKey = option(
        "grpo", "Key of the trainer (`flow-factory list trainers`), or a dotted path to a class."
    )
    resolution: Resolution = option((512, 512), "Height and width of the samples, or one number for both.")
    height: PositiveInt | None = option(None, "Overrides the height of resolution.")
    width: PositiveInt | None = option(None, "Overrides the width of resolution.")
    max_epochs: PositiveInt | None = option(
        None, "Stop after so many cycles (data epochs offline); null: until stopped."
    )
    max_steps: PositiveInt | None = option(
        None,
        "Stop after the cycle that reaches so many optimizer steps (offline: at that step); null: no such limit.",
    )
    per_device_batch_size: PositiveInt = option(1, "B: samples generated and trained together on one device.")
    max_grad_norm: PositiveFloat | None = option(1.0, "Gradient norm above which gradients are scaled down; null: off.")
    seed: int = option(42, "Seed of everything that is drawn.")
    learning_rate: PositiveFloat = option(1e-5, "Learning rate (short form of `optimizers:` for a single role).")
    adam_weight_decay: NonNegativeFloat = option(1e-4, "Decoupled weight decay of AdamW.")
    adam_betas: tuple[Fraction, Fraction] = option((0.9, 0.999), "Decay of AdamW's two moments.")
    adam_epsilon: PositiveFloat = option(1e-8, "Epsilon of AdamW.")
    lr_scheduler: LRScheduler = option(
        "constant", "Learning-rate schedule: constant, linear or cosine; the last two need max_steps or max_epochs."
    )
    lr_warmup_steps: NonNegativeInt = option(0, "Optimizer steps of linear warm-up.")
    enable_gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = option(0.995, "Decay of the averaged weights; 0: no EMA.")
    ema_update_interval: PositiveInt = option(10, "Optimizer steps between two EMA updates.")
    ema_device: Device = option("auto", "Device that holds the EMA weights; auto: that of the model.")
    ema_decay_schedule: Literal["constant", "power", "linear", "piecewise_linear", "cosine", "warmup_cosine"] = option(
        "power",
        "How the decay grows to ema_decay over the updates. constant: ema_decay at once; power: at most (1 + n) / "
        "(10 + n) at update n; linear (piecewise_linear) and cosine (warmup_cosine): from 0, in 100 updates.",
    )
    reference: Literal["base", "start"] = option(
        "base",
        "Reference policy of KL terms. base: the pretrained weights; start: the weights at the start of the run.",
    )
    resume: str = option(
        "auto",
        "auto: go on from the newest checkpoint of the run's folder if there is one; never: always start anew; or the "
        "path of a checkpoint.",
    )
    signal_deadline_s: NonNegativeFloat = option(
        30.0, "Seconds that an optimisation phase may take to finish after SIGINT or SIGTERM before it is dropped."
    )

    def __post_init__(self) -> None:
        settle_resolution(self)
        if not self.resume.strip():
            raise FieldError("resume", "is empty; write auto, never or the path of a checkpoint.")

    def get_preprocess_guidance_scale(self) -> float:
        """The largest guidance scale that rollout or optimisation use; above 1, negative conditions get encoded."""
        return 1.0
