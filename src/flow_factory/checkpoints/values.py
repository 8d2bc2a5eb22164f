"""JSON for Python values, exact in both directions and never invalid.

Plain JSON loses NaN and infinities (or becomes invalid), tuples and keys that are not strings. Those, and only
those, are written as a mapping with one tagged key: `{"$float": "nan"}`, `{"$tuple": [...]}`, `{"$dict": [[k, v]]}`.
Floats are written by `repr`, integers in full, so both read back exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, path: str = "", leaf: Callable[[Any, str], Any] | None = None) -> Any:
    """A JSON-able form of nested dicts, lists, tuples and scalars.

    Args:
        value: What to encode.
        path: Where `value` stands, for messages.
        leaf: Called as `leaf(value, path)` for other types; returns a tagged mapping, or raises.

    Raises:
        TypeError: For a type that has no exact form, naming its place.
    """
    # `type(...) is` and not isinstance: a numpy float64 *is* a float but would come back as another type.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        items = [(key, encode(item, f"{path}/{key}", leaf)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[encode(key, f"{path}/<key>"), item] for key, item in items]}
    if isinstance(value, list):
        return [encode(item, f"{path}/{i}", leaf) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{path}/{i}", leaf) for i, item in enumerate(value)]}
    if leaf is not None:
        return leaf(value, path)
    raise TypeError(f"{path or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}: not storable")


def decode(value: Any, leaf: Callable[[str, Any], Any] | None = None) -> Any:
    """Inverse of `encode`.

    Args:
        value: What `json.loads` returned.
        leaf: Called as `leaf(tag, payload)` for tags of other types.

    Raises:
        ValueError: For a tag nobody knows.
    """
    if isinstance(value, list):
        return [decode(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("$"):
        return {key: decode(item, leaf) for key, item in value.items()}
    payload = value[tag]
    if tag == "$float":
        return _NON_FINITE[payload]
    if tag == "$tuple":
        return tuple(decode(item, leaf) for item in payload)
    if tag == "$dict":
        return {decode(key): decode(item, leaf) for key, item in payload}
    if leaf is not None:
        return leaf(tag, payload)
    raise ValueError(f"unknown tag {tag!r}")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON text of `encode(value)`."""
    return json.dumps(encode(value), indent=indent, allow_nan=False, ensure_ascii=False)


def loads(text: str) -> Any:
    """Inverse of `dumps`."""
    return decode(json.loads(text))
