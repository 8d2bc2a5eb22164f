"""Objectives as pure tensor functions: tensors in, loss and metrics out. The package itself imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow_factory.objectives.common import agg_loss, masked_mean
    from flow_factory.objectives.grpo import grpo_loss
    from flow_factory.objectives.kl import KL_KINDS, kl_penalty

__all__ = ["KL_KINDS", "agg_loss", "grpo_loss", "kl_penalty", "masked_mean"]

_HOMES = {"agg_loss": "common", "masked_mean": "common", "grpo_loss": "grpo", "KL_KINDS": "kl", "kl_penalty": "kl"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
