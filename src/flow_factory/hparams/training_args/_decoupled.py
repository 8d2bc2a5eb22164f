"""Arguments of algorithms that noise the final latents again instead of replaying the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import Paradigm
from flow_factory.hparams.training_args._free_times import check_timestep_range
from flow_factory.hparams.training_times import TimeSampling, TimeStrategy
from flow_factory.hparams.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TimestepRange,
    option,
)


@dataclass
class DecoupledTrainingArguments(TrainingArguments):
    """Base of the decoupled algorithms. Rollouts may be deterministic: no transition density is needed.

    Class attributes:
        couples_groups: The loss of one sample depends on the present velocities of its whole group, so the weights may
            not change between two members of a group.
        distinct_times: No step of the grid may be trained twice in one pass.
    """

    paradigm: ClassVar[Paradigm] = "decoupled"
    updates_take_whole_batches: ClassVar[bool] = False
    couples_groups: ClassVar[bool] = False
    distinct_times: ClassVar[bool] = False

    advantage_aggregation: str = option(
        "gdpo",
        "The advantage estimator. sum: weighted sum of the rewards, then group mean and std; gdpo: each reward "
        "normalised in its group first; rloo, best_of, rank, reinforce, per_prompt; a registered one, or a dotted path "
        "to a function.",
    )
    advantage_params: dict[str, Any] = option(factory=dict, help="Keyword parameters of the advantage estimator.")
    global_std: bool = option(True, "sum: divide by the std over the whole dataset's samples instead of the group's.")
    guidance_scale: NonNegativeFloat = option(
        1.0, "Guidance scale of the rollout; the published recipe samples without. The loss is never guided."
    )
    gradient_step_per_epoch: PositiveInt = option(
        1, "G: optimizer steps per pass over a cycle's samples. Most published recipes of these methods take one."
    )
    num_train_timesteps: NonNegativeInt = option(
        0, "Training times per sample and pass; 0: as many as timestep_range holds of the rollout's steps."
    )
    time_shift: PositiveFloat = option(
        3.0,
        "uniform, logit_normal: shift k of sigma, k s / (1 + (k-1) s); larger means noisier times. The grid's steps "
        "are shifted already.",
    )
    timestep_range: TimestepRange = option(
        (0.0, 0.9),
        "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi). Of N steps those "
        "from int(N lo) to int(N hi) - 1.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timestep_range(self.timestep_range)

    @property
    def time_sampling(self) -> TimeSampling:
        """How training times are drawn."""
        raise NotImplementedError(f"{type(self).__name__} defines no time_sampling.")

    def loss_terms_per_batch(self, scheduler_args: SchedulerArguments) -> int:
        """Backward passes per micro-batch: its training times."""
        return max(self.time_sampling.num_times(self.num_inference_steps), 1)

    def get_preprocess_guidance_scale(self) -> float:
        """Negative conditions are also needed where only the reference is guided, which it is above 1."""
        reference = float(getattr(self, "kl_cfg", 1.0))
        return max(self.guidance_scale, reference) if reference > 1 else self.guidance_scale


@dataclass
class MatchingTrainingArguments(DecoupledTrainingArguments):
    """Base of those whose training times may be steps of the rollout's grid or drawn freely."""

    time_sampling_strategy: TimeStrategy = option(
        "discrete",
        "How training times are drawn, stratified in each case. uniform, logit_normal: sigma freely; discrete: steps "
        "of the rollout's grid; discrete_with_init: step 0 always among them; discrete_wo_init: step 0 never.",
    )

    @property
    def time_sampling(self) -> TimeSampling:
        """How training times are drawn."""
        return TimeSampling(self.time_sampling_strategy, self.num_train_timesteps, self.timestep_range, self.time_shift)
