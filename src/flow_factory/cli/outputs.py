"""Where commands write their results: never over something that is there, unless --force says so and it is theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flow_factory.errors import InputError

Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a former result of this command at the same place.", show_default=False),
]


def choose_folder(output: Path | None, default: str, marker: str, force: bool) -> Path:
    """The folder to create.

    Args:
        output: As `--output`; None takes `default`, with a number added if that name is in use.
        default: Name in the present folder.
        marker: The file that every result of the command has; only a folder with it (or an empty one) is replaced.
        force: As `--force`.

    Raises:
        InputError: If the place is taken, or nothing can be written there.
    """
    if output is None:
        return _free(Path(default))
    target = output.expanduser()
    _check_parent(target)
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise InputError(f"--output {output}: a file of that name exists; give another folder.")
    if not any(target.iterdir()):
        return target
    if not force:
        raise InputError(f"--output {output} exists and is not written over; give another folder, or --force.")
    if not (target / marker).is_file():
        raise InputError(
            f"--output {output} is no result of this command (it has no {marker}), so --force does not replace it; "
            f"give another folder, or remove this one."
        )
    return target


def choose_file(output: Path | None, default: str, force: bool) -> Path:
    """The file to write; as `choose_folder`.

    Raises:
        InputError: If the place is taken, or nothing can be written there.
    """
    if output is None:
        return _free(Path(default))
    target = output.expanduser()
    _check_parent(target)
    if target.is_dir():
        raise InputError(f"--output {output} is a folder; give the name of a file.")
    if target.exists() and not force:
        raise InputError(f"--output {output} exists and is not written over; give another name, or --force.")
    return target


def _free(path: Path) -> Path:
    _check_parent(path)
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def _check_parent(target: Path) -> None:
    folder = target.absolute().parent
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"--output {target}: {folder} is not a folder; give another place.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output {target}: nothing can be written in {folder}; give another place (--output).")
