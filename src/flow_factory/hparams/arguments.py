"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flow_factory.hparams.data_args import DataArguments
from flow_factory.hparams.model_args import ModelArguments
from flow_factory.hparams.optimizer_args import AccelerationArguments, OptimizerArguments
from flow_factory.hparams.reward_args import MultiRewardArguments
from flow_factory.hparams.run_args import EvaluationArguments, LogArguments
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args import CommonTrainingArguments, TrainingArguments
from flow_factory.hparams.types import NonNegativeInt, Port, PositiveInt, Section, option
from flow_factory.hparams.yaml_source import Origins

if TYPE_CHECKING:
    from flow_factory.hparams.models import ModelSpec

# YAML section -> attribute of Arguments.
SECTIONS = {
    "data": "data_args",
    "model": "model_args",
    "scheduler": "scheduler_args",
    "train": "training_args",
    "eval": "eval_args",
    "log": "log_args",
    "rewards": "reward_args",
    "eval_rewards": "eval_reward_args",
    "optimizers": "optimizer_args",
    "acceleration": "acceleration_args",
}


@dataclass
class LauncherArguments(Section):
    """The fields at the top level: how processes are started, and the plugins that are imported first."""

    launcher: Literal["accelerate"] = option("accelerate", "What starts the processes: accelerate.")
    config_file: str | None = option(None, "An accelerate configuration file to launch with.")
    num_processes: PositiveInt = option(1, "Processes (ranks) over all machines; must equal what a launcher started.")
    main_process_port: Port = option(29500, "Port of the rendezvous on the main process.")
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto",
        "Compute dtype of forwards: bf16, fp16, no (float32) or auto, which is bf16 where the device has it and no on "
        "a CPU.",
    )
    process_index: NonNegativeInt | None = option(None, "Rank of this process; set by the launcher.")
    local_process_index: NonNegativeInt | None = option(None, "Rank on this machine; set by the launcher.")
    num_machines: PositiveInt | None = option(None, "Machines; null: one.")
    gpus_per_node: PositiveInt | None = option(None, "Processes per machine; null: num_processes / num_machines.")
    machine_rank: NonNegativeInt | None = option(None, "Which of the machines this is, from 0.")
    main_process_ip: str | None = option(None, "Address of the main machine, when there are several.")
    plugins: list[str] = option(
        factory=list,
        help="Python modules (dotted) or files (.py, relative to this file or to the working directory) that are "
        "imported first in every process: they may register trainers, rewards, models, policy losses and advantage "
        "estimators.",
    )


@dataclass(kw_only=True)
class Arguments(LauncherArguments):
    """A resolved and validated configuration.

    Attributes:
        train_generation: The model-specific fields of `train:`.
        eval_generation: The model-specific fields of `eval:`.
        trainer_key: `train.trainer_type` as it was written: a key, or the dotted path of a trainer class.
        origins: Where each value was written; takes no part in comparisons.
    """

    model_args: ModelArguments
    data_args: DataArguments = field(default_factory=DataArguments)
    scheduler_args: SchedulerArguments = field(default_factory=SchedulerArguments)
    training_args: TrainingArguments = field(default_factory=TrainingArguments)
    eval_args: EvaluationArguments = field(default_factory=EvaluationArguments)
    log_args: LogArguments = field(default_factory=LogArguments)
    reward_args: MultiRewardArguments = field(default_factory=MultiRewardArguments)
    eval_reward_args: MultiRewardArguments | None = None
    optimizer_args: list[OptimizerArguments] = field(default_factory=list)
    acceleration_args: AccelerationArguments = field(default_factory=AccelerationArguments)
    train_generation: Any = None
    eval_generation: Any = None
    trainer_key: str = ""
    origins: Origins = field(default_factory=Origins, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.trainer_key = self.trainer_key or self.training_args.trainer_type
        if not self.optimizer_args:
            self.optimizer_args = [optimizer_from_train(self.training_args)]
        if self.train_generation is None:
            self.train_generation = self.spec.generation_arguments()
        if self.eval_generation is None:
            self.eval_generation = self.train_generation

    @property
    def spec(self) -> ModelSpec:
        """Static facts of the model."""
        from flow_factory.hparams.models import get_model_spec

        return get_model_spec(self.model_args.model_type)

    @property
    def sde_seed(self) -> int:
        """Seed of the choice of stochastic steps."""
        return self.training_args.seed if self.scheduler_args.seed is None else self.scheduler_args.seed

    @property
    def eval_seed(self) -> int:
        """Seed of the evaluation noise."""
        return self.training_args.seed if self.eval_args.seed is None else self.eval_args.seed

    def optimizer_for(self, role: str) -> OptimizerArguments:
        """The optimizer entry of a trainable role.

        Raises:
            KeyError: If the role has none; `load_config` makes sure that every role of the trainer has one.
        """
        for entry in self.optimizer_args:
            if entry.name == role:
                return entry
        raise KeyError(f"no optimizer entry for role {role!r}; known: {[e.name for e in self.optimizer_args]}")

    def to_mapping(self) -> dict[str, Any]:
        """The configuration as plain data for YAML; loading it gives an equal object."""
        from flow_factory.hparams.saving import to_mapping

        return to_mapping(self)

    def fingerprint_mapping(self) -> dict[str, Any]:
        """The mapping without what may change when a run is resumed (length, logging, evaluation, launcher ...)."""
        from flow_factory.hparams.saving import fingerprint_mapping

        return fingerprint_mapping(self)


def optimizer_from_train(args: CommonTrainingArguments) -> OptimizerArguments:
    """The optimizer that the short form in `train:` (learning_rate, adam_* ...) stands for."""
    return OptimizerArguments(
        name=args.required_trainable_roles[0],  # type: ignore[arg-type]
        optimizer="adamw",
        learning_rate=args.learning_rate,
        weight_decay=args.adam_weight_decay,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler=args.lr_scheduler,
        lr_warmup_steps=args.lr_warmup_steps,
        betas=args.adam_betas,
        eps=args.adam_epsilon,
    )


# Field of `train:` -> field of `optimizers[]` that it is the short form of.
OPTIMIZER_SHORT_FORM = {
    "learning_rate": "learning_rate",
    "adam_weight_decay": "weight_decay",
    "adam_betas": "betas",
    "adam_epsilon": "eps",
    "max_grad_norm": "max_grad_norm",
    "lr_scheduler": "lr_scheduler",
    "lr_warmup_steps": "lr_warmup_steps",
}

__all__ = ["OPTIMIZER_SHORT_FORM", "SECTIONS", "Arguments", "LauncherArguments", "optimizer_from_train"]
