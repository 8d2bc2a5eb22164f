"""Saving and loading whole checkpoints, with retention.

Layout of `<run>/checkpoints/checkpoint-000012/`:

    manifest.json            format version, step, size and SHA-256 of every other file; written last
    meta.json                progress counters, the resolved config and whatever else the caller puts there
    <part>.json              structure and scalars of a part ("model", "optimizer", "ema" ...)
    <part>.safetensors       its tensors
    ...                      what `export` wrote (LoRA in diffusers' layout)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flow_factory.checkpoints import values
from flow_factory.checkpoints.atomic import (
    atomic_folder,
    checkpointed,
    clean_leftovers,
    remove_folder,
)
from flow_factory.checkpoints.manifest import (
    META,
    checkpoint_name,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    read_manifest,
    read_meta,
    verify,
    write_manifest,
)
from flow_factory.checkpoints.redaction import redact
from flow_factory.checkpoints.tree import load_tree, save_tree
from flow_factory.distributed import Comm
from flow_factory.errors import InputError

logger = logging.getLogger(__name__)

_PART_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


class _UnchangedError(Exception):
    """The checkpoint that is being written is already there."""


class Checkpointer:
    """Keeps the checkpoints of one run. Every method is called by all ranks; only rank 0 touches the disk to write.

    Args:
        folder: `<run>/checkpoints`; created at the first save.
        comm: The ranks of the run.
        total_limit: How many checkpoints to keep (`log.save_total_limit`); None keeps all.

    Raises:
        InputError: If `total_limit` is below 1.
    """

    def __init__(
        self, folder: str | os.PathLike[str], comm: Comm | None = None, total_limit: int | None = None
    ) -> None:
        if total_limit is not None and total_limit < 1:
            raise InputError(f"log.save_total_limit is {total_limit}; keep at least 1 checkpoint, or null for all.")
        self.folder = Path(folder)
        self.comm = comm if comm is not None else Comm.single()
        self.total_limit = total_limit

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        meta: Mapping[str, Any],
        export: Callable[[Path], object] | None = None,
    ) -> Path:
        """Writes a checkpoint and then removes the oldest ones beyond the limit.

        A checkpoint of the same step is replaced once the new one is complete (it stems from a run that went another
        way after an earlier resume), and left alone if it has the same content.

        Args:
            step: The step that names it, at least 0.
            parts: Trees by part name (see `tree.save_tree`); only rank 0's are written.
            meta: JSON-able mapping: progress, config. Text under secret-looking keys is not written.
            export: Called with the unfinished folder on rank 0, to write further files into it.

        Returns:
            The checkpoint's folder, on every rank.

        Raises:
            RunError: On the other ranks, when rank 0 could not save.
        """
        target = self.folder / checkpoint_name(step)
        error: Exception | None = None
        if self.comm.is_main:
            try:
                self._write(target, step, parts, meta, export)
                self._retain(target)
            except Exception as caught:
                error = caught
        self.comm.raise_together(error)
        return target

    def _write(
        self,
        target: Path,
        step: int,
        parts: Mapping[str, Any],
        meta: Mapping[str, Any],
        export: Callable[[Path], object] | None,
    ) -> None:
        for name in parts:
            if not _PART_NAME.match(name) or name in ("meta", "manifest"):
                raise ValueError(f"{name!r} cannot name a part of a checkpoint")
        self.folder.mkdir(parents=True, exist_ok=True)
        clean_leftovers(self.folder)
        try:
            with atomic_folder(target, replace=True) as folder:
                for name, tree in parts.items():
                    save_tree(folder, name, tree)
                (folder / META).write_text(values.dumps(redact(dict(meta)), indent=1) + "\n", encoding="utf-8")
                checkpointed(f"wrote {META}")
                if export is not None:
                    export(folder)
                    checkpointed("exported")
                manifest = write_manifest(folder, step, sorted(parts))
                if find_damage(target) is None and read_manifest(target) == manifest:
                    raise _UnchangedError
        except _UnchangedError:
            logger.info("%s already holds this state", target.name)

    def _retain(self, newest: Path) -> None:
        if self.total_limit is None:
            return
        others = [path for _, path in self.list() if path != newest]
        for path in others[: max(0, len(others) + 1 - self.total_limit)]:
            remove_folder(path)
            logger.info("removed %s (log.save_total_limit: %d)", path.name, self.total_limit)

    def list(self) -> list[tuple[int, Path]]:
        """Steps and folders of the checkpoints here, oldest first, without looking into them."""
        return list_checkpoints(self.folder)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None if there is none; the same on every rank.

        Raises:
            InputError: If the newest checkpoint is damaged, naming the file and the older one that is whole
                (RunError on the other ranks).
        """
        error: Exception | None = None
        found: Path | None = None
        if self.comm.is_main:
            try:
                clean_leftovers(self.folder)
                found = newest_checkpoint(self.folder)
            except (InputError, OSError) as caught:
                error = caught
        self.comm.raise_together(error)
        name = self.comm.broadcast_object(None if found is None else found.name)
        return None if name is None else self.folder / name

    def load(
        self, path: str | os.PathLike[str], require: Sequence[str] = (), device: Any = "cpu"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a checkpoint after checking every file's hash (on rank 0).

        Args:
            path: A checkpoint folder, of this run or another.
            require: Parts that must be in it.
            device: Where tensors go.

        Returns:
            Trees by part name, and the meta mapping.

        Raises:
            InputError: If the folder is missing, damaged, of another format, or lacks a required part.
        """
        path = Path(path)
        error: Exception | None = None
        parts: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        try:
            if self.comm.is_main:
                verify(path)
            manifest = read_manifest(path)
            if absent := [name for name in require if name not in manifest["parts"]]:
                raise InputError(
                    f"checkpoint {path} holds no {', '.join(absent)}: it was saved without (log.save_model_only). "
                    f"Load its weights with model.resume_path instead of train.resume."
                )
            parts = {name: load_tree(path, name, device) for name in manifest["parts"]}
            meta = read_meta(path)
        except (InputError, OSError) as caught:
            error = caught
        self.comm.raise_together(error)
        return parts, meta
