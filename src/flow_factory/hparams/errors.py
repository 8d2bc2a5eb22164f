"""How a wrong configuration is reported: every problem names value, place and remedy, and all come in one message."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flow_factory.errors import InputError

Path = tuple[str | int, ...]
Add = Callable[[Path, str], None]  # receives where a problem is, and what


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: Where in the configuration, e.g. `("rewards", 0, "weight")`.
        message: What is wrong and what would be right.
        place: Where it was written, e.g. `run.yaml:12` or `override train.seed=x`; empty if unknown.
    """

    path: Path
    message: str
    place: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{show_path(self.path)}{place}: {self.message}" if self.path else f"{self.message}{place}"


class ConfigError(InputError):
    """The configuration is wrong; `problems` lists everything found in one go."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            text = str(self.problems[0])
        else:
            text = "\n".join([f"{len(self.problems)} problems:", *(f"  {problem}" for problem in self.problems)])
        super().__init__(text)


class FieldError(ValueError):
    """Raised in `__post_init__` of an arguments class to say which field is wrong.

    Args:
        field: Name of the field.
        message: What is wrong and what would be right, without the field's name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def show_path(path: Path) -> str:
    """`("rewards", 0, "weight")` -> `rewards[0].weight`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most like `word`, ignoring case and `-`/`_`, or None if none is close."""
    plain = {_plain(candidate): candidate for candidate in known}
    if _plain(word) in plain:
        return plain[_plain(word)]
    close = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
