"""Contracts, hooks and drivers without a model: what is wrong is said before anything heavy is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from flow_factory.contracts import (
    OFFLINE_EXECUTION_CONTRACT,
    ONLINE_EXECUTION_CONTRACT,
    ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT,
    Acquisition,
    ExecutionContract,
    Feedback,
)
from flow_factory.errors import InputError
from flow_factory.hparams import TrainingArguments, get_training_args_class
from flow_factory.hparams.training_args._registry import _TRAINING_ARGS_REGISTRY
from flow_factory.registry import Registry
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.drivers import OfflineDriver, OnlineDriver, TrainingProgress, get_driver_class
from flow_factory.trainers.registry import _TRAINER_REGISTRY, check_contract, get_trainer_class
from flow_factory.trainers.rl.grpo import GRPOTrainer
from flow_factory.trainers.roles import RolePhase, RoleUpdatePlan


@dataclass
class OtherArguments(TrainingArguments):
    trainer_type: Literal["other"] = field(default="other", metadata={"help": "Key."})
    execution_contract = ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT


def built_in(registry: Registry) -> list[str]:
    """The package's own keys; other tests register theirs in the same process."""
    keys = registry.keys()
    return [key for key in keys if registry.path(key).startswith("flow_factory.")]


def test_registries_name_the_same_keys_with_equal_contracts() -> None:
    keys = built_in(_TRAINER_REGISTRY)
    assert keys and keys == built_in(_TRAINING_ARGS_REGISTRY)
    for key in keys:
        check_contract(get_trainer_class(key), get_training_args_class(key))


def test_lookup_ignores_case_and_takes_dotted_paths() -> None:
    assert get_trainer_class("GRPO") is GRPOTrainer
    assert get_trainer_class("flow_factory.trainers.rl.grpo.GRPOTrainer") is GRPOTrainer


def test_unknown_trainer_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown trainer 'gpro' \(train.trainer_type\). Did you mean 'grpo'"):
        get_trainer_class("gpro")


def test_something_else_than_a_trainer_is_refused() -> None:
    with pytest.raises(InputError, match="is not a trainer"):
        get_trainer_class("collections.OrderedDict")


def test_differing_contracts_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"GRPOTrainer.execution_contract .* differs from OtherArguments"):
        check_contract(GRPOTrainer, OtherArguments)


def test_missing_contract_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="execution_contract is None"):
        check_contract(type("Bare", (), {}), OtherArguments)


def test_missing_hooks_are_named() -> None:
    class NoOptimize(BaseTrainer):
        execution_contract = ONLINE_EXECUTION_CONTRACT

        def sample(self):  # type: ignore[no-untyped-def]
            return []

    with pytest.raises(TypeError, match=r"does not define optimize\(\)"):
        OnlineDriver.check_hooks(NoOptimize)

    class NoBatch(BaseTrainer):
        execution_contract = OFFLINE_EXECUTION_CONTRACT

    with pytest.raises(TypeError, match=r"optimize_batch\(\) and _build_train_dataloader\(\)"):
        OfflineDriver.check_hooks(NoBatch)


def test_dataset_contract_cannot_have_runtime_rewards() -> None:
    with pytest.raises(ValueError, match="has no driver"):
        ExecutionContract(Acquisition.DATASET, Feedback.RUNTIME_REWARD)


def test_every_contract_has_a_driver() -> None:
    for contract in (
        ONLINE_EXECUTION_CONTRACT,
        ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT,
        OFFLINE_EXECUTION_CONTRACT,
    ):
        assert get_driver_class(contract).required_hooks


def test_progress_is_frozen() -> None:
    with pytest.raises(AttributeError):
        TrainingProgress().optimizer_step = 1  # type: ignore[misc]


def test_no_trainer_overrides_the_loop() -> None:
    for key in built_in(_TRAINER_REGISTRY):
        cls = get_trainer_class(key)
        assert cls.start is BaseTrainer.start, f"{cls.__name__} overrides start()"


def test_role_plan_counts_steps_in_order() -> None:
    plan = RoleUpdatePlan((RolePhase("fake", 2), RolePhase("generator")))
    assert list(plan) == ["fake", "fake", "generator"]
    assert plan.steps_per_round == {"fake": 2, "generator": 1}
    with pytest.raises(ValueError, match="at least 1"):
        RolePhase("fake", 0)
