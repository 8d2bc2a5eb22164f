"""Writes datasets of stored examples: media under `images/` and the like, records in `<split>.jsonl`, in the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from flow_factory.checkpoints.atomic import atomic_folder, fsync_file
from flow_factory.data_utils.offline_schema import SCHEMA_VERSION, Supervision, parse_example
from flow_factory.data_utils.prompt_dataset import MediaFile
from flow_factory.errors import InputError


class OfflineWriter:
    """Appends records and their pictures to a dataset's folder; a context manager.

    Args:
        folder: The dataset's folder; it exists.
        split: Name of the split.
    """

    def __init__(self, folder: Path, split: str = "train") -> None:
        self.folder = folder
        self.images = folder / "images"
        self.images.mkdir(exist_ok=True)
        self.path = folder / f"{split}.jsonl"
        self._file = self.path.open("a", encoding="utf-8")

    def save_image(self, image: Image.Image, name: str, *, durable: bool = False) -> str:
        """Saves a picture as `images/<name>.png`, to the disk itself if `durable`; returns its path in that folder."""
        path = self.images / f"{name}.png"
        image.save(path)
        if durable:
            fsync_file(path)
        return f"{name}.png"

    def save_bytes(self, data: bytes, name: str) -> str:
        """Saves an encoded picture under a name with its suffix and returns it."""
        (self.images / name).write_bytes(data)
        return name

    def save_input(self, file: MediaFile) -> dict[str, str]:
        """Copies a condition medium into the folder of its kind, and returns what a record says of it."""
        folder = self.folder / f"{file.modality.value}s"
        folder.mkdir(exist_ok=True)
        # Prompts may share a medium, and files of several folders a name.
        copy = folder / f"{file.digest}{file.path.suffix.lower()}"
        copy.write_bytes(file.path.read_bytes())
        fsync_file(copy)
        return {"type": file.modality.value, "path": copy.name, "slot": file.slot}

    def add(self, line: str) -> None:
        """Appends a record that `example_line` made."""
        self._file.write(line + "\n")

    def __enter__(self) -> OfflineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def example_line(
    supervision: Supervision,
    prompt: str,
    arms: Mapping[str, str],
    *,
    inputs: Sequence[Mapping[str, str]] = (),
    negative_prompt: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """The line of one record.

    Args:
        supervision: "demonstration" or "preference".
        prompt: The text.
        arms: "target", or "chosen" and "rejected", to the picture's path under `images/`.
        inputs: What is said of each condition medium, as `OfflineWriter.save_input` gives it.
        negative_prompt: The negative text.
        metadata: Whatever else is to be kept.

    Raises:
        InputError: If the schema refuses it.
    """
    media = {arm: {"media": [{"type": "image", "path": path}]} for arm, path in arms.items()}
    given: dict[str, Any] = {"prompt": prompt}
    if negative_prompt is not None:
        given["negative_prompt"] = negative_prompt
    if inputs:
        given["media"] = [dict(medium) for medium in inputs]
    record = {"schema_version": SCHEMA_VERSION, "input": given, "supervision": {"type": supervision, **media}}
    if metadata:
        record["metadata"] = dict(metadata)
    line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    parse_example(line, "the record to be written")
    return line


@contextmanager
def new_dataset(target: Path, split: str = "train") -> Iterator[OfflineWriter]:
    """A writer into a folder that gets its name only when it is complete.

    Raises:
        InputError: If something of that name exists.
    """
    check_free(target)
    with atomic_folder(target) as folder, OfflineWriter(folder, split) as writer:
        yield writer


def check_free(target: Path) -> None:
    """Raises an InputError if `target` exists: a dataset is never written over."""
    if target.exists():
        raise InputError(f"{target} exists and is not written over; choose another folder or remove it.")


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """Writes a prompt file, one a line."""
    path.write_text("".join(prompt + "\n" for prompt in prompts), encoding="utf-8")
