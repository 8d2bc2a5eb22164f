"""Reads files of stored examples and checks everything that can be checked without a model.

What is wrong is collected: one reading names every bad record with its file, line and field. A file has one supervision
type, its media exist and are of the kind that the model gives, and the arms of a preference have one aspect ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flow_factory.contracts import Modality, PipelineIOContract
from flow_factory.data_utils.json_lines import decode_line, numbered_lines
from flow_factory.data_utils.offline_media import DECODABLE, Size, image_size, same_shape
from flow_factory.data_utils.offline_schema import ARMS, Media, StoredExample, Supervision, parse_example
from flow_factory.data_utils.prompt_dataset import MediaFile, PromptRecord, group_id_of, hash_file, hash_parts
from flow_factory.data_utils.prompt_files import find_prompt_file, media_folders
from flow_factory.data_utils.video_files import Soundtrack, soundtrack_facts, video_facts
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetArguments

SHOWN_PROBLEMS = 20
"""Bad records that one error message lists."""


@dataclass(frozen=True)
class OfflineExample:
    """One stored example.

    Attributes:
        record: Its prompt, as conditions are encoded from it.
        arms: "target", or "chosen" and "rejected", to the output's media in the order of the model's outputs.
        size: Height and width of its picture or video (of the chosen one), or None if its media are neither.
        frames: Frames of its shortest video; None if its media are no videos.
        place: `file:line`.
        example_id: Signed 64-bit identity of (dataset, row), which its random numbers are drawn by.
        soundtracks: Where the sounds of its videos lie, for a model that makes videos with their sound.
    """

    record: PromptRecord
    arms: Mapping[str, tuple[MediaFile, ...]]
    size: Size | None
    frames: int | None
    place: str
    example_id: int
    soundtracks: tuple[Soundtrack, ...] = ()


@dataclass
class OfflineScan:
    """What one file holds.

    Attributes:
        path: The file.
        supervision: The type of its records; None if no record could be read.
        examples: The good records.
        problems: One message per thing that is wrong, each beginning with `file:line`.
    """

    path: Path
    supervision: Supervision | None = None
    examples: list[OfflineExample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raises an InputError that lists what is wrong, if anything is."""
        raise_problems(self.problems)


def raise_problems(problems: Sequence[str]) -> None:
    """Raises an InputError that lists the first problems and counts the others, if there are any."""
    if not problems:
        return
    if len(problems) == 1:
        raise InputError(problems[0])
    shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN_PROBLEMS])
    rest = len(problems) - SHOWN_PROBLEMS
    more = f"\n  and {rest} more (flow-factory data validate lists them all)" if rest > 0 else ""
    raise InputError(f"{len(problems)} problems in stored examples:\n{shown}{more}")


def scan_offline_dataset(
    dataset: DatasetArguments,
    split: str,
    *,
    io: PipelineIOContract | None = None,
    max_size: int | None = None,
    on_record: Callable[[], None] = lambda: None,
) -> OfflineScan:
    """Reads a split of a dataset of stored examples and collects what is wrong with it.

    Args:
        dataset: Its name, folder and media folders.
        split: Name of the split.
        io: What the model takes and gives; None accepts any media.
        max_size: Read only the first so many records; None reads all.
        on_record: Called after each record.

    Raises:
        InputError: If the folder or the file is missing.
    """
    path = find_prompt_file(dataset.dataset_dir, split)
    folders = media_folders(dataset.dataset_dir, dataset.image_dir, dataset.video_dir, dataset.audio_dir)
    return scan_offline_file(path, folders, dataset=dataset, io=io, max_size=max_size, on_record=on_record)


def scan_offline_file(
    path: Path,
    folders: Mapping[Modality, Path],
    *,
    dataset: DatasetArguments | None = None,
    io: PipelineIOContract | None = None,
    max_size: int | None = None,
    on_record: Callable[[], None] = lambda: None,
) -> OfflineScan:
    """As `scan_offline_dataset`, of one file with the folders that its media paths are relative to."""
    dataset = dataset or DatasetArguments()
    scan = OfflineScan(path)
    if path.suffix != ".jsonl":
        scan.problems.append(f"{path}: holds prompts; stored examples are read from a .jsonl file.")
        return scan
    reader = _Reader(scan, folders, dataset, io)
    index = 0
    for number, raw in numbered_lines(path, "dataset file"):
        if max_size is not None and index == max_size:
            break
        if reader.line(raw, number, index):
            index += 1
            on_record()
    if not index:
        scan.problems.append(f"{path}: holds no records; write one JSON object a line.")
    return scan


