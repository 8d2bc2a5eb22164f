"""Reads YAML into plain values while remembering where each value was written and its original text.

Scalars are read by the rules of YAML 1.2: only `true` and `false` are booleans, so an unquoted `no`, `on` or `12:30`
stays text, and `1e-4` is a number. What a word means is decided later by the type of the field it is given to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from flow_factory.errors import InputError
from flow_factory.hparams.errors import ConfigError, Path, Problem, show_path

# How the places of values from the command line begin.
OVERRIDE = "override"
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SPECIAL = {".nan": "nan", ".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}
_STANDARD_TAGS = "tag:yaml.org,2002:"
# A few anchors that name each other ten times over stand for billions of values; no run needs a thousandth of this.
_MAX_VALUES = 100_000
_KNOWN_TAGS = {"map", "seq", "str", "int", "float", "bool", "null", "merge", "timestamp", "value"}


@dataclass(frozen=True)
class Origin:
    """Where a value was written.

    Attributes:
        place: `file:line`, `override 'key=value'`, or a name such as `<python>`.
        text: The scalar as it was written; None for lists, mappings and values that came from Python.
    """

    place: str
    text: str | None = None


@dataclass
class Origins:
    """Origins of all written values by path. A single mapping given for a list of one is found under both paths."""

    entries: dict[Path, Origin] = field(default_factory=dict)
    default_place: str = ""

    def find(self, path: Path) -> Origin | None:
        """The origin of exactly this path, or None if the value was not written (a default)."""
        found = self.entries.get(path)
        if found is None:
            found = self.entries.get(tuple(part for part in path if not isinstance(part, int)))
        return found

    def place(self, path: Path) -> str:
        """Where this value was written; for a default, that it is one."""
        found = self.find(path)
        if found is not None:
            return found.place
        return "default value" if path and not self.default_place.startswith("<") else self.default_place

    def nearest_place(self, path: Path) -> str:
        """Where this value or the closest enclosing section was written."""
        for length in range(len(path), 0, -1):
            found = self.find(path[:length])
            if found is not None:
                return found.place
        return self.default_place

    def text(self, path: Path) -> str | None:
        """The scalar's own text, if it was written as a plain scalar (not the result of an interpolation)."""
        found = self.find(path)
        return found.text if found is not None and found.text is not None and "${" not in found.text else None

    def overridden(self) -> list[str]:
        """Dotted paths of the values that an override gave, for example on the command line."""
        given = [path for path, origin in self.entries.items() if origin.place.startswith(OVERRIDE)]
        sections = {path[:length] for path in self.entries for length in range(1, len(path))}
        return sorted(show_path(path) for path in given if path not in sections)

    def replace(self, path: Path, entries: dict[Path, Origin]) -> None:
        """Forgets everything under `path` and remembers `entries` instead."""
        for known in [known for known in self.entries if known[: len(path)] == path]:
            del self.entries[known]
        self.entries.update(entries)


