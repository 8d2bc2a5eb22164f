"""Arguments of the trainers: one class per algorithm, found by its key."""

from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.hparams.training_args._coupled import CoupledTrainingArguments
from flow_factory.hparams.training_args._decoupled import DecoupledTrainingArguments, MatchingTrainingArguments
from flow_factory.hparams.training_args._offline import OfflineFlowMatchingTrainingArguments
from flow_factory.hparams.training_args._registry import (
    get_training_args_class,
    register_training_args,
    training_args_keys,
)
from flow_factory.hparams.training_args.awm import AWMTrainingArguments
from flow_factory.hparams.training_args.crd import CRDTrainingArguments
from flow_factory.hparams.training_args.dgpo import DGPOTrainingArguments
from flow_factory.hparams.training_args.dpo import DPOTrainingArguments
from flow_factory.hparams.training_args.dppo import DPPOTrainingArguments
from flow_factory.hparams.training_args.grpo import GRPOTrainingArguments
from flow_factory.hparams.training_args.grpo_guard import GRPOGuardTrainingArguments
from flow_factory.hparams.training_args.nft import NFTTrainingArguments
from flow_factory.hparams.training_args.offline_dpo import OfflineDPOTrainingArguments
from flow_factory.hparams.training_args.sft import SFTTrainingArguments

__all__ = [
    "AWMTrainingArguments",
    "CRDTrainingArguments",
    "CommonTrainingArguments",
    "CoupledTrainingArguments",
    "DGPOTrainingArguments",
    "DPOTrainingArguments",
    "DPPOTrainingArguments",
    "DecoupledTrainingArguments",
    "GRPOGuardTrainingArguments",
    "GRPOTrainingArguments",
    "MatchingTrainingArguments",
    "NFTTrainingArguments",
    "OfflineDPOTrainingArguments",
    "OfflineFlowMatchingTrainingArguments",
    "SFTTrainingArguments",
    "TrainingArguments",
    "get_training_args_class",
    "register_training_args",
    "training_args_keys",
]
