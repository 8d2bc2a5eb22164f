"""Durations, numbers and nested settings as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def format_duration(seconds: float) -> str:
    """`0.4s`, `12.3s`, `1m20s`, `2h05m`, `3d04h`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_number(value: float) -> str:
    """Four significant digits, without needless zeros for whole numbers."""
    value = float(value)  # counts are whole numbers of type int, which have no is_integer before Python 3.12
    if value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.2e}"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists of mappings as one mapping of dotted names to values; lists of scalars stay whole."""
    if isinstance(value, Mapping) and (value or not prefix):
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = [(f"{prefix}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= flatten(item, name)
    return flat
