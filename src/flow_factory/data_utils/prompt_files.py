"""Reads prompt files with the standard library alone, so that `check` can count and validate prompts in no time.

A prompt dataset is a folder with one file per split: `<split>.txt` (a prompt a line) or `<split>.jsonl` (an object a
line with `prompt`, optionally `negative_prompt`, media paths under `image(s)`, `video(s)`, `audio(s)` or a slot's own
name; every other key is metadata, which reaches the rewards).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.json_lines import decode_line, has_lone_surrogate, kind_of, numbered_lines, parse_object
from flow_factory.errors import InputError
from flow_factory.hparams.models import get_model_spec, model_keys

MEDIA_KEYS: dict[str, Modality] = {
    key: modality
    for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
    for key in (modality.value, modality.value + "s")
}


@dataclass(frozen=True)
class MediaRef:
    """A media file named by a row: the slot it fills, its kind, and its path relative to that kind's folder."""

    slot: str
    modality: Modality
    path: str


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file.

    Attributes:
        prompt: The text, stripped of surrounding white space.
        negative_prompt: The negative text, or None if the row gives none ("" is a text).
        media: Condition media, in slot order as given.
        metadata: The row's other columns.
        line: Line number in the file, from 1.
    """

    prompt: str
    negative_prompt: str | None = None
    media: tuple[MediaRef, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0


def find_prompt_file(dataset_dir: str | Path, split: str) -> Path:
    """The file of a split.

    Args:
        dataset_dir: The dataset's folder, or `builtin/<name>`.
        split: Name of the split, the file's stem.

    Raises:
        InputError: If the folder or the file is missing, or both a .txt and a .jsonl exist.
    """
    folder = _resolve_folder(dataset_dir)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise InputError(
            f"dataset folder {str(dataset_dir)!r} {what}; give a folder that holds a .txt or .jsonl file of each split."
        )
    found = [path for path in (folder / f"{split}.txt", folder / f"{split}.jsonl") if path.is_file()]
    if len(found) > 1:
        raise InputError(f"both {found[0]} and {found[1]} exist; keep one of them.")
    if not found:
        splits = sorted(p.name for p in folder.iterdir() if p.suffix in (".txt", ".jsonl") and p.is_file())
        near = difflib.get_close_matches(split, [Path(name).stem for name in splits], n=1)
        hint = f" Did you mean split {near[0]!r}?" if near else ""
        raise InputError(
            f"dataset folder {str(folder)!r} has no {split}.txt or {split}.jsonl; it has "
            f"{', '.join(splits) or 'no prompt files'}.{hint}"
        )
    return found[0]


def has_split(dataset_dir: str | Path, split: str) -> bool:
    """Whether the folder has a file for the split."""
    folder = _resolve_folder(dataset_dir)
    return any((folder / f"{split}{suffix}").is_file() for suffix in (".txt", ".jsonl"))


def _resolve_folder(dataset_dir: str | Path) -> Path:
    if str(dataset_dir).startswith("builtin/"):
        from flow_factory.hparams.builtin import resolve_builtin

        return Path(resolve_builtin(str(dataset_dir), "prompts"))
    return Path(dataset_dir).expanduser()


def read_prompts(path: str | Path, io: PipelineIOContract | None = None) -> list[PromptRow]:
    """Reads and validates a prompt file.

    Args:
        path: A .txt or .jsonl file.
        io: What the model takes; None accepts any media and fills the slots `image`, `video`, `audio`.

    Returns:
        The rows in file order; blank lines are skipped.

    Raises:
        InputError: Naming file and line, if a line cannot be used; or if the file holds no prompts.
    """
    path = Path(path)
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    rows = []
    slots = set() if io is None else _slots_of_models() - {slot.name for slot in io.inputs}
    for number, raw in numbered_lines(path, "prompt file"):
        place = f"{path}:{number}"
        text = decode_line(raw, number, place)
        if "\r" in text and path.suffix == ".txt":  # whole files of such lines would be one prompt
            raise InputError(f"{place}: a carriage return inside a line; end lines with a line feed (LF or CR LF).")
        if text:
            row = parse(text, number, place, io)
            foreign = sorted(slots & row.metadata.keys())
            if io is not None and foreign:
                raise InputError(_not_taken(f'"{foreign[0]}"', place, io))
            _check_required(row, place, io)
            rows.append(row)
    if not rows:
        raise InputError(f"prompt file {path} holds no prompts; write one prompt a line.")
    return rows


def media_folders(
    dataset_dir: str | Path,
    image_dir: str | None = None,
    video_dir: str | None = None,
    audio_dir: str | None = None,
) -> dict[Modality, Path]:
    """Folders that media paths are relative to; `images`, `videos`, `audios` of the dataset unless given."""
    root = _resolve_folder(dataset_dir)
    given = {Modality.IMAGE: image_dir, Modality.VIDEO: video_dir, Modality.AUDIO: audio_dir}
    return {
        modality: root / f"{modality.value}s" if folder is None else Path(folder).expanduser()
        for modality, folder in given.items()
    }


def check_media_files(rows: Iterable[PromptRow], folders: Mapping[Modality, Path], path: str | Path) -> None:
    """Checks that every media file exists.

    Raises:
        InputError: Naming the prompt file, the line and the missing file.
    """
    for row in rows:
        for ref in row.media:
            file = folders[ref.modality] / ref.path
            if not file.is_file():
                raise InputError(
                    f"{path}:{row.line}: {ref.slot} {ref.path!r} is not a file under {folders[ref.modality]} "
                    f"(set data.{ref.modality.value}_dir if the media lie elsewhere)."
                )


def _parse_text(text: str, line: int, place: str, io: PipelineIOContract | None) -> PromptRow:
    return PromptRow(prompt=text, line=line)


def _parse_json(text: str, line: int, place: str, io: PipelineIOContract | None) -> PromptRow:
    row = parse_object(text, place, '{"prompt": "..."}')
    if "prompt" not in row:
        near = difflib.get_close_matches("prompt", row, n=1)
        hint = f" Did you mean {near[0]!r} to be it?" if near else ""
        raise InputError(f'{place}: no "prompt" (keys: {", ".join(row) or "none"}).{hint}')
    prompt = row.pop("prompt")
    if not isinstance(prompt, str):
        raise InputError(f'{place}: "prompt" is a {kind_of(prompt)} ({prompt!r}), not a string; put it in quotes.')
    if not prompt.strip():
        raise InputError(f'{place}: "prompt" is empty.')
    negative = row.pop("negative_prompt", None)
    if negative is not None and not isinstance(negative, str):
        raise InputError(f'{place}: "negative_prompt" is a {kind_of(negative)} ({negative!r}), not a string.')
    if negative is not None and io is not None and io.slot("negative_prompt") is None:
        raise InputError(f'{place}: the model takes no "negative_prompt"; remove the column.')
    if has_lone_surrogate(prompt + (negative or "")):
        raise InputError(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff) is no character; remove or complete it."
        )
    media = _take_media(row, place, io)
    return PromptRow(prompt.strip(), negative, media, row, line)


def _take_media(row: dict[str, Any], place: str, io: PipelineIOContract | None) -> tuple[MediaRef, ...]:
    """Removes the media columns from `row` and returns them as references."""
    named = {} if io is None else {slot.name: slot for slot in io.inputs if slot.modality is not Modality.TEXT}
    found: dict[str, list[MediaRef]] = {}
    for key in [key for key in row if key in MEDIA_KEYS or key in named]:
        value = row.pop(key)
        if value is None:
            continue
        slot = named.get(key) or _slot_for(key, place, io)
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not all(isinstance(p, str) and p for p in paths):
            raise InputError(f'{place}: "{key}" must be a path or a list of paths, not {value!r}.')
        if slot.name in found:
            raise InputError(f'{place}: "{key}" fills the slot {slot.name!r} a second time; keep one of the columns.')
        if slot.max_items is not None and len(paths) > slot.max_items:
            raise InputError(f'{place}: "{key}" has {len(paths)} files; the model takes at most {slot.max_items}.')
        found[slot.name] = [MediaRef(slot.name, slot.modality, path) for path in paths]
    return tuple(ref for refs in found.values() for ref in refs)


def _slot_for(key: str, place: str, io: PipelineIOContract | None) -> MediaSlot:
    """The slot that a generic column (`image`, `images`, ...) fills."""
    modality = MEDIA_KEYS[key]
    if io is None:
        return MediaSlot(modality, modality.value, required=False, max_items=None)
    slots = [slot for slot in io.inputs if slot.modality is modality]
    if not slots:
        raise InputError(_not_taken(f'{modality.value} ("{key}")', place, io))
    if len(slots) > 1:
        names = ", ".join(repr(slot.name) for slot in slots)
        raise InputError(f'{place}: "{key}" could fill {names}; name the column after the slot.')
    return slots[0]


def _slots_of_models() -> set[str]:
    """Names of the media slots of all known models: a column called so is no metadata, whichever model is meant."""
    slots = (slot for key in model_keys() for slot in get_model_spec(key).io.inputs)
    return {slot.name for slot in slots if slot.modality is not Modality.TEXT}


def _not_taken(what: str, place: str, io: PipelineIOContract) -> str:
    takes = ", ".join(sorted(slot.name for slot in io.inputs)) or "nothing"
    return (
        f"{place}: the model takes no {what}; it takes {takes}. Remove the column, or rename it if it is meant for a "
        "reward."
    )


def _check_required(row: PromptRow, place: str, io: PipelineIOContract | None) -> None:
    filled = {ref.slot for ref in row.media}
    for slot in () if io is None else io.inputs:
        if slot.required and slot.modality is not Modality.TEXT and slot.name not in filled:
            kind = "a video" if slot.modality is Modality.VIDEO else f"an {slot.modality.value}"
            raise InputError(
                f"{place}: the model needs {kind} for {slot.name!r}; add it to a .jsonl file as "
                f'"{slot.name}": "<path>".'
            )
    if io is not None and io.one_of and filled.isdisjoint(io.one_of):
        raise InputError(
            f"{place}: the model needs at least one of {', '.join(map(repr, io.one_of))}; add it to a .jsonl file as "
            f'"{io.one_of[0]}": "<path>".'
        )
