"""Prompts with their identity: which dataset, which row, and which group their samples belong to."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_factory.contracts import Modality, PipelineIOContract
from flow_factory.data_utils.prompt_files import (
    PromptRow,
    check_media_files,
    find_prompt_file,
    media_folders,
    read_prompts,
)

if TYPE_CHECKING:
    from flow_factory.hparams import DatasetArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MediaFile:
    """A condition media file: the slot it fills, its kind, where it lies, and the hash of its bytes."""

    slot: str
    modality: Modality
    path: Path
    digest: str


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a dataset.

    Attributes:
        prompt: The text.
        negative_prompt: The negative text, or None.
        media: Condition media.
        metadata: The row's other columns, for rewards.
        source: Name of the dataset.
        source_id: Its integer id.
        index: Position in the loaded dataset, from 0 (after duplicates were dropped).
        group_id: Signed 64-bit identity of (source, prompt, negative prompt, media contents).
    """

    prompt: str
    source: str
    source_id: int
    index: int
    group_id: int
    negative_prompt: str | None = None
    media: tuple[MediaFile, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of one split of one dataset.

    Attributes:
        name: Name of the dataset (the source).
        source_id: Its integer id.
        records: The prompts.
        path: The file they were read from.
        duplicates: How many rows were dropped because an earlier row had the same identity.
    """

    name: str
    source_id: int
    records: Sequence[PromptRecord]
    path: Path
    duplicates: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> PromptRecord:
        return self.records[index]

    def __iter__(self) -> Iterator[PromptRecord]:
        return iter(self.records)


def hash_parts(parts: Sequence[str | None], digest_size: int = 16) -> bytes:
    """blake2b of a sequence of texts; None and "" differ, and so does where one part ends and the next begins."""
    state = hashlib.blake2b(digest_size=digest_size)
    for part in parts:
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<q", -1 if part is None else len(data)))
        state.update(data)
    return state.digest()


def source_id_of(name: str) -> int:
    """The default id of a dataset: signed 64-bit hash of its name, the same in every process."""
    return int.from_bytes(hash_parts([name], 8), "little", signed=True)


def group_id_of(source: str, prompt: str, negative_prompt: str | None, media: Sequence[MediaFile] = ()) -> int:
    """Signed 64-bit identity of a prompt's group; equal in every process, unlike Python's own salted hash."""
    parts = [source, prompt, negative_prompt]
    for file in media:
        parts += [file.slot, file.digest]
    return int.from_bytes(hash_parts(parts, 8), "little", signed=True)


def hash_file(path: Path) -> str:
    """Hex blake2b of a file's bytes."""
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def media_files(row: PromptRow, folders: Mapping[Modality, Path]) -> tuple[MediaFile, ...]:
    """A row's condition media, hashed; they must exist (`check_media_files`)."""
    found = ((ref, folders[ref.modality] / ref.path) for ref in row.media)
    return tuple(MediaFile(ref.slot, ref.modality, file, hash_file(file)) for ref, file in found)


def load_prompt_dataset(
    dataset: DatasetArguments,
    split: str,
    *,
    io: PipelineIOContract | None = None,
    max_size: int | None = None,
    drop_duplicates: bool = True,
) -> PromptDataset:
    """Reads a split of a dataset.

    Args:
        dataset: Its name, folder and media folders.
        split: Name of the split.
        io: What the model takes; None accepts any media.
        max_size: Keep the first so many prompts (after dropping duplicates); None keeps all.
        drop_duplicates: Drop rows whose identity an earlier row has: their samples would join that row's group.
            Evaluation keeps them, where row numbers seed the pictures.

    Raises:
        InputError: Naming file and line, if the file is missing or a row cannot be used.
    """
    path = find_prompt_file(dataset.dataset_dir, split)
    rows = read_prompts(path, io)
    folders = media_folders(dataset.dataset_dir, dataset.image_dir, dataset.video_dir, dataset.audio_dir)
    check_media_files(rows, folders, path)
    source_id = source_id_of(dataset.name) if dataset.source_id is None else dataset.source_id

    records: list[PromptRecord] = []
    first: dict[int, PromptRow] = {}
    dropped = differing = 0
    for row in rows:
        if max_size is not None and len(records) == max_size:
            break
        media = media_files(row, folders)
        group_id = group_id_of(dataset.name, row.prompt, row.negative_prompt, media)
        earlier = first.setdefault(group_id, row)
        if drop_duplicates and earlier is not row:
            dropped += 1
            differing += earlier.metadata != row.metadata
            continue
        records.append(
            PromptRecord(
                prompt=row.prompt,
                source=dataset.name,
                source_id=source_id,
                index=len(records),
                group_id=group_id,
                negative_prompt=row.negative_prompt,
                media=media,
                metadata=row.metadata,
            )
        )
    if dropped:
        other = f"; {differing} of them with other metadata, which is not used" if differing else ""
        logger.warning("%s: dropped %d duplicates of earlier prompts%s", path, dropped, other)
    return PromptDataset(dataset.name, source_id, tuple(records), path, dropped)
