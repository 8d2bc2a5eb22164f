"""Datasets of stored examples from what people have: folders of captioned pictures, and Hugging Face datasets."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flow_factory.data_utils.offline_media import read_image, same_shape
from flow_factory.data_utils.offline_writer import example_line, new_dataset
from flow_factory.errors import InputError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
PICK_A_PIC = ("jpg_0", "jpg_1")
"""Picture columns of a Pick-a-Pic table, beside `caption` and `label_0`."""
_SHOWN = 20


def import_folder(source: Path, target: Path, on_picture: Callable[[], None] = lambda: None) -> int:
    """Makes demonstrations of a folder of pictures with captions beside them (`a.png` and `a.txt`), subfolders too.

    Pictures are decoded once and copied byte for byte.

    Args:
        source: The folder.
        target: The dataset to create.
        on_picture: Called after each picture.

    Returns:
        How many demonstrations were written.

    Raises:
        InputError: Naming every picture without a caption, with an empty one, or that cannot be decoded.
    """
    if not source.is_dir():
        raise InputError(f"{source} is not a folder; give one with pictures and captions (a.png beside a.txt).")
    pictures = sorted(p for p in source.rglob("*") if p.suffix.lower() in PICTURE_SUFFIXES and p.is_file())
    if not pictures:
        raise InputError(f"{source} holds no pictures ({', '.join(PICTURE_SUFFIXES)}).")
    problems: list[str] = []
    with new_dataset(target) as writer:
        for number, picture in enumerate(pictures):
            try:
                caption = _caption(picture)
                read_image(picture)
                name = writer.save_bytes(picture.read_bytes(), f"{number:06d}{picture.suffix.lower()}")
                metadata = {"file": picture.relative_to(source).as_posix()}
                writer.add(example_line("demonstration", caption, {"target": name}, metadata=metadata))
            except InputError as error:
                problems.append(str(error))
            on_picture()
        if problems:
            shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise InputError(f"{len(problems)} of {len(pictures)} pictures cannot be used:\n{shown}{more}")
    return len(pictures)


def _caption(picture: Path) -> str:
    """The text beside a picture.

    Raises:
        InputError: If there is none.
    """
    path = picture.with_suffix(".txt")
    try:
        text = " ".join(path.read_text(encoding="utf-8-sig").split())
    except FileNotFoundError as error:
        raise InputError(f"{picture}: there is no caption {path.name} beside it.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text.") from error
    if not text:
        raise InputError(f"{path}: is empty; write the caption of {picture.name}.")
    return text


@dataclass(frozen=True)
class TableLayout:
    """Which columns of a table make an example.

    Attributes:
        prompt: Column of the text.
        images: One column of pictures (demonstrations), or two (preferences).
        label: Column that is 1 where the first picture is better, 0 where the second is, between for a tie.
    """

    prompt: str
    images: tuple[str, ...]
    label: str | None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.prompt, *self.images, *([self.label] if self.label is not None else []))


@dataclass
class ImportCounts:
    """What became of a table's rows."""

    written: int = 0
    ties: int = 0
    unlabelled: int = 0
    unusable: int = 0


def open_table(source: str, split: str) -> Any:
    """A Hugging Face dataset, streamed: a Hub name, a .parquet file, or a folder of them.

    Raises:
        InputError: If it cannot be opened.
    """
    from datasets import load_dataset

    path = Path(source).expanduser()
    try:
        if path.suffix == ".parquet" or path.is_dir():
            files = [str(path)] if path.is_file() else sorted(str(p) for p in path.rglob("*.parquet"))
            if not files or not all(Path(file).is_file() for file in files):
                raise InputError(f"{source!r} is no .parquet file and no folder that holds one.")
            return load_dataset("parquet", data_files={split: files}, split=split, streaming=True)
        return load_dataset(source, split=split, streaming=True)
    except InputError:
        raise
    except Exception as error:  # the library raises whatever its file systems and parsers raise
        raise InputError(f"dataset {source!r}, split {split!r}: {error}") from error


def find_layout(columns: Sequence[str], prompt: str, images: Sequence[str], label: str) -> TableLayout:
    """The layout that the columns allow.

    Args:
        columns: The table's columns.
        prompt: Column of the text.
        images: As asked for; none: the two of Pick-a-Pic, if the table has them.
        label: Column of the label, which pairs need.

    Raises:
        InputError: If a column is missing, listing those there are.
    """
    if not images:
        if not set(PICK_A_PIC) <= set(columns):
            raise InputError(
                f"the table has no columns {' and '.join(PICK_A_PIC)}; name its picture columns with --image-column "
                f"(one: demonstrations, two: preferences). It has: {', '.join(columns)}."
            )
        images = PICK_A_PIC
    if len(images) > 2:
        raise InputError(f"--image-column is given {len(images)} times; one makes demonstrations, two preferences.")
    layout = TableLayout(prompt, tuple(images), label if len(images) == 2 else None)
    missing = [name for name in layout.columns if name not in columns]
    if missing:
        raise InputError(
            f"the table has no column {', '.join(map(repr, missing))}; name the columns with --prompt-column, "
            f"--image-column and --label-column. It has: {', '.join(columns)}."
        )
    return layout


