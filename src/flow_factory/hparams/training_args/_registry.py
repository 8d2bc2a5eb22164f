"""Which arguments class belongs to a trainer key."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TypeVar, get_type_hints

from flow_factory.errors import InputError
from flow_factory.hparams.training_args._base import TrainingArguments
from flow_factory.hparams.training_args._common import CommonTrainingArguments
from flow_factory.registry import Registry

_TRAINING_ARGS_REGISTRY = Registry(
    "trainer type",
    {
        "grpo": "flow_factory.hparams.training_args.grpo.GRPOTrainingArguments",
        "grpo-guard": "flow_factory.hparams.training_args.grpo_guard.GRPOGuardTrainingArguments",
        "dppo": "flow_factory.hparams.training_args.dppo.DPPOTrainingArguments",
        "nft": "flow_factory.hparams.training_args.nft.NFTTrainingArguments",
        "awm": "flow_factory.hparams.training_args.awm.AWMTrainingArguments",
        "dpo": "flow_factory.hparams.training_args.dpo.DPOTrainingArguments",
        "dgpo": "flow_factory.hparams.training_args.dgpo.DGPOTrainingArguments",
        "crd": "flow_factory.hparams.training_args.crd.CRDTrainingArguments",
        "sft": "flow_factory.hparams.training_args.sft.SFTTrainingArguments",
        "offline-dpo": "flow_factory.hparams.training_args.offline_dpo.OfflineDPOTrainingArguments",
    },
    field="train.trainer_type",
)
C = TypeVar("C", bound=type)


def register_training_args(key: str) -> Callable[[C], C]:
    """Decorator: makes a dataclass the arguments of `train.trainer_type: key`."""
    return _TRAINING_ARGS_REGISTRY.register(key)


def training_args_keys() -> list[str]:
    """The known trainer keys."""
    return _TRAINING_ARGS_REGISTRY.keys()


def get_training_args_class(key: str) -> type[CommonTrainingArguments]:
    """The arguments class of a trainer.

    Args:
        key: A registered key, the dotted path of an arguments class, or the dotted path of a trainer class. Of a
            trainer class the arguments are its `training_args_class`, else its annotation `training_args: MyArgs`,
            else the one arguments class that its module defines or imports for it, else `TrainingArguments`.

    Raises:
        InputError: If there is no such key or class, or it is not a dataclass of training arguments.
    """
    found = _TRAINING_ARGS_REGISTRY.get(key)
    if isinstance(found, type) and not issubclass(found, CommonTrainingArguments):
        found = _arguments_of_trainer(found)
    if not (isinstance(found, type) and issubclass(found, CommonTrainingArguments) and dataclasses.is_dataclass(found)):
        raise InputError(
            f"train.trainer_type {key!r} leads to {found!r}, which is neither a trainer class nor a dataclass derived "
            f"from TrainingArguments or OfflineFlowMatchingTrainingArguments."
        )
    return found


def _arguments_of_trainer(trainer: type) -> object:
    declared = getattr(trainer, "training_args_class", None)
    if declared is not None:
        return declared
    try:
        annotated = get_type_hints(trainer).get("training_args")
    except (NameError, TypeError):  # an annotation that exists only for type checkers
        annotated = None
    general = (TrainingArguments, CommonTrainingArguments)
    # BaseTrainer's own annotation is Any, which is a class to Python 3.11 and later.
    if isinstance(annotated, type) and issubclass(annotated, CommonTrainingArguments) and annotated not in general:
        return annotated
    contract = getattr(trainer, "execution_contract", None)
    if contract is None:
        return trainer
    own = [
        value
        for value in vars(sys.modules[trainer.__module__]).values()
        if isinstance(value, type)
        and issubclass(value, CommonTrainingArguments)
        and value.__module__ == trainer.__module__
        and value.execution_contract == contract
    ]
    return own[0] if len(own) == 1 else TrainingArguments
