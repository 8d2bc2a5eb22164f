"""Advantages: estimators in a registry, and the processor that gathers, groups and calls them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flow_factory.advantage.registry import get_adv_estimator, list_adv_estimators, register_adv_estimator

if TYPE_CHECKING:
    from flow_factory.advantage.estimators import AdvantageEstimator, gdpo_advantages, sum_advantages
    from flow_factory.advantage.groups import Components, Groups
    from flow_factory.advantage.processor import AdvantageProcessor
    from flow_factory.advantage.stateful import StatefulEstimator

__all__ = [
    "AdvantageEstimator",
    "AdvantageProcessor",
    "Components",
    "Groups",
    "StatefulEstimator",
    "gdpo_advantages",
    "get_adv_estimator",
    "list_adv_estimators",
    "register_adv_estimator",
    "sum_advantages",
]

_HOMES = {
    "AdvantageEstimator": "estimators",
    "gdpo_advantages": "estimators",
    "sum_advantages": "estimators",
    "Components": "groups",
    "Groups": "groups",
    "AdvantageProcessor": "processor",
    "StatefulEstimator": "stateful",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
