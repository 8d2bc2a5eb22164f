"""Strict reading of `rewards[].params` into a reward's own dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flow_factory.errors import InputError
from flow_factory.hparams.validation import validate_dataclass


def parse_params(params_class: type | None, values: Mapping[str, Any] | None, *, reward: str) -> Any:
    """Validates the settings of one reward, by the rules of the configuration itself.

    Args:
        params_class: The reward's `Params` dataclass, or None if it takes no settings.
        values: What the configuration gives.
        reward: The reward's name, for messages.

    Returns:
        An instance of `params_class`, or None if there is none.

    Raises:
        InputError: If a key is unknown (with the nearest known one), missing, or has a wrong value; all at once.
        TypeError: If `params_class` is not a dataclass.
    """
    place = f"rewards[{reward}]"
    if params_class is None:
        if values:
            raise InputError(f"{place}.params: this reward takes none; remove {', '.join(map(repr, values))}.")
        return None
    if not dataclasses.is_dataclass(params_class):
        raise TypeError(f"Params of reward {reward!r} must be a dataclass; {params_class!r} is not.")
    return validate_dataclass(params_class, values, path=(place, "params"))
