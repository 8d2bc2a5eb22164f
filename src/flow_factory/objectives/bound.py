"""A policy loss as a run uses it: with its parameters, and with its result checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_factory.errors import FlowFactoryError, InputError, RunError
from flow_factory.hparams.keyword_params import bind_params
from flow_factory.objectives.policy_step import PolicyStep
from flow_factory.objectives.registry import check_needs, get_policy_loss
from flow_factory.registry import describe_object

_STORES = {"old_mean": "mean", "old_velocity": "velocity"}


@dataclass(frozen=True)
class PolicyLoss:
    """A selected policy loss.

    Attributes:
        name: Its key.
        function: The function itself.
        params: Its keyword arguments.
        needs: What it reads beyond what every step has.
    """

    name: str
    function: Callable[..., Any]
    params: Mapping[str, Any]
    needs: frozenset[str]

    @property
    def stores(self) -> frozenset[str]:
        """What the rollout must keep of each trained step."""
        return frozenset(_STORES[name] for name in self.needs if name in _STORES)

    def __call__(self, step: PolicyStep, advantages: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The loss and its metrics.

        Raises:
            RunError: Naming the function, if it fails or does not return a finite scalar with a graph.
        """
        try:
            result = self.function(step, advantages, mask, **self.params)
        except (FlowFactoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RunError(f"policy loss {self.what} raised {type(error).__name__}: {error}.") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise RunError(f"policy loss {self.what} returned {type(result).__name__}; return (loss, metrics).")
        loss, metrics = result
        if not isinstance(loss, Tensor) or loss.shape != ():
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError(f"policy loss {self.what} returned a loss of {shape}; return a scalar, by agg_loss or mean.")
        if not loss.requires_grad:
            raise RunError(
                f"policy loss {self.what} returned a loss without a graph; form it from step.log_prob, step.mean or "
                f"step.velocity, not under no_grad and not from their detached values."
            )
        if not bool(torch.isfinite(loss)):
            raise RunError(
                f"policy loss {self.what} is {loss.item()}: not finite. Log-ratios were "
                f"{_extent(step.log_prob.detach() - step.old_log_prob)}, advantages {_extent(advantages)}."
            )
        return loss, dict(metrics)

    @property
    def what(self) -> str:
        """Name and place, for messages."""
        return f"{self.name!r}, {describe_object(self.function)},"


def bind_policy_loss(
    key: str, params: Mapping[str, Any], inherited: Mapping[str, Any] | None = None, place: str = ""
) -> PolicyLoss:
    """Looks a policy loss up and fills in its parameters.

    Args:
        key: Registered key or dotted path.
        params: `train.policy_loss_params`.
        inherited: Fields of `train:` that a parameter of the same name takes its value from.
        place: Where `params` were written, for errors.

    Raises:
        InputError: If there is no such loss, or a parameter is unknown, missing or of the wrong type.
    """
    function = get_policy_loss(key)
    if not callable(function) or isinstance(function, type):
        raise InputError(
            f"train.policy_loss {key!r} is {function!r}, not a function; give fn(step, advantages, mask, **params)."
        )
    fixed, path = ("step", "advantages", "mask"), ("train", "policy_loss_params")
    bound = bind_params(function, params, fixed=fixed, path=path, place=place, inherited=inherited)
    needs: Any = getattr(function, "needs", ())
    declared: Any = needs(bound) if callable(needs) else needs
    return PolicyLoss(key, function, bound, check_needs(declared, key))


def _extent(values: Tensor) -> str:
    return f"in [{values.min().item():.3g}, {values.max().item():.3g}]"
