"""Functions that a configuration selects by name: their keyword parameters are fields like any other.

`train.advantage_aggregation` and `train.policy_loss` name functions. What such a function takes beyond its fixed
arguments is read off its signature and validated by the rules of the configuration: unknown names with the nearest one,
wrong types, missing values, all with the place where they were written.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic.errors import PydanticSchemaGenerationError

from flow_factory.errors import InputError
from flow_factory.hparams.errors import Path
from flow_factory.hparams.validation import validate_dataclass
from flow_factory.registry import describe_object

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bind_params(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    fixed: tuple[str, ...],
    path: Path,
    place: str = "",
    inherited: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Values for a function's keyword parameters.

    A parameter takes its value from `given`; else from `inherited`, so that a function which asks for `clip_range` gets
    `train.clip_range`; else its own default.

    Args:
        function: A function, or a class that is built with the parameters.
        given: What the configuration writes under `path`.
        fixed: Names of the arguments that the caller passes by position.
        path: The field, for errors: `("train", "policy_loss_params")`.
        place: Where it was written, for errors.
        inherited: Values by name that are used where a parameter has that name.

    Returns:
        Keyword arguments for the call.

    Raises:
        InputError: If the function does not take the fixed arguments, a name is unknown, a value is missing or of the
            wrong type.
    """
    parameters, is_open = _keyword_parameters(function, fixed)
    hints = _hints(function, parameters)
    known = {name: inherited[name] for name in parameters if inherited and name in inherited}
    extra = {name: value for name, value in given.items() if name not in parameters} if is_open else {}
    fields: list[Any] = []
    for name, parameter in parameters.items():
        field: Any = dataclasses.field()
        if parameter.default is not inspect.Parameter.empty:
            field = dataclasses.field(default_factory=lambda value=parameter.default: copy.deepcopy(value))
        fields.append((name, hints.get(name, Any), field))
    arguments = dataclasses.make_dataclass(f"Parameters of {function.__name__}", fields, kw_only=True)
    values = {**known, **{name: value for name, value in given.items() if name not in extra}}
    try:
        bound = validate_dataclass(arguments, values, path, place)
    except PydanticSchemaGenerationError as error:
        raise InputError(
            f"{describe_object(function)} has a parameter of a type that no configuration can write ({error}). "
            f"Annotate its keyword parameters with int, float, bool, str, Literal, or lists, tuples and dicts of them."
        ) from error
    return {**{name: getattr(bound, name) for name in parameters}, **extra}


def _keyword_parameters(
    function: Callable[..., Any], fixed: tuple[str, ...]
) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters after the fixed ones, and whether any other name is accepted too (`**params`)."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(positional) < len(fixed) and not takes_any:
        raise InputError(
            f"{describe_object(function)} takes {len(positional)} positional arguments; it is called with "
            f"({', '.join(fixed)}), so begin its signature with them."
        )
    rest = [*positional[len(fixed) :], *(p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)]
    return {p.name: p for p in rest}, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _hints(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Evaluated annotations of the given parameters alone; those of the fixed arguments may be for type checkers."""
    names = {n: p.annotation for n, p in parameters.items() if p.annotation is not inspect.Parameter.empty}
    code = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
    holder = type("Annotations", (), {"__annotations__": names})
    try:
        return get_type_hints(holder, globalns=getattr(code, "__globals__", {}), include_extras=True)
    except (NameError, TypeError) as error:
        raise InputError(
            f"{describe_object(function)}: an annotation cannot be read ({error}); import the types of its keyword "
            f"parameters where it is defined."
        ) from error
