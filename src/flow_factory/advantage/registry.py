"""Advantage estimators by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flow_factory.registry import Registry

T = TypeVar("T")

_ADV_ESTIMATOR_REGISTRY = Registry(
    "advantage estimator",
    {
        "sum": "flow_factory.advantage.estimators.sum_advantages",
        "gdpo": "flow_factory.advantage.estimators.gdpo_advantages",
    },
    field="train.advantage_aggregation",
)


def register_adv_estimator(key: str) -> Callable[[T], T]:
    """Decorator that registers an estimator (see `estimators.AdvantageEstimator`) under `key`."""
    return _ADV_ESTIMATOR_REGISTRY.register(key)


def get_adv_estimator(key: str) -> Any:
    """The estimator registered under `key`, or found at the dotted path `key`.

    Raises:
        InputError: If there is none.
    """
    return _ADV_ESTIMATOR_REGISTRY.get(key)


def list_adv_estimators() -> list[str]:
    """All registered keys."""
    return _ADV_ESTIMATOR_REGISTRY.keys()
