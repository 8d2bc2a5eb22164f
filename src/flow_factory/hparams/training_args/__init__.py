"""Arguments of the trainers: one class per algorithm, found by its key."""

from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.hparams.training_args._offline import OfflineFlowMatchingTrainingArguments
from flow_factory.hparams.training_args._registry import (
    get_training_args_class,
    register_training_args,
    training_args_keys,
)
from flow_factory.hparams.training_args.grpo import GRPOTrainingArguments

__all__ = [
    "CommonTrainingArguments",
    "GRPOTrainingArguments",
    "OfflineFlowMatchingTrainingArguments",
    "TrainingArguments",
    "get_training_args_class",
    "register_training_args",
    "training_args_keys",
]
