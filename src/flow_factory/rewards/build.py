"""From the entries of `rewards:` to reward models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flow_factory.errors import FlowFactoryError, InputError, RunError
from flow_factory.rewards.params import parse_params
from flow_factory.rewards.registry import get_reward_class

if TYPE_CHECKING:
    from flow_factory.hparams import MultiRewardArguments, RewardArguments
    from flow_factory.rewards.abc import BaseRewardModel


def check_reward_config(config: RewardArguments, sources: Iterable[str] = ()) -> None:
    """Checks one entry without building the model: its class, its params and the dataset names it mentions.

    Args:
        config: One entry of `rewards:`.
        sources: Names of the datasets of the run; empty skips the check of names.

    Raises:
        InputError: If something in the entry is wrong.
    """
    if not config.reward_model:
        raise InputError(f"rewards[{config.name}].reward_model is missing: name a reward model or a dotted path.")
    reward_class = get_reward_class(config.reward_model)
    parse_params(reward_class.Params, config.params, reward=config.name)
    check_sources(config, sources)


def check_sources(config: RewardArguments, sources: Iterable[str]) -> None:
    """Checks that `applicable_datasets` and a weight per dataset name datasets of the run, and all that apply.

    Raises:
        InputError: If a name is unknown, or an applicable dataset has no weight.
    """
    known = list(sources)
    if not known:
        return
    applicable = config.applicable_datasets if config.applicable_datasets is not None else known
    listed = [("applicable_datasets", name) for name in applicable]
    if isinstance(config.weight, dict):
        listed += [("weight", name) for name in config.weight]
    for field, name in listed:
        if name not in known:
            raise InputError(
                f"rewards[{config.name}].{field}: there is no dataset {name!r}; the datasets are {', '.join(known)}."
            )
    if isinstance(config.weight, dict):
        missing = [name for name in applicable if name not in config.weight]
        if missing:
            raise InputError(
                f"rewards[{config.name}].weight has no entry for {', '.join(map(repr, missing))}; give a weight for "
                "every dataset the reward applies to, or leave those out through applicable_datasets."
            )


def build_reward_model(config: RewardArguments, device: str = "cpu") -> BaseRewardModel:
    """Builds the model of one entry.

    Args:
        config: One entry of `rewards:`.
        device: This rank's device, used where the entry says `auto` or `cuda`.

    Raises:
        InputError: If the entry is wrong.
        RunError: If the reward's own constructor fails.
    """
    check_reward_config(config)
    reward_class = get_reward_class(config.reward_model or "")
    wanted = config.device
    if wanted == "auto" or (wanted == "cuda" and device.startswith("cuda")):
        wanted = device
    try:
        return reward_class(dataclasses.replace(config, device=wanted))
    except (FlowFactoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RunError(
            f"reward {config.name!r} ({reward_class.__module__}.{reward_class.__qualname__}) could not be built: "
            f"{type(error).__name__}: {error}"
        ) from error


def build_reward_models(
    config: MultiRewardArguments, device: str = "cpu", sources: Iterable[str] = ()
) -> list[BaseRewardModel]:
    """Builds all models of a `rewards:` or `eval_rewards:` section, in order.

    Args:
        config: The section.
        device: This rank's device.
        sources: Names of the datasets of the run; empty skips the check of names.

    Raises:
        InputError: If an entry is wrong or two entries share a name.
        RunError: If a reward's own constructor fails.
    """
    names = [entry.name for entry in config.reward_configs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"rewards: {names.count(name)} entries are called {name!r}; give each its own name.")
    sources = list(sources)
    for entry in config.reward_configs:
        check_reward_config(entry, sources)
    return [build_reward_model(entry, device) for entry in config.reward_configs]