class _Reader:
    """Turns lines into examples and complaints."""

    def __init__(
        self,
        scan: OfflineScan,
        folders: Mapping[Modality, Path],
        dataset: DatasetArguments,
        io: PipelineIOContract | None,
    ) -> None:
        self.scan, self.folders, self.dataset, self.io = scan, folders, dataset, io
        self.first_line = 0

    def line(self, raw: bytes, number: int, index: int) -> bool:
        """Reads one line; False if it is blank."""
        place = f"{self.scan.path}:{number}"
        try:
            text = decode_line(raw, number, place)
            if not text:
                return False
            stored = parse_example(text, place)
        except InputError as error:
            self.scan.problems += str(error).split("\n")
            return True
        complaints = [*self._type(stored, number), *self._input(stored), *self._outputs(stored)]
        if not complaints:
            example = self._example(stored, place, index, complaints)
            if example is not None and not complaints:
                self.scan.examples.append(example)
        self.scan.problems += [f"{place}: {complaint}" for complaint in complaints]
        return True

    def _type(self, stored: StoredExample, number: int) -> Iterator[str]:
        """One supervision type per file."""
        if self.scan.supervision is None:
            self.scan.supervision, self.first_line = stored.supervision.type, number
        elif stored.supervision.type != self.scan.supervision:
            yield (
                f"supervision.type: is {stored.supervision.type!r}, but {self.scan.supervision!r} in line "
                f"{self.first_line}; a file has one type: split it in two."
            )

    def _input(self, stored: StoredExample) -> Iterator[str]:
        """Media fill slots of the model's inputs, and required slots are filled."""
        if self.io is None:
            return
        if stored.input.negative_prompt is not None and self.io.slot("negative_prompt") is None:
            yield "input.negative_prompt: the model takes none; remove it."
        filled: dict[str, int] = {}
        for index, media in enumerate(stored.input.media):
            where = f"input.media[{index}]"
            slots = [slot for slot in self.io.inputs if slot.modality is media.modality]
            names = ", ".join(repr(slot.name) for slot in slots)
            if not slots:
                yield f"{where}: the model takes no {media.type}; remove it."
            elif media.slot is not None and media.slot not in [slot.name for slot in slots]:
                yield f"{where}.slot: the model has no {media.type} input {media.slot!r}; use {names}."
            elif media.slot is None and len(slots) > 1:
                yield f"{where}.slot: is missing; this {media.type} could fill {names}."
            else:
                slot = slots[0] if media.slot is None else next(s for s in slots if s.name == media.slot)
                filled[slot.name] = filled.get(slot.name, 0) + 1
                if slot.max_items is not None and filled[slot.name] == slot.max_items + 1:
                    yield f"{where}: the input {slot.name!r} takes at most {slot.max_items} file(s)."
        for slot in self.io.inputs:
            if slot.required and slot.modality is not Modality.TEXT and slot.name not in filled:
                yield f"input.media: nothing fills the model's {slot.modality.value} input {slot.name!r}; add it."
        if self.io.one_of and filled.keys().isdisjoint(self.io.one_of):
            yield f"input.media: fills none of {', '.join(map(repr, self.io.one_of))}; the model needs at least one."

    def _outputs(self, stored: StoredExample) -> Iterator[str]:
        """Every arm holds what the model gives, in order, and can be decoded."""
        for arm, media in stored.supervision.arms.items():
            where = f"supervision.{arm}.media"
            kinds = [m.modality for m in media]
            if self.io is not None and kinds != list(self.io.output_files):
                gives = ", ".join(m.value for m in self.io.output_files)
                track = ", whose file has the sound as a track" if self.io.has_soundtrack else ""
                yield f"{where}: holds {', '.join(k.value for k in kinds)}; the model gives {gives}{track}."
                continue
            for index, item in enumerate(media):
                if item.slot is not None:
                    yield f"{where}[{index}].slot: an output fills no input; remove it."
        if not self.io:
            shapes = {tuple(m.type for m in media) for media in stored.supervision.arms.values()}
            if len(shapes) > 1:
                yield "supervision: chosen and rejected hold different kinds of media."

    def _example(self, stored: StoredExample, place: str, index: int, complaints: list[str]) -> OfflineExample | None:
        """The example with its files; complaints about files are added."""
        condition = self._files(stored.input.media, "input.media", complaints)
        arms = {
            arm: self._files(media, f"supervision.{arm}.media", complaints)
            for arm, media in stored.supervision.arms.items()
        }
        if complaints:
            return None
        size, frames = self._size(arms, complaints)
        soundtracks = () if complaints else self._soundtracks(arms, complaints)
        hashed = tuple(MediaFile(m.slot, m.modality, m.path, hash_file(m.path)) for m in condition)
        given = stored.input
        record = PromptRecord(
            prompt=given.prompt,
            source=self.dataset.name,
            source_id=self.dataset.source_id or 0,
            index=index,
            group_id=group_id_of(self.dataset.name, given.prompt, given.negative_prompt, hashed),
            negative_prompt=given.negative_prompt,
            media=hashed,
            metadata=stored.metadata,
        )
        identity = hash_parts([self.dataset.name, str(index)], 8)
        example_id = int.from_bytes(identity, "little", signed=True)
        return OfflineExample(record, arms, size, frames, place, example_id, soundtracks)

    def _files(self, media: Sequence[Media], where: str, complaints: list[str]) -> tuple[MediaFile, ...]:
        files = []
        for index, item in enumerate(media):
            folder = self.folders[item.modality]
            path = folder / item.path
            if not path.is_file():
                complaints.append(
                    f"{where}[{index}].path: {item.path!r} is not a file under {folder} (set data.{item.type}_dir if "
                    f"the media lie elsewhere)."
                )
            files.append(MediaFile(item.slot or self._slot(item.modality), item.modality, path, ""))
        return tuple(files)

    def _slot(self, modality: Modality) -> str:
        slots = [] if self.io is None else [slot.name for slot in self.io.inputs if slot.modality is modality]
        return slots[0] if slots else modality.value

    def _size(self, arms: Mapping[str, Sequence[MediaFile]], complaints: list[str]) -> tuple[Size | None, int | None]:
        """Size and least number of frames, read off the files' headers; arms of another shape are a complaint."""
        sizes: dict[str, Size] = {}
        frames: list[int] = []
        for arm, files in arms.items():
            for index, file in enumerate(files):
                if file.modality not in DECODABLE:
                    known = ", ".join(sorted(kind.value for kind in DECODABLE))
                    complaints.append(
                        f"supervision.{arm}.media[{index}]: {file.modality.value} cannot be decoded by this version; "
                        f"it decodes: {known}."
                    )
                    continue
                try:
                    if file.modality is Modality.VIDEO:
                        sizes[arm], count = video_facts(file.path)
                        frames.append(count)
                    else:
                        sizes[arm] = image_size(file.path)
                except InputError as error:
                    complaints.append(f"supervision.{arm}.media[{index}].path: {error}")
        if complaints or not sizes:
            return None, None
        (first, size), *others = sizes.items()
        for arm, other in others:
            if not same_shape(size, other):
                complaints.append(
                    f"supervision: {first} is {size[0]} x {size[1]} pixels (height x width) and {arm} "
                    f"{other[0]} x {other[1]}: arms of different shape cannot share their noise. Crop one of them."
                )
        return size, min(frames, default=None)

    def _soundtracks(self, arms: Mapping[str, Sequence[MediaFile]], complaints: list[str]) -> tuple[Soundtrack, ...]:
        """Where the sounds of all arms lie, if the model makes any; videos without sound are a complaint."""
        if self.io is None or not self.io.has_soundtrack:
            return ()
        found = []
        for arm, (file,) in arms.items():
            try:
                found.append(soundtrack_facts(file.path))
            except InputError as error:
                complaints.append(f"supervision.{arm}.media[0].path: {error}")
        return tuple(found)


__all__ = ["ARMS", "OfflineExample", "OfflineScan", "raise_problems", "scan_offline_dataset", "scan_offline_file"]
