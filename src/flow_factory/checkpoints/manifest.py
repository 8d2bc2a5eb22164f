"""What makes a folder a checkpoint: `manifest.json` with the size and hash of every file. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_factory.checkpoints import values
from flow_factory.checkpoints.atomic import checkpointed
from flow_factory.errors import InputError

FORMAT = "flow-factory checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
META = "meta.json"
_NAME = re.compile(r"^checkpoint-(\d{6,})$")


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of a step: "checkpoint-000012"."""
    return f"checkpoint-{step:06d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders below `folder` with their step, oldest first; temporary folders are not among them."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), entry) for entry in folder.iterdir() if (m := _NAME.match(entry.name)) and entry.is_dir()]
    return sorted(found)


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as handle:
        digest = hashlib.sha256()
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST)


def write_manifest(folder: Path, step: int, parts: list[str]) -> dict[str, Any]:
    """Hashes every file below `folder` and writes `manifest.json`, the last file of a checkpoint.

    Args:
        folder: The unfinished checkpoint.
        step: The step that it belongs to.
        parts: Names of the trees in it.

    Returns:
        The manifest.
    """
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in _files(folder)
    }
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "parts": parts, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    checkpointed(f"wrote {MANIFEST}")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        InputError: If the folder is no checkpoint, its manifest cannot be read, or its format is not known here.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"there is no checkpoint at {folder}; check the path (train.resume).")
    if not path.is_file():
        raise InputError(f"{folder} is not a complete checkpoint: {path} is missing.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"checkpoint is corrupted: {path} cannot be read ({error}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not the manifest of a {FORMAT}.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{folder} has checkpoint format version {manifest.get('format_version')}; this release reads version "
            f"{FORMAT_VERSION}. Use the release that wrote it."
        )
    files = manifest.get("files")
    well_formed = (
        isinstance(manifest.get("step"), int)
        and isinstance(manifest.get("parts"), list)
        and isinstance(files, dict)
        and all(isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in files.values())
    )
    if not well_formed:
        raise InputError(f"checkpoint is corrupted: {path} lacks step, parts, or sizes and hashes of its files.")
    return manifest


def find_damage(folder: Path, *, hashes: bool = True, below: str = "") -> str | None:
    """Says what is wrong with a checkpoint, or None if it is whole.

    Args:
        folder: The checkpoint.
        hashes: Whether contents are hashed; otherwise only presence and sizes are compared.
        below: Only files whose path in the checkpoint begins so ("lora/"); "" looks at all.

    Returns:
        One sentence that names the file.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return str(error)
    for name, entry in manifest["files"].items():
        if not name.startswith(below):
            continue
        path = folder / name
        if not path.is_file():
            return f"{path} is missing."
        if path.stat().st_size != entry["size"]:
            return f"{path} has {path.stat().st_size} bytes, {entry['size']} were written."
        if hashes and sha256_of(path) != entry["sha256"]:
            return f"{path} is corrupted: its SHA-256 is not the one in {MANIFEST}."
    return None


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Checks a checkpoint against its manifest.

    Raises:
        InputError: Naming the damaged file and the newest older checkpoint that is whole, if there is one.
    """
    damage = find_damage(folder, hashes=hashes)
    if damage is None:
        return
    match = _NAME.match(folder.name)
    older = [p for step, p in reversed(list_checkpoints(folder.parent)) if match and step < int(match[1])]
    whole = next((path for path in older if find_damage(path, hashes=hashes) is None), None)
    remedy = (
        f"Resume from the older {whole.name} (train.resume={whole}) after moving {folder.name} away."
        if whole is not None
        else "There is no older whole checkpoint beside it: restore the file, or start under another log.run_name."
    )
    raise InputError(f"checkpoint {folder} cannot be used: {damage} {remedy}")


def newest_checkpoint(folder: Path, *, hashes: bool = True) -> Path | None:
    """The newest checkpoint below `folder`, or None if there is none at all.

    A damaged newest checkpoint is an error and not passed over in silence: going back costs work, so it is the user's
    decision.

    Raises:
        InputError: If the newest one is damaged, naming the file and the older whole one.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    newest = found[-1][1]
    verify(newest, hashes=hashes)
    return newest


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta` mapping that was saved with a checkpoint.

    Raises:
        InputError: If it is missing or corrupted.
    """
    path = folder / META
    try:
        meta = values.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"checkpoint is corrupted: {path} cannot be read ({error}).") from error
    if not isinstance(meta, dict):
        raise InputError(f"checkpoint is corrupted: {path} does not hold a mapping.")
    return meta
