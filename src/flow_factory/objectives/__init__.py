"""Objectives as pure tensor functions: tensors in, loss and metrics out. The package itself imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flow_factory.objectives.registry import get_policy_loss, list_policy_losses, register_policy_loss

if TYPE_CHECKING:
    from flow_factory.objectives.awm import awm_loss
    from flow_factory.objectives.common import agg_loss, masked_mean
    from flow_factory.objectives.crd import crd_loss
    from flow_factory.objectives.dgpo import dgpo_loss
    from flow_factory.objectives.dpo import dpo_loss
    from flow_factory.objectives.grpo import clipped_surrogate, grpo_loss
    from flow_factory.objectives.kl import KL_KINDS, kl_penalty
    from flow_factory.objectives.nft import nft_loss
    from flow_factory.objectives.policy_step import PolicyStep

__all__ = [
    "KL_KINDS",
    "PolicyStep",
    "agg_loss",
    "awm_loss",
    "clipped_surrogate",
    "crd_loss",
    "dgpo_loss",
    "dpo_loss",
    "get_policy_loss",
    "grpo_loss",
    "kl_penalty",
    "list_policy_losses",
    "masked_mean",
    "nft_loss",
    "register_policy_loss",
]

_HOMES = {
    "KL_KINDS": "kl",
    "PolicyStep": "policy_step",
    "agg_loss": "common",
    "awm_loss": "awm",
    "clipped_surrogate": "grpo",
    "crd_loss": "crd",
    "dgpo_loss": "dgpo",
    "dpo_loss": "dpo",
    "grpo_loss": "grpo",
    "kl_penalty": "kl",
    "masked_mean": "common",
    "nft_loss": "nft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
