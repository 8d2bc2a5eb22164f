"""Files and folders that are either complete on disk or not there: temporary sibling, fsync, rename.

A crash at any point leaves the old state or the new one. What it may leave besides is a hidden sibling whose name says
that it is unfinished (`.name.tmp-…`), abandoned (`.name.removed-…`) or set aside (`.name.replaced-…`);
`clean_leftovers` settles those.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|removed|replaced)-[0-9a-f]{8}$")

# Called with a label after every step that changes the disk. Tests set it in a child process to kill that process at
# each point of a save; nothing else does.
_after_write: Callable[[str], None] | None = None


def checkpointed(label: str) -> None:
    """Marks a point between two changes of the disk, for fault-injection tests.

    Args:
        label: What has just happened ("wrote meta.json").
    """
    if _after_write is not None:
        _after_write(label)


def fsync_file(path: Path) -> None:
    """Forces a file's bytes to the disk."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def fsync_folder(path: Path) -> None:
    """Forces a folder's entries to the disk, so that a rename in it survives a power cut."""
    if os.name == "nt":  # Windows cannot open folders; its renames are journalled.
        return
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Forces every file and folder below and including `folder` to the disk."""
    for base, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_file(Path(base) / name)
        fsync_folder(Path(base))


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file that readers see either complete or in its former state.

    Args:
        path: Target file; its folder must exist.
        data: The whole content.
    """
    target = Path(path)
    temporary = _sibling(target, "tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        checkpointed(f"wrote temporary of {target.name}")
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)
    checkpointed(f"wrote {target.name}")


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """`atomic_write_bytes` of indented JSON.

    Raises:
        ValueError: For NaN and infinities, which JSON has no word for (see `values.encode`).
    """
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Builds a folder under a temporary name and gives it its real name once it is complete and on the disk.

    Args:
        target: The folder to create.
        replace: Whether an existing folder of that name may be replaced; it is set aside until the new one is in place.

    Yields:
        The temporary folder to write into.

    Raises:
        FileExistsError: If `target` exists and `replace` is false (checked before and after the body).
    """
    target = Path(target)
    if target.exists() and not replace:
        raise FileExistsError(f"{target} already exists and is not written over")
    with unfinished_folder(target) as temporary:
        yield temporary
        fsync_tree(temporary)
        checkpointed("temporary folder is durable")
        publish_folder(temporary, target, replace=replace)


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A hidden sibling of `target` to write into; the body publishes it (`publish_folder`), and an error removes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "tmp")
    temporary.mkdir()
    checkpointed("created temporary folder")
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_folder(temporary: Path, target: Path, *, replace: bool = False) -> None:
    """Renames a complete, durable folder to its real name; a former holder of the name is removed afterwards.

    Raises:
        FileExistsError: If `target` exists and `replace` is false.
    """
    former: Path | None = None
    if target.exists():
        if not replace:
            raise FileExistsError(f"{target} already exists and is not written over")
        # A kill between the two renames leaves only the `replaced` sibling: `clean_leftovers` puts it back.
        former = _sibling(target, "replaced")
        os.rename(target, former)
        checkpointed("set the former folder aside")
    os.rename(temporary, target)
    checkpointed("renamed")
    fsync_folder(target.parent)
    checkpointed("rename is durable")
    if former is not None:
        remove_folder(former)


def remove_folder(path: Path) -> None:
    """Removes a folder: first its name, at once, then its content, so that no half-removed folder looks whole."""
    match = _LEFTOVER.match(path.name)
    doomed = _sibling(path.with_name(match["name"]) if match else path, "removed")
    os.rename(path, doomed)
    fsync_folder(path.parent)
    checkpointed("renamed for removal")
    shutil.rmtree(doomed)
    checkpointed("removed")


def clean_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Settles what a killed process left in `folder`: removes unfinished siblings, puts set-aside ones back.

    Only the one process that writes into `folder` may call this.

    Returns:
        Names of the entries that were settled.
    """
    folder = Path(folder)
    settled: list[str] = []
    if not folder.is_dir():
        return settled
    for entry in sorted(folder.iterdir()):
        match = _LEFTOVER.match(entry.name)
        if match is None:
            continue
        home = entry.with_name(match["name"])
        if match["kind"] == "replaced" and not home.exists():
            os.rename(entry, home)
        elif entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        settled.append(entry.name)
    if settled:
        fsync_folder(folder)
        logger.warning("settled what an interrupted save left in %s: %s", folder, ", ".join(settled))
    return settled
