"""JSON lines, read strictly and with the standard library alone: one object a line, nothing dropped or guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_factory.errors import InputError


def numbered_lines(path: Path, what: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1.

    Args:
        path: The file.
        what: What it is, for the message ("prompt file").

    Raises:
        InputError: If the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{what} {path}: {error.strerror or error}.") from error
    # Not splitlines(): that also cuts at characters that may stand inside a text, such as U+2028.
    yield from enumerate(data.split(b"\n"), start=1)


def decode_line(raw: bytes, number: int, place: str) -> str:
    """A line as text without surrounding white space; a byte order mark may start the first.

    Raises:
        InputError: If it is not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8.") from error


def parse_object(text: str, place: str, example: str) -> dict[str, Any]:
    """The object that a line holds.

    Args:
        text: The line.
        place: `file:line`, for messages.
        example: What a line looks like, for messages.

    Raises:
        InputError: If it is not JSON, not an object, or uses what JSON leaves undefined (a key given twice, NaN).
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: malformed JSON: {error.msg} (column {error.colno}); write one object a line."
        ) from error
    except _BadValue as error:
        raise InputError(f"{place}: {error}") from error
    except RecursionError as error:
        raise InputError(f"{place}: lists or objects are nested too deeply to be read; flatten them.") from error
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise InputError(f"{place}: a number has too many digits; write it as a string.") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: a {kind_of(value)} instead of an object; write {example}.")
    return value


def has_lone_surrogate(text: str) -> bool:
    """Whether half of a surrogate pair stands in a text: JSON can spell it, UTF-8 and tokenizers cannot."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def kind_of(value: Any) -> str:
    """JSON's word for the kind of a value."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


class _BadValue(ValueError):
    """A JSON line that Python accepts and this format does not."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise _BadValue(f'"{twice}" is given twice; keep one.')
    return row


def _no_constant(word: str) -> Any:
    raise _BadValue(f"{word} is not JSON; write null or a number.")
