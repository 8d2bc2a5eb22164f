"""Policy losses by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from flow_factory.errors import InputError
from flow_factory.hparams.errors import nearest
from flow_factory.registry import Registry

T = TypeVar("T", bound=Callable[..., Any])
Needs = Collection[str] | Callable[[Mapping[str, Any]], Collection[str]]

_POLICY_LOSS_REGISTRY = Registry(
    "policy loss",
    {
        "grpo": "flow_factory.objectives.policy_losses.grpo",
        "grpo-guard": "flow_factory.objectives.policy_losses.grpo_guard",
        "dppo": "flow_factory.objectives.policy_losses.dppo",
        "gspo": "flow_factory.objectives.policy_losses.gspo",
        "reinforce": "flow_factory.objectives.policy_losses.reinforce",
    },
    field="train.policy_loss",
)

# What a loss has to declare, because it costs something: the first two make the rollout keep another tensor of a
# state's size for every trained step, the third replays every trained step once more without gradients.
DECLARED = ("old_mean", "old_velocity", "sequence_log_ratio")
ALWAYS = (
    "log_prob",
    "old_log_prob",
    "mean",
    "velocity",
    "next_state",
    "std",
    "spread",
    "sigma",
    "h",
    "velocity_scale",
    "active",
    "dynamics",
)


def register_policy_loss(key: str, needs: Needs = ()) -> Callable[[T], T]:
    """Decorator that makes `fn(step, advantages, mask, **params) -> (loss, metrics)` a policy loss.

    step: a `PolicyStep`. advantages: [B], clipped to `train.adv_clip_range`. mask: bool [B], False for failed scores.
    loss: a finite scalar with the policy's graph. metrics: names to scalars; "*_max" are maximised over an update, all
    others averaged. Keyword parameters come from `train.policy_loss_params`; one with the name of a field of `train:`
    (`clip_range`) takes that field's value.

    Args:
        key: Its name in `train.policy_loss`.
        needs: What it reads of `PolicyStep` that is not there by itself: `old_mean`, `old_velocity`,
            `sequence_log_ratio`; or a function of its parameters that says so.
    """

    def decorate(function: T) -> T:
        function.needs = needs if callable(needs) else check_needs(needs, key)  # type: ignore[attr-defined]
        return _POLICY_LOSS_REGISTRY.register(key)(function)

    return decorate


def get_policy_loss(key: str) -> Any:
    """The function registered under `key`, or found at the dotted path `key`.

    Raises:
        InputError: If there is none.
    """
    return _POLICY_LOSS_REGISTRY.get(key)


def policy_loss_path(key: str) -> str:
    """The dotted path of a registered loss, without importing it."""
    return _POLICY_LOSS_REGISTRY.path(key)


def list_policy_losses() -> list[str]:
    """All registered keys."""
    return _POLICY_LOSS_REGISTRY.keys()


def check_needs(needs: Collection[str], key: str) -> frozenset[str]:
    """`needs` as a set.

    Raises:
        InputError: If it names something that a `PolicyStep` does not have.
    """
    for name in needs:
        if name not in (*DECLARED, *ALWAYS):
            close = nearest(name, (*DECLARED, *ALWAYS))
            hint = f" Did you mean {close!r}?" if close else ""
            raise InputError(
                f"policy loss {key!r} needs {name!r}, which no step has.{hint} What can be declared: "
                f"{', '.join(DECLARED)}; always there: {', '.join(ALWAYS)}."
            )
    return frozenset(needs) & frozenset(DECLARED)
