"""Reward models by key. Built-in entries are dotted paths, so listing them imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from flow_factory.errors import InputError
from flow_factory.registry import Registry

if TYPE_CHECKING:
    from flow_factory.rewards.abc import BaseRewardModel

ClassT = TypeVar("ClassT", bound=type)

_REWARD_MODEL_REGISTRY = Registry(
    "reward model",
    {
        "jpeg_compressibility": "flow_factory.rewards.jpeg.JpegCompressibility",
        "jpeg_incompressibility": "flow_factory.rewards.jpeg.JpegIncompressibility",
        "brightness": "flow_factory.rewards.brightness.Brightness",
        "prompt_match": "flow_factory.rewards.prompt_match.PromptMatch",
    },
    field="rewards[].reward_model",
)


def get_reward_class(key: str) -> type[BaseRewardModel]:
    """The reward class registered under `key`, or found at the dotted path `key`.

    Raises:
        InputError: If there is none, or if what is there is not a reward model.
    """
    from flow_factory.rewards.abc import BaseRewardModel, GroupwiseRewardModel, PointwiseRewardModel

    found = _REWARD_MODEL_REGISTRY.get(key)
    if not (isinstance(found, type) and issubclass(found, BaseRewardModel)):
        raise InputError(
            f"reward model {key!r} (rewards[].reward_model) is {found!r}, not a reward class; subclass "
            "flow_factory.rewards.PointwiseRewardModel or GroupwiseRewardModel."
        )
    if not issubclass(found, (PointwiseRewardModel, GroupwiseRewardModel)):
        raise InputError(
            f"reward model {key!r} (rewards[].reward_model) subclasses BaseRewardModel itself; subclass "
            "PointwiseRewardModel (samples scored one by one) or GroupwiseRewardModel (a prompt's samples together)."
        )
    return found


def register_reward_model(key: str) -> Callable[[ClassT], ClassT]:
    """Class decorator that makes a reward model outside the package available under `key`."""
    return _REWARD_MODEL_REGISTRY.register(key)


def reward_keys() -> list[str]:
    """Keys of all registered reward models, sorted."""
    return _REWARD_MODEL_REGISTRY.keys()
