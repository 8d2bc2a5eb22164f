"""Where commands write their results: never over something that is there, unless --force says so and it is theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
    # Resolved, because the folder itself is renamed into place: "." has no name, and a link would be replaced.
    target = output.expanduser().resolve()
    _check_parent(target)
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise InputError(f"--output {output}: a file of that name exists; give another folder.")
    if Path.cwd().is_relative_to(target):
        raise InputError(
            f"--output {output} exists and is not written over, for it is the present folder or above it; name a new "
            f"folder, such as --output {output / 'results'}."
        )
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


def write_folder(target: Path, fill: Callable[[Path], None], output: Path | None, marker: str, force: bool) -> Path:
    """Fills a folder and puts it in its place when it is complete, which `choose_folder` may have seen minutes ago.

    Args:
        target: As `choose_folder` gave it.
        fill: Writes into the folder it is given.
        output: As `--output`; with None the next free name is taken if `target` has been taken meanwhile.
        marker: As for `choose_folder`.
        force: As `--force`.

    Returns:
        The folder written.

    Raises:
        InputError: If something was put at `--output` meanwhile that may not be replaced; that stays as it is.
    """
    from flow_factory.checkpoints.atomic import fsync_tree, publish_folder, unfinished_folder

    named = output is not None
    default = target
    with unfinished_folder(target) as folder:
        fill(folder)
        fsync_tree(folder)
        while True:
            if named and target.is_dir() and not any(target.iterdir()):
                target.rmdir()
            try:
                publish_folder(folder, target, replace=named and force and (target / marker).is_file())
            except FileExistsError as error:
                if named:
                    raise InputError(
                        f"--output {output}: something was put there in the meantime and is not written over; nothing "
                        f"is kept of this result. Start again with another folder."
                    ) from error
                target = _free(default)
            else:
                return target


def choose_file(output: Path | None, default: str, form: str, force: bool) -> Path:
    """The file to write; as `choose_folder`.

    Args:
        output: As `--output`; None takes `default`, with a number added if that name is in use.
        default: Name in the present folder.
        form: What `format` says in the JSON files that the command writes; only such a file is replaced.
        force: As `--force`.

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
    if target.exists() and not _is_result(target, form):
        raise InputError(
            f"--output {output} is no result of this command (no JSON with format: {form!r}), so --force does not "
            f"replace it; give another name, or remove this file."
        )
    return target


def _is_result(file: Path, form: str) -> bool:
    if not file.is_file():  # a device or a pipe, which must not be read
        return False
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("format") == form


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
