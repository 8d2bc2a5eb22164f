"""The functions that a configuration selects by name: the advantage estimator and the policy loss.

They are built before any model is loaded, so that a wrong name or parameter costs no time.
"""

from __future__ import annotations

from typing import Any

from flow_factory.advantage.processor import bind_estimator
from flow_factory.hparams import Arguments
from flow_factory.objectives.bound import PolicyLoss, bind_policy_loss


def build_estimator(config: Arguments) -> Any:
    """The advantage estimator with its parameters filled in.

    Raises:
        InputError: If there is none of that name, or it does not take the parameters.
    """
    arguments: Any = config.training_args
    return bind_estimator(
        getattr(arguments, "advantage_aggregation", "gdpo"),
        getattr(arguments, "advantage_params", {}),
        vars(arguments),
        config.origins.place(("train", "advantage_params")),
    )


def build_policy_loss(config: Arguments) -> PolicyLoss:
    """The policy loss of a coupled trainer with its parameters filled in.

    Raises:
        InputError: If there is none of that name, or it does not take the parameters.
    """
    arguments: Any = config.training_args
    params = getattr(arguments, "policy_loss_params", {})
    place = config.origins.place(("train", "policy_loss_params"))
    return bind_policy_loss(arguments.policy_loss, params, vars(arguments), place)
