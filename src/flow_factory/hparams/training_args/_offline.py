"""Arguments of algorithms that train on stored examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT, ExecutionContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.hparams.types import PositiveFloat, PositiveInt, TimestepRange, option


@dataclass
class OfflineFlowMatchingTrainingArguments(CommonTrainingArguments):
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
    weighting_scheme: Literal["logit_normal", "uniform"] = option(
        "logit_normal", "How training times are drawn: logit_normal or uniform."
    )
    logit_mean: float = option(0.0, "logit_normal: mean before the sigmoid.")
    logit_std: PositiveFloat = option(1.0, "logit_normal: standard deviation before the sigmoid.")
    time_shift: PositiveFloat = option(1.0, "Shift k of sigma: k s / (1 + (k-1) s); larger means noisier times.")
    timestep_range: TimestepRange = option(
        (0.0, 0.99), "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timestep_range(self.timestep_range)

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

    def loss_terms_per_batch(self, scheduler_args: SchedulerArguments) -> int:
        """Backward passes per batch: its training times."""
        return self.num_train_timesteps


def check_timestep_range(value: tuple[float, float], field: str = "timestep_range") -> None:
    """Raises a FieldError unless 0 <= lo < hi <= 1."""
    low, high = value
    if not 0 <= low < high <= 1:
        raise FieldError(field, "must be fractions 0 <= lo < hi <= 1 of the axis from noise to data.")
