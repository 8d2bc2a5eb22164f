"""Trainer classes by `train.trainer_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from flow_factory.contracts import ExecutionContract
from flow_factory.errors import InputError
from flow_factory.registry import Registry

if TYPE_CHECKING:
    from flow_factory.trainers.abc import BaseTrainer

T = TypeVar("T", bound=type)

_TRAINER_REGISTRY = Registry(
    "trainer",
    {
        "grpo": "flow_factory.trainers.rl.grpo.GRPOTrainer",
        "grpo-guard": "flow_factory.trainers.rl.grpo_guard.GRPOGuardTrainer",
        "dppo": "flow_factory.trainers.rl.dppo.DPPOTrainer",
        "nft": "flow_factory.trainers.rl.nft.NFTTrainer",
        "awm": "flow_factory.trainers.rl.awm.AWMTrainer",
        "dpo": "flow_factory.trainers.rl.dpo.DPOTrainer",
        "dgpo": "flow_factory.trainers.rl.dgpo.DGPOTrainer",
        "crd": "flow_factory.trainers.rl.crd.CRDTrainer",
        "sft": "flow_factory.trainers.offline.sft.SFTTrainer",
        "offline-dpo": "flow_factory.trainers.offline.offline_dpo.OfflineDPOTrainer",
    },
    field="train.trainer_type",
)


def register_trainer(key: str) -> Callable[[T], T]:
    """Class decorator that makes a trainer selectable as `train.trainer_type: key`."""
    return _TRAINER_REGISTRY.register(key)


def get_trainer_class(key: str) -> type[BaseTrainer]:
    """The trainer class for a registered key or a dotted path.

    Raises:
        InputError: If nothing is found, or what is found is not a trainer.
    """
    from flow_factory.trainers.abc import BaseTrainer

    cls = _TRAINER_REGISTRY.get(key)
    if not (isinstance(cls, type) and issubclass(cls, BaseTrainer)):
        raise InputError(
            f"train.trainer_type {key!r} names {cls!r}, which is not a trainer; derive it from "
            f"flow_factory.trainers.abc.BaseTrainer."
        )
    return cls


def check_contract(trainer_cls: type, arguments_cls: type) -> ExecutionContract:
    """Checks that a trainer and its arguments declare the same execution contract, before anything heavy is built.

    Raises:
        TypeError: If a contract is missing, or the two differ.
    """
    contracts = [getattr(cls, "execution_contract", None) for cls in (trainer_cls, arguments_cls)]
    for cls, contract in zip((trainer_cls, arguments_cls), contracts, strict=True):
        if not isinstance(contract, ExecutionContract):
            raise TypeError(
                f"{cls.__name__}.execution_contract is {contract!r}; set it to one of the constants in "
                f"flow_factory.contracts."
            )
    if contracts[0] != contracts[1]:
        raise TypeError(
            f"{trainer_cls.__name__}.execution_contract ({contracts[0]}) differs from "
            f"{arguments_cls.__name__}.execution_contract ({contracts[1]}); both must name the same constant."
        )
    assert contracts[0] is not None
    return contracts[0]
