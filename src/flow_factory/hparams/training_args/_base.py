"""Arguments of algorithms that train on what the model generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.hparams.types import NonNegativeFloat, PositiveInt, StorageDType, option


@dataclass
class TrainingArguments(CommonTrainingArguments):
    """Base of the arguments of generated algorithms.

    A new algorithm subclasses it with its own fields, each with `metadata={"help": ...}`, and a
    `trainer_type: Literal["my-algo"] = "my-algo"`.

    Class attributes:
        updates_take_whole_batches: Optimizer steps must divide the batches of a cycle, and not only its loss terms.
    """

    updates_take_whole_batches: ClassVar[bool] = True

    gradient_step_per_epoch: PositiveInt = option(2, "G: optimizer steps per pass over a cycle's samples.")
    gradient_accumulation_steps: PositiveInt | Literal["auto"] = option(
        "auto", "Backward passes per optimizer step; auto: batches per cycle x loss terms / gradient_step_per_epoch."
    )
    num_inner_epochs: PositiveInt = option(1, "Passes over a cycle's samples.")
    group_size: PositiveInt = option(8, "K: samples per prompt; at least 2 where advantages compare a group's members.")
    unique_sample_num_per_epoch: PositiveInt = option(8, "M: prompts per cycle over all ranks.")
    num_inference_steps: PositiveInt = option(10, "Denoising steps of the rollout.")
    guidance_scale: NonNegativeFloat = option(3.5, "Guidance scale of the rollout; models with CFG use it above 1.")
    offload_samples_to_cpu: bool = option(False, "Keep stored trajectories on the CPU between rollout and training.")
    latent_storage_dtype: StorageDType | None = option(
        "fp32",
        "dtype of stored latents: fp32 (also null), bf16 or fp16. The first ratio is exact with each: states are "
        "rounded before use.",
    )
    shuffle_samples: bool = option(True, "Shuffle a cycle's samples before they are cut into micro-batches.")

    def get_preprocess_guidance_scale(self) -> float:
        return self.guidance_scale

    def loss_terms_per_batch(self, scheduler_args: SchedulerArguments) -> int:
        """Backward passes per micro-batch: trained steps (coupled) or training times (decoupled)."""
        if self.paradigm == "coupled":
            return scheduler_args.num_trained_steps(self.num_inference_steps)
        return max(int(getattr(self, "num_train_timesteps", 1)), 1)

    def optimized_batches(self, rollout_batches: int, world_size: int) -> int:
        """Micro-batches that one pass optimises on each rank; by default those that the rollout made."""
        return rollout_batches
