"""Strict reading of `rewards[].params` into a reward's own dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flow_factory.errors import InputError


def parse_params(params_class: type | None, values: Mapping[str, Any] | None, *, reward: str) -> Any:
    """Validates the settings of one reward.

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
    place = f"rewards[{reward}].params"
    values = dict(values or {})
    if params_class is None:
        if values:
            raise InputError(f"{place}: this reward takes no params; remove {', '.join(map(repr, values))}.")
        return None
    if not dataclasses.is_dataclass(params_class):
        raise TypeError(f"Params of reward {reward!r} must be a dataclass; {params_class!r} is not.")

    problems = _unknown_keys(params_class, values, place) + _flags_for_numbers(params_class, values, place)
    if "__pydantic_config__" not in vars(params_class):
        config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)
        params_class.__pydantic_config__ = config  # type: ignore[attr-defined]  # how pydantic configures a stdlib dataclass
    try:
        parsed = TypeAdapter(params_class).validate_python(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            if item["type"] == "unexpected_keyword_argument":
                continue  # named above, with the nearest key
            path = ".".join(str(part) for part in item["loc"])
            given = "" if item["type"] == "missing" else f" (got {item['input']!r})"
            problems.append(f"{place}{'.' + path if path else ''}: {item['msg']}{given}.")
        raise InputError("\n".join(problems)) from error
    if problems:
        raise InputError("\n".join(problems))
    return parsed


def _unknown_keys(params_class: Any, values: Mapping[str, Any], place: str) -> list[str]:
    known = [f.name for f in dataclasses.fields(params_class) if f.init]
    problems = []
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            problems.append(f"{place}.{key}: unknown key.{hint} Known: {', '.join(known) or '(none)'}.")
    return problems


def _flags_for_numbers(params_class: Any, values: Mapping[str, Any], place: str) -> list[str]:
    """A bool is an int to Python, and `no` is a bool to YAML: where a number is meant, both are mistakes."""
    hints = typing.get_type_hints(params_class)
    problems = []
    for key, value in values.items():
        hint = hints.get(key)
        choices = {hint, *typing.get_args(hint)}
        if isinstance(value, bool) and choices & {int, float} and bool not in choices:
            problems.append(
                f"{place}.{key}: a number is expected (got {value!r}; YAML reads yes, no, on, off as flags)."
            )
    return problems
