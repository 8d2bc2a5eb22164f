"""Reward models and what feeds them. Names load on first use, so `flow_factory.rewards` itself imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow_factory.rewards.abc import (
        BaseRewardModel,
        GroupwiseRewardModel,
        PointwiseRewardModel,
        RewardFailure,
    )
    from flow_factory.rewards.buffer import RewardBuffer
    from flow_factory.rewards.build import build_reward_model, build_reward_models, check_rewards
    from flow_factory.rewards.processor import RewardProcessor
    from flow_factory.rewards.registry import get_reward_class, register_reward_model
    from flow_factory.rewards.smoke import smoke_reward

_HOMES = {
    "BaseRewardModel": "abc",
    "GroupwiseRewardModel": "abc",
    "PointwiseRewardModel": "abc",
    "RewardFailure": "abc",
    "RewardBuffer": "buffer",
    "build_reward_model": "build",
    "build_reward_models": "build",
    "check_rewards": "build",
    "RewardProcessor": "processor",
    "get_reward_class": "registry",
    "register_reward_model": "registry",
    "smoke_reward": "smoke",
}

__all__ = [
    "BaseRewardModel",
    "GroupwiseRewardModel",
    "PointwiseRewardModel",
    "RewardBuffer",
    "RewardFailure",
    "RewardProcessor",
    "build_reward_model",
    "build_reward_models",
    "check_rewards",
    "get_reward_class",
    "register_reward_model",
    "smoke_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