def import_table(
    table: Any,
    layout: TableLayout,
    target: Path,
    *,
    limit: int | None = None,
    skip_unusable: bool = False,
    on_row: Callable[[], None] = lambda: None,
) -> ImportCounts:
    """Makes demonstrations or preferences of a table's rows; pictures keep their bytes.

    Ties and rows without a label are left out and counted.

    Args:
        table: An iterable Hugging Face dataset.
        layout: Its columns.
        target: The dataset to create.
        limit: Stop after so many examples; None: all rows.
        skip_unusable: Leave out, and count, rows whose text is empty, whose label is none, whose pictures cannot be
            decoded or have different shapes; otherwise such a row is an error.
        on_row: Called after each row.

    Raises:
        InputError: Naming the row that cannot be used, or if nothing is left to write.
    """
    counts = ImportCounts()
    with new_dataset(target) as writer:
        for number, row in enumerate(_undecoded(table, layout)):
            if limit is not None and counts.written == limit:
                break
            on_row()
            try:
                order = _order(row, layout, counts)
                if order is None:
                    continue
                prompt = _prompt(row[layout.prompt])
                pictures = [_picture(row[column], column) for column in order]
                _check_shapes(pictures)
            except InputError as error:
                if not skip_unusable:
                    raise InputError(f"row {number}: {error} --skip-unusable leaves such rows out.") from error
                counts.unusable += 1
                continue
            arms = ("target",) if len(order) == 1 else ("chosen", "rejected")
            names = [
                writer.save_bytes(data, f"{counts.written:06d}-{arm}{suffix}")
                for arm, (data, suffix, _) in zip(arms, pictures, strict=True)
            ]
            kind = "demonstration" if len(order) == 1 else "preference"
            line = example_line(kind, prompt, dict(zip(arms, names, strict=True)), metadata={"row": number})
            writer.add(line)
            counts.written += 1
        if not counts.written:
            raise InputError(
                f"no example could be made: {counts.ties} ties, {counts.unlabelled} rows without a label, "
                f"{counts.unusable} unusable."
            )
    return counts


def _undecoded(table: Any, layout: TableLayout) -> Iterator[Mapping[str, Any]]:
    """The rows with their pictures as bytes, so that they can be kept as they are."""
    from datasets import Image as ImageFeature

    table = table.select_columns(list(layout.columns))
    for column in layout.images:
        if isinstance((table.features or {}).get(column), ImageFeature):
            table = table.cast_column(column, ImageFeature(decode=False))
    yield from table


def _order(row: Mapping[str, Any], layout: TableLayout, counts: ImportCounts) -> tuple[str, ...] | None:
    """The picture columns, the better one first; None for rows that teach nothing."""
    if layout.label is None:
        return layout.images
    label = row[layout.label]
    if label is None or (isinstance(label, float) and math.isnan(label)):
        counts.unlabelled += 1
        return None
    if not isinstance(label, (int, float)) or not 0 <= label <= 1:
        raise InputError(
            f"column {layout.label!r} holds {label!r}; it must be 1 where the first picture is better, 0 where the "
            f"second is, between for a tie, or empty."
        )
    if 0 < label < 1:
        counts.ties += 1
        return None
    return layout.images if label == 1 else layout.images[::-1]


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"its text is {value!r}, not a prompt.")
    return " ".join(value.split())


def _picture(value: Any, column: str) -> tuple[bytes, str, Image.Image]:
    """Bytes, suffix and decoded picture of a cell."""
    place = f"column {column!r}"
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if data is None and isinstance(value, Mapping) and value.get("path"):
        try:
            data = Path(value["path"]).read_bytes()
        except OSError as error:
            raise InputError(f"{place} names {value['path']!r}: {error.strerror or error}.") from error
    if not isinstance(data, bytes):
        raise InputError(f"{place} holds a {type(data).__name__}, not an encoded picture.")
    image = read_image(data, place)
    with Image.open(io.BytesIO(data)) as header:
        kind = header.format
    # A camera's JPEG with a preview behind it is a JPEG to everything that goes by the suffix.
    suffix = ".jpg" if kind in ("JPEG", "MPO") else f".{(kind or 'png').lower()}"
    return data, suffix, image


def _check_shapes(pictures: Sequence[tuple[bytes, str, Image.Image]]) -> None:
    first, *others = [image.size for _, _, image in pictures]
    for size in others:
        if not same_shape(first, size):
            raise InputError(
                f"its pictures have different shapes ({first[0]} x {first[1]} and {size[0]} x {size[1]}, width x "
                f"height)."
            )
