"""Brings written values into the shape of the field they are given to, before pydantic validates them.

YAML does not know whether `no` is a boolean or a word, or whether `2024` is a number or a name: the field's type does.
A boolean is accepted only where a boolean is meant. Unknown keys are collected with the nearest known key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from flow_factory.hparams.errors import Path, Problem, nearest, show_path
from flow_factory.hparams.yaml_source import Origins

_YES = {"yes", "on", "true"}
_NO = {"no", "off", "false"}


class Shaper:
    """Walks values along type annotations.

    Args:
        origins: Where the values were written and as which text.

    Attributes:
        problems: What was found wrong on the way.
    """

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.problems: list[Problem] = []

    def section(
        self, cls: type, values: Mapping[str, Any], path: Path, also_known: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The mapping for dataclass `cls` with every known value shaped and unknown keys removed (as problems).

        Args:
            cls: The dataclass.
            values: What was written for it.
            path: Where that is.
            also_known: Names that are valid beside the fields of `cls`, for suggestions only.
        """
        hints = field_types(cls)
        shaped: dict[str, Any] = {}
        for key, value in values.items():
            here = (*path, key)
            if key in hints:
                shaped[key] = self.value(hints[key], value, here)
            else:
                self.problems.append(self._unknown(cls, here, [*hints, *also_known]))
        return shaped

    def value(self, annotation: Any, value: Any, path: Path) -> Any:
        """`value` shaped for `annotation`; what does not fit is returned as it is, for pydantic to refuse."""
        members = _members(annotation)
        if value is None or any(member is Any for member in members):
            return value
        if isinstance(value, Mapping):
            return self._mapping(members, value, path)
        if isinstance(value, (list, tuple)):
            return self._sequence(members, list(value), path)
        return self._scalar(members, value, path)

    def _mapping(self, members: list[Any], value: Mapping[str, Any], path: Path) -> Any:
        for member in members:
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                return self.section(member, value, path)
        for member in members:
            if get_origin(member) is dict:
                _, item = get_args(member)
                return {key: self.value(item, entry, (*path, key)) for key, entry in value.items()}
        for member in members:
            item = _single_item(member)
            if item is not None and any(dataclasses.is_dataclass(m) for m in _members(item)):
                return [self.value(item, value, (*path, 0))]
        return dict(value)

    def _sequence(self, members: list[Any], value: list[Any], path: Path) -> Any:
        for member in members:
            item = _single_item(member)
            if item is not None:
                return [self.value(item, entry, (*path, index)) for index, entry in enumerate(value)]
            if get_origin(member) is tuple and len(get_args(member)) == len(value):
                pairs = zip(get_args(member), value, strict=True)
                return tuple(self.value(item, entry, (*path, index)) for index, (item, entry) in enumerate(pairs))
        return value

    def _scalar(self, members: list[Any], value: Any, path: Path) -> Any:
        words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
        text = value if isinstance(value, str) else self.origins.text(path)
        is_bool = isinstance(value, bool)
        numeric = int in members or float in members
        if is_bool and bool in members:
            return value
        if not is_bool and isinstance(value, (int, float)) and (numeric or value in words):
            return value
        if text is not None and text in words:
            return text
        if isinstance(value, str):
            return self._word(members, words, value, numeric)
        if is_bool and text is None:
            # A YAML 1.1 reader has turned the word `no` into False before it came here as a Python value.
            meant = [word for word in words if word in (("yes", "on") if value else ("no", "off"))]
            if meant:
                return meant[0]
        if str in members:
            return text if text is not None else str(value)
        if is_bool and numeric:
            self.problems.append(
                Problem(path, f"{_shown(value, text)} is a boolean where a number is meant.", self.origins.place(path))
            )
            return _Refused
        if not is_bool and bool in members:
            self.problems.append(
                Problem(path, f"{_shown(value, text)} is a number; write true or false.", self.origins.place(path))
            )
            return _Refused
        return text if words and text is not None else value

    def _word(self, members: list[Any], words: list[Any], value: str, numeric: bool) -> Any:
        if value in words or str in members:
            return value
        if bool in members and value.lower() in _YES | _NO:
            return value.lower() in _YES
        if numeric:
            number = _number(value)
            if number is not None:
                return number
        return value

    def _unknown(self, cls: type, path: Path, known: list[str]) -> Problem:
        key = str(path[-1])
        place = self.origins.nearest_place(path)
        if is_class_fact(cls, key):
            return Problem(path, "is fixed by the class and cannot be set; remove it.", place)
        if key == "num_batches_per_epoch":
            return Problem(
                path,
                "is derived from unique_sample_num_per_epoch, group_size, per_device_batch_size and num_processes; "
                "remove it.",
                place,
            )
        others = _trainers_with(cls, key)
        if others:
            return Problem(path, f"unknown key; it belongs to train.trainer_type {', '.join(others)}, not here.", place)
        close = nearest(key, known)
        hint = (
            f"did you mean {show_path((*path[:-1], close))}?"
            if close
            else f"known here: {', '.join(sorted(known)) or 'nothing'}."
        )
        return Problem(path, f"unknown key; {hint}", place)


class _RefusedType:
    """Stands for a value about which a problem was already reported."""


_Refused = _RefusedType()


@cache
def _field_types(cls: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(cls) if f.init)


def field_types(cls: type) -> dict[str, Any]:
    """Name -> annotation of the fields of a dataclass that can be given."""
    return dict(_field_types(cls))


def _trainers_with(cls: type, key: str) -> list[str]:
    """The registered trainers whose arguments have the field `key`, if `cls` are the arguments of another one."""
    from flow_factory.hparams.training_args import get_training_args_class, training_args_keys
    from flow_factory.hparams.training_args._common import CommonTrainingArguments

    if not issubclass(cls, CommonTrainingArguments):
        return []
    return [name for name in training_args_keys() if key in field_types(get_training_args_class(name))]


def is_class_fact(cls: type, name: str) -> bool:
    """True if `name` is a class-level constant (a ClassVar or a derived field) of `cls`, not a settable field."""
    hints = get_type_hints(cls, include_extras=True)
    if name in hints:
        return get_origin(hints[name]) is ClassVar or hints[name] is ClassVar or name not in field_types(cls)
    return name in ("execution_contract", "paradigm", "required_trainable_roles")


def describe(annotation: Any) -> str:
    """What a field takes, in words: "a whole number, or one of 'auto'"."""
    parts: list[str] = []
    for member in _members(annotation):
        origin, args = get_origin(member), get_args(member)
        if origin is Literal:
            parts.append(" or ".join(repr(word) for word in args))
        elif origin in (list, tuple) and args:
            count = "" if origin is list or args[-1] is Ellipsis else f"{len(args)} values, each "
            parts.append(f"a list of {count}{describe(args[0])}")
        elif origin is dict:
            parts.append(f"a mapping to {describe(args[1])}")
        elif dataclasses.is_dataclass(member):
            parts.append("a mapping")
        else:
            parts.append(_NAMES.get(member, getattr(member, "__name__", str(member))))
    return ", or ".join(dict.fromkeys(parts))


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, without Annotated wrappers."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _single_item(annotation: Any) -> Any:
    """The item type of `list[X]` or `tuple[X, ...]`, else None."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is list and args:
        return args[0]
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return args[0]
    return None


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def _shown(value: Any, text: str | None) -> str:
    return text if text is not None else repr(value)
