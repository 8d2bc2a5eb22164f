"""Arguments of algorithms that train on stored examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT, ExecutionContract
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.hparams.training_args._free_times import FreeTimes, check_timestep_range
from flow_factory.hparams.types import PositiveInt, option


@dataclass
class OfflineFlowMatchingTrainingArguments(FreeTimes, CommonTrainingArguments):
    """Base of the arguments of dataset algorithms (flow matching on stored media).

    Class attributes:
        supervision: The type of records in the offline schema that the algorithm learns from, which are then checked
            before a model loads; None for a trainer that reads data of its own.
    """

    execution_contract: ClassVar[ExecutionContract] = OFFLINE_EXECUTION_CONTRACT
    supervision: ClassVar[Literal["demonstration", "preference"] | None] = None

    max_epochs: PositiveInt | None = option(1, "Passes over the dataset; null: until stopped.")
    gradient_accumulation_steps: PositiveInt = option(
        1, "Batches per optimizer step; it must divide the batches of a rank, since no window is left unfinished."
    )
    image_sizing: Literal["crop", "buckets"] = option(
        "crop",
        "How stored pictures reach a common size. crop: scaled to cover resolution and cut around the middle; buckets: "
        "the same, to the size of about that area whose aspect ratio is nearest (a batch has one size).",
    )
    num_train_timesteps: PositiveInt = option(
        1, "Training times per example and visit, stratified; each is a forward and a backward pass."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timestep_range(self.timestep_range)

    def loss_terms_per_batch(self, scheduler_args: SchedulerArguments) -> int:
        """Backward passes per batch: its training times."""
        return self.num_train_timesteps
