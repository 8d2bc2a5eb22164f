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
    from flow_factory.samples import BaseSample


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


def check_rewards(config: MultiRewardArguments, sources: Iterable[str] = ()) -> None:
    """Checks all entries of a section without building a model.

    Args:
        config: The section.
        sources: Names of the datasets of the run; empty skips the check of names.

    Raises:
        InputError: If an entry is wrong.
    """
    sources = list(sources)
    for entry in config.reward_configs:
        check_reward_config(entry, sources)


def check_sample_class(config: MultiRewardArguments, sample_class: type[BaseSample]) -> None:
    """Checks that samples of a class can have what the rewards of a section read, before anything is generated.

    Raises:
        InputError: If a reward reads a field that the class does not have.
    """
    known = {field.name for field in dataclasses.fields(sample_class)}
    for entry in config.reward_configs:
        reward_class = get_reward_class(entry.reward_model or "")
        for field in reward_class.required_fields:
            if field not in known and not hasattr(sample_class, field):
                raise InputError(
                    f"rewards[{entry.name}]: {reward_class.__module__}.{reward_class.__qualname__} reads {field!r}, "
                    f"which a {sample_class.__name__} does not have. Use a reward for this kind of output."
                )


def check_sources(config: RewardArguments, sources: Iterable[str]) -> None:
    """Checks that `applicable_datasets` and a weight per dataset name datasets of the run, and agree.

    Raises:
        InputError: If a name is unknown, or a listed dataset has no weight.
    """
    known = list(sources)
    if not known:
        return
    weights = list(config.weight) if isinstance(config.weight, dict) else None
    listed = [("applicable_datasets", name) for name in config.applicable_datasets or ()]
    listed += [("weight", name) for name in weights or ()]
    for field, name in listed:
        if name not in known:
            raise InputError(
                f"rewards[{config.name}].{field}: there is no dataset {name!r}; the datasets are {', '.join(known)}."
            )
    for name in config.applicable_datasets or ():
        if weights is not None and name not in weights:
            raise InputError(
                f"rewards[{config.name}].weight has no entry for {name!r}, which applicable_datasets lists; add a "
                "weight or take the dataset out."
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
    what = f"reward {config.name!r} ({reward_class.__module__}.{reward_class.__qualname__})"
    wanted = config.device
    if wanted == "auto" or (wanted == "cuda" and device.startswith("cuda")):
        wanted = device
    try:
        model = reward_class(dataclasses.replace(config, device=wanted))
    except (FlowFactoryError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{what} could not be built: {type(error).__name__}: {error}") from error
    if not hasattr(model, "name") or not hasattr(model, "config"):
        raise RunError(f"{what} was built without its name: begin its __init__ with super().__init__(config).")
    return model


def build_reward_models(
    config: MultiRewardArguments, device: str = "cpu", sources: Iterable[str] = ()
) -> list[BaseRewardModel]:
    """Builds all models of a `rewards:` or `eval_rewards:` section, in order.

    Args:
        config: The section.
        device: This rank's device.
        sources: Names of the datasets of the run; empty skips the check of names.

    Raises:
        InputError: If an entry is wrong.
        RunError: If a reward's own constructor fails.
    """
    check_rewards(config, sources)
    return [build_reward_model(entry, device) for entry in config.reward_configs]
