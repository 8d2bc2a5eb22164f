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
        "rloo": "flow_factory.advantage.estimators.rloo_advantages",
        "best_of": "flow_factory.advantage.estimators.best_of_advantages",
        "rank": "flow_factory.advantage.estimators.rank_advantages",
        "reinforce": "flow_factory.advantage.stateful.MovingAverageBaseline",
        "per_prompt": "flow_factory.advantage.stateful.PerPromptStatistics",
    },
    field="train.advantage_aggregation",
)


def register_adv_estimator(key: str) -> Callable[[T], T]:
    """Decorator that registers an estimator under `key`.

    A function `fn(rewards, groups, **params) -> advantages` (see `estimators.AdvantageEstimator`), or a class derived
    from `stateful.StatefulEstimator` if it remembers earlier cycles.
    """
    return _ADV_ESTIMATOR_REGISTRY.register(key)


def get_adv_estimator(key: str) -> Any:
    """The estimator registered under `key`, or found at the dotted path `key`.

    Raises:
        InputError: If there is none.
    """
    return _ADV_ESTIMATOR_REGISTRY.get(key)


def adv_estimator_path(key: str) -> str:
    """The dotted path of a registered estimator, without importing it."""
    return _ADV_ESTIMATOR_REGISTRY.path(key)


def list_adv_estimators() -> list[str]:
    """All registered keys."""
    return _ADV_ESTIMATOR_REGISTRY.keys()
