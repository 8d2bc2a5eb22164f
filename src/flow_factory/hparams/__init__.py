"""The typed configuration: dataclasses with help texts, strict loading, cross-field validation. No heavy import."""

from flow_factory.hparams.arguments import Arguments, LauncherArguments
from flow_factory.hparams.builtin import builtin_names, resolve_builtin
from flow_factory.hparams.cross_checks import check_world_size
from flow_factory.hparams.data_args import DataArguments, DatasetArguments, DatasetEvalSpec, DatasetTrainSpec
from flow_factory.hparams.errors import ConfigError, FieldError, Problem
from flow_factory.hparams.geometry import Geometry, plan_geometry
from flow_factory.hparams.loader import load_config, load_config_from_mapping
from flow_factory.hparams.model_args import ModelArguments
from flow_factory.hparams.models import (
    GenerationArguments,
    ModelSpec,
    get_model_spec,
    model_keys,
    register_model_spec,
)
from flow_factory.hparams.optimizer_args import AccelerationArguments, OptimizerArguments
from flow_factory.hparams.reward_args import MultiRewardArguments, RewardArguments
from flow_factory.hparams.run_args import EvaluationArguments, LogArguments
from flow_factory.hparams.saving import diff_mappings, save_config
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args import (
    AWMTrainingArguments,
    CommonTrainingArguments,
    CoupledTrainingArguments,
    CRDTrainingArguments,
    DecoupledTrainingArguments,
    DGPOTrainingArguments,
    DPOTrainingArguments,
    DPPOTrainingArguments,
    GRPOGuardTrainingArguments,
    GRPOTrainingArguments,
    MatchingTrainingArguments,
    NFTTrainingArguments,
    OfflineDPOTrainingArguments,
    OfflineFlowMatchingTrainingArguments,
    SFTTrainingArguments,
    TrainingArguments,
    get_training_args_class,
    register_training_args,
    training_args_keys,
)
from flow_factory.hparams.types import Section, option, resolve_dtype
from flow_factory.hparams.validation import validate_dataclass

__all__ = [
    "AWMTrainingArguments",
    "AccelerationArguments",
    "Arguments",
    "CRDTrainingArguments",
    "CommonTrainingArguments",
    "ConfigError",
    "CoupledTrainingArguments",
    "DGPOTrainingArguments",
    "DPOTrainingArguments",
    "DPPOTrainingArguments",
    "DataArguments",
    "DatasetArguments",
    "DatasetEvalSpec",
    "DatasetTrainSpec",
    "DecoupledTrainingArguments",
    "EvaluationArguments",
    "FieldError",
    "GRPOGuardTrainingArguments",
    "GRPOTrainingArguments",
    "GenerationArguments",
    "Geometry",
    "LauncherArguments",
    "LogArguments",
    "MatchingTrainingArguments",
    "ModelArguments",
    "ModelSpec",
    "MultiRewardArguments",
    "NFTTrainingArguments",
    "OfflineDPOTrainingArguments",
    "OfflineFlowMatchingTrainingArguments",
    "OptimizerArguments",
    "Problem",
    "RewardArguments",
    "SFTTrainingArguments",
    "SchedulerArguments",
    "Section",
    "TrainingArguments",
    "builtin_names",
    "check_world_size",
    "diff_mappings",
    "get_model_spec",
    "get_training_args_class",
    "load_config",
    "load_config_from_mapping",
    "model_keys",
    "option",
    "plan_geometry",
    "register_model_spec",
    "register_training_args",
    "resolve_builtin",
    "resolve_dtype",
    "save_config",
    "training_args_keys",
    "validate_dataclass",
]
