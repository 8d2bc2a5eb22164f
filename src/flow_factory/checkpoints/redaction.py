"""Keeps keys and passwords out of what a run writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

# The last word decides: `api_key`, `hf_token` and `headers.Authorization` are secrets, `max_tokens`, `token_ids` and
# `tokenizer` are not.
_SECRET = re.compile(
    r"(?:^|[_\-.])(?:api[_-]?keys?|access[_-]?keys?|secret[_-]?keys?|private[_-]?keys?|token|secrets?|password|passwd"
    r"|credentials?|authorization)$",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Whether a field's name says that its value is a secret."""
    return _SECRET.search(key) is not None


def redact(value: Any) -> Any:
    """A copy of nested mappings and lists in which the text under secret-looking keys is replaced."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if isinstance(item, str) and item and is_secret(str(key)) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(redact(item) for item in value)
    return value