def resolve_plain(text: str) -> Any:
    """The value of an unquoted scalar: null, boolean, integer, float or text."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if text.lower() in _SPECIAL:
        return float(_SPECIAL[text.lower()])
    # Digits with a leading zero ("010") are octal to some readers and decimal to others, so they stay text.
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?[\d_]+", text):
        return float(text)
    return text


def read_yaml_file(path: str | FilePath) -> tuple[dict[str, Any], Origins]:
    """Reads a YAML file.

    Returns:
        The plain mapping (interpolations not yet resolved) and the origins of its values.

    Raises:
        InputError: If the file is missing, is not readable as UTF-8 text, is not valid YAML, has duplicate keys or
            is not a mapping.
    """
    file = FilePath(path)
    if file.is_dir():
        raise InputError(f"configuration {str(path)!r} is a folder; give the YAML file in it.")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"configuration {str(path)!r} does not exist (looked in {file.absolute().parent}).") from error
    except UnicodeDecodeError as error:
        raise InputError(f"configuration {str(path)!r} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise InputError(f"configuration {str(path)!r} cannot be read: {error.strerror}.") from error
    value, entries = parse_yaml(text, str(path))
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise InputError(f"{path}: the configuration must be a mapping of sections, not {_kind(value)}.")
    return value, Origins(entries, default_place=str(path))


def parse_yaml(text: str, name: str, prefix: Path = (), place: str | None = None) -> tuple[Any, dict[Path, Origin]]:
    """Parses YAML text.

    Args:
        text: The YAML.
        name: The file's name, for places.
        prefix: Path under which the values will live.
        place: A fixed place for all values instead of `name:line` (for overrides).

    Raises:
        ConfigError: On a syntax error, a duplicate key (with both lines), a tag that is not plain data, or values that
            are nested too deeply or are too many.
    """
    reader = _NodeReader(name, place)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = reader.read(node, prefix) if node is not None else None
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, name, place)]) from error
    except RecursionError as error:
        message = "lists or mappings are nested too deeply to be read; no section needs more than a few levels."
        raise ConfigError([Problem((), message, place or name)]) from error
    if reader.problems:
        raise ConfigError(reader.problems)
    return value, reader.entries


class _NodeReader:
    def __init__(self, name: str, place: str | None) -> None:
        self.name = name
        self.fixed_place = place
        self.entries: dict[Path, Origin] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()  # nodes being read, to refuse an anchor that contains itself

    def place(self, node: yaml.Node) -> str:
        return self.fixed_place or f"{self.name}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, path: Path) -> Any:
        tag = node.tag or ""
        if not tag.startswith(_STANDARD_TAGS) or tag[len(_STANDARD_TAGS) :] not in _KNOWN_TAGS:
            self.problems.append(
                Problem(
                    path, f"the YAML tag {tag!r} is not plain data; remove it and write the value.", self.place(node)
                )
            )
            return None
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        self.entries[path] = Origin(self.place(node), text)
        if len(self.entries) > _MAX_VALUES:
            message = f"stands for more than {_MAX_VALUES} values, through its anchors; write out what is meant."
            raise ConfigError([Problem(path[:1], message, self.place(node))])
        if isinstance(node, yaml.ScalarNode):
            return resolve_plain(node.value) if node.style is None else node.value
        if id(node) in self._open:
            self.problems.append(Problem(path, "this anchor contains itself.", self.place(node)))
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._read_mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _read_mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _STANDARD_TAGS + "merge":
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in reversed(parts):
                    if isinstance(part, yaml.MappingNode):
                        merged.update(self._read_mapping(part, path))
                    else:
                        self.problems.append(Problem(path, "`<<` merges mappings only.", self.place(value_node)))
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(path, "keys must be plain words.", self.place(key_node)))
                continue
            key = key_node.value
            if key in lines:
                first, second = self.place(lines[key]), self.place(key_node)
                self.problems.append(
                    Problem((*path, key), f"the key {key!r} is given twice, first at {first}; keep one.", second)
                )
                continue
            lines[key] = key_node
            own[key] = self.read(value_node, (*path, key))
            # The line of the key, not of the value: a block value starts one line below.
            found = self.entries.get((*path, key))
            if found is not None:
                self.entries[(*path, key)] = Origin(self.place(key_node), found.text)
        return {**merged, **own}


def apply_overrides(values: dict[str, Any], origins: Origins, overrides: Sequence[str]) -> None:
    """Applies `key=value` overrides in place, one by one, each remembered as the origin of its path.

    The value is read as YAML (`train.clip_range=[-1e-4, 1e-4]`, `log.run_name=null`). List items are addressed by
    `rewards[0].weight` or `rewards.0.weight`.

    Raises:
        InputError: If an override has no `=`, an empty key, or leads through something that is not a section.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        place = f"{OVERRIDE} {override!r}"
        path = _parse_key(key.strip())
        if not equals or path is None:
            raise InputError(
                f"{place} is not of the form key=value; write for instance train.learning_rate=1e-5 "
                f"or rewards[0].weight=0.5."
            )
        value, entries = parse_yaml(text, override, prefix=path, place=place)
        if not entries:
            entries = {path: Origin(place, text)}
        _set_path(values, path, value, place)
        origins.replace(path, entries)
        for length in range(1, len(path)):
            origins.entries.setdefault(path[:length], Origin(place))


def _parse_key(key: str) -> Path | None:
    parts: list[str | int] = []
    for name in re.sub(r"\[(\d+)\]", r".\1", key).split("."):
        if not name:
            return None
        parts.append(int(name) if name.isdigit() else name)
    return tuple(parts) if parts and isinstance(parts[0], str) else None


def _set_path(root: dict[str, Any], path: Path, value: Any, place: str) -> None:
    container: Any = root
    for depth, part in enumerate(path):
        here = path[:depth]
        last = depth == len(path) - 1
        if isinstance(container, list):
            if not isinstance(part, int) or part >= len(container):
                raise InputError(
                    f"{place}: {show_path(here)} is a list of {len(container)}; address an item as "
                    f"{show_path((*here, 0))}."
                )
        elif not isinstance(container, dict):
            raise InputError(
                f"{place}: {show_path(here)} is {_kind(container)}, not a section, so nothing is inside it."
            )
        elif isinstance(part, int):
            if part == 0 and not last:  # a single mapping stands for a list of one
                continue
            raise InputError(f"{place}: {show_path(here)} is not a list.")
        key: Any = part
        if last:
            container[key] = value
            return
        if isinstance(container, dict) and container.get(key) is None:
            container[key] = {}
        container = container[key]


def _syntax_problem(error: yaml.YAMLError, name: str, place: str | None) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = place or (f"{name}:{mark.line + 1}" if mark is not None else name)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    return Problem((), f"not valid YAML: {what}{f' {context}' if context else ''}.", where)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else f"the value {value!r}"
