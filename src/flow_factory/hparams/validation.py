"""Validates one dataclass at a time: shape, then pydantic, then every error in the words of the configuration file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from flow_factory.hparams.errors import ConfigError, FieldError, Path, Problem, nearest
from flow_factory.hparams.shaping import Shaper, _members, _RefusedType, describe, field_types
from flow_factory.hparams.types import STRICT
from flow_factory.hparams.yaml_source import Origins

T = TypeVar("T")


@cache
def adapter_for(cls: type[T]) -> TypeAdapter[T]:
    """The strict pydantic adapter of a stdlib dataclass, built once."""
    if "__pydantic_config__" not in dir(cls):
        cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return TypeAdapter(cls)


def validate_section(
    cls: type[T],
    values: Mapping[str, Any],
    path: Path,
    origins: Origins,
    problems: list[Problem],
    also_known: Iterable[str] = (),
) -> T | None:
    """Builds `cls` from a mapping.

    Args:
        cls: A stdlib dataclass.
        values: What was written.
        path: Where it was written.
        origins: Places and texts of the values.
        problems: Receives everything that is wrong.
        also_known: Names that are valid beside the fields of `cls`, for suggestions.

    Returns:
        The instance, or None if something was wrong.
    """
    shaper = Shaper(origins)
    shaped = shaper.section(cls, values, path, also_known)
    found = list(shaper.problems)
    refused = {problem.path for problem in found}
    instance: T | None = None
    try:
        instance = adapter_for(cls).validate_python(shaped)
    except ValidationError as error:
        found.extend(_translate(cls, error, shaped, path, origins, refused))
    problems.extend(found)
    return None if found else instance


def validate_dataclass(cls: type[T], values: Mapping[str, Any] | None, path: Path = (), place: str = "") -> T:
    """Builds any stdlib dataclass strictly from a mapping, e.g. a reward's own parameters.

    Args:
        cls: The dataclass.
        values: Its values; None means none given.
        path: Path shown in errors, e.g. `("rewards", 0, "params")`.
        place: Where that was written, shown in errors.

    Raises:
        ConfigError: If a key is unknown or a value does not fit.
    """
    problems: list[Problem] = []
    origins = Origins(default_place=place or "<python>")
    instance = validate_section(cls, values or {}, path, origins, problems)
    if problems or instance is None:
        raise ConfigError(problems)
    return instance


def _translate(
    cls: type, error: ValidationError, shaped: Any, path: Path, origins: Origins, refused: set[Path]
) -> list[Problem]:
    """Pydantic's errors as problems, one per place in the configuration."""
    by_path: dict[Path, list[Any]] = {}
    for entry in error.errors():
        if entry["type"] == "missing" and isinstance(entry["loc"][-1], int):  # a tuple that is too short
            entry["loc"], entry["type"] = entry["loc"][:-1], "tuple_too_short"
        by_path.setdefault(_written_path(entry["loc"], shaped, entry["type"]), []).append(entry)
    problems: list[Problem] = []
    for local, entries in by_path.items():
        here = (*path, *local)
        if here in refused:
            continue
        first = entries[0]
        cause = first.get("ctx", {}).get("error") if first["type"] in ("value_error", "assertion_error") else None
        if isinstance(cause, FieldError):
            here = (*here, cause.field)
            problems.append(
                Problem(here, _shown_value(shaped, (*local, cause.field)) + cause.message, origins.place(here))
            )
        elif cause is not None:
            problems.append(Problem(here, str(cause), origins.nearest_place(here)))
        elif first["type"] == "missing":
            problems.append(Problem(here, "is required and was not given; add it.", origins.nearest_place(here[:-1])))
        else:
            problems.append(Problem(here, _message(_annotation(cls, local), entries), origins.nearest_place(here)))
    return problems


def _message(annotation: Any, entries: list[Any]) -> str:
    value = entries[0]["input"]
    words = (
        [str(w) for m in _members(annotation) if get_origin(m) is Literal for w in get_args(m)] if annotation else []
    )
    bounds = [entry for entry in entries if entry["type"] in _BOUNDS]
    if bounds and len(bounds) == len([e for e in entries if e["type"] != "literal_error"]):
        kind, key = _BOUNDS[bounds[0]["type"]], bounds[0]["type"]
        limit = next(number for number in bounds[0]["ctx"].values() if not isinstance(number, str))
        return f"{value!r} must be {kind} {limit}." if key else ""
    if any(entry["type"] == "finite_number" for entry in entries):
        return f"{value!r} is not a finite number."
    if words and all(entry["type"] == "literal_error" for entry in entries):
        close = nearest(str(value), words, cutoff=0.4)
        hint = f" Did you mean {close!r}?" if close else ""
        return f"{value!r} is not one of {', '.join(map(repr, words))}.{hint}"
    if annotation is not None:
        close = nearest(str(value), words) if isinstance(value, str) else None
        hint = f" Did you mean {close!r}?" if close else ""
        return f"{value!r} is not {describe(annotation)}.{hint}"
    return f"{value!r}: {entries[0]['msg']}."


_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "greater than",
    "less_than_equal": "at most",
    "less_than": "less than",
    "too_short": "a list of length at least",
    "string_too_short": "text of length at least",
}


def _written_path(loc: tuple[Any, ...], shaped: Any, kind: str) -> Path:
    """The part of pydantic's location that names written values (it also names union branches)."""
    path: list[str | int] = []
    value = shaped
    for index, part in enumerate(loc):
        child = _child(value, part)
        if child is not _NONE:
            path.append(part)
            value = child
        elif index == 0 or (kind == "missing" and index == len(loc) - 1):
            # A default that does not validate, or a required field: not written, but it has a name.
            path.append(part)
            value = _NONE
    return tuple(path)


_NONE = object()


def _child(value: Any, part: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(part, _NONE)
    if isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
        return value[part]
    return _NONE


def _annotation(cls: type, path: Path) -> Any:
    """The annotation of the field at `path` inside dataclass `cls`, or None."""
    annotation: Any = cls
    for part in path:
        members = _members(annotation)
        target = next((m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)), None)
        if isinstance(part, str) and target is not None:
            annotation = field_types(target).get(part)
        elif isinstance(part, str):
            annotation = next((get_args(m)[1] for m in members if get_origin(m) is dict), None)
        else:
            annotation = next((get_args(m)[0] for m in members if get_origin(m) in (list, tuple)), None)
        if annotation is None:
            return None
    return annotation


def _shown_value(shaped: Any, path: Path) -> str:
    value = shaped
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return ""
    return "" if isinstance(value, (dict, _RefusedType)) else f"{value!r} "
