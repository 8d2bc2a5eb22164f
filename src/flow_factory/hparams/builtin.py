"""Finds what ships with the package under `builtin/<name>`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flow_factory.errors import InputError
from flow_factory.hparams.errors import nearest

Kind = Literal["model", "prompts"]
PREFIX = "builtin/"
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def builtin_names(kind: Kind) -> list[str]:
    """Names of the shipped models or prompt sets."""
    if kind == "model":
        return sorted(path.parent.name for path in ASSETS.glob("*/model_index.json"))
    return sorted(path.name for path in (ASSETS / "prompts").glob("*") if path.is_dir() and path.name[0] not in "._")


def is_builtin(path: str) -> bool:
    """True for `builtin/<name>`."""
    return path.startswith(PREFIX)


def resolve_builtin(path: str, kind: Kind) -> str:
    """The folder of `builtin/<name>`; any other path is returned as it is.

    Args:
        path: A path, a Hub id, or `builtin/<name>`.
        kind: What is looked for.

    Raises:
        InputError: If nothing of that name ships; the message lists the names.
    """
    if not is_builtin(path):
        return path
    name = path[len(PREFIX) :].strip("/")
    names = builtin_names(kind)
    if name not in names:
        close = nearest(name, names)
        hint = f" Did you mean {PREFIX}{close}?" if close else ""
        what = "model" if kind == "model" else "prompt set"
        listed = ", ".join(PREFIX + known for known in names) or "none"
        raise InputError(f"there is no built-in {what} {path!r}.{hint} Built in: {listed}.")
    folder = ASSETS / name if kind == "model" else ASSETS / "prompts" / name
    return str(folder)
