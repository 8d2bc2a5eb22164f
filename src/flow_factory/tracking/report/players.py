"""Videos and sounds on the page: small ones inside it, as pictures are, the others linked beside it."""

from __future__ import annotations

import base64
import io
import os
import re
import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

EMBEDDED_BYTES = 12_000_000
"""Bytes of all files inside one page; as text they are a third more."""
FILE_BYTES = 4_000_000
"""Bytes of one of them."""

_TYPES = {".mp4": "video/mp4", ".wav": "audio/wav"}
_NAME = re.compile(r"^(\d+)(\.mp4|\.wav)$")
_BOX = re.compile(rb"^[\x20-\x7e]{4}$")


@dataclass(frozen=True)
class PlayFile:
    """A file of a run that plays.

    Attributes:
        index: Row of its prompt in the dataset.
        path: The file; it has been seen to be whole.
        size: Its bytes.
    """

    index: int
    path: Path
    size: int


@dataclass(frozen=True)
class Player:
    """A file on the page.

    Attributes:
        kind: "video" or "audio", the element that plays it.
        uri: Its content, or where it lies beside the page.
        caption: The prompt.
        label: What it is, in words.
        linked: Whether it is not inside the page.
    """

    kind: str
    uri: str
    caption: str
    label: str
    linked: bool


def read_players(folder: Path) -> tuple[tuple[PlayFile, ...], tuple[str, ...]]:
    """The files of one sheet that play, by prompt, and the names of those that are damaged."""
    found, damaged = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.match(path.name)
        if match is None:
            continue
        if _is_whole(path):
            found.append(PlayFile(int(match[1]), path, path.stat().st_size))
        else:
            damaged.append(path.name)
    return tuple(sorted(found, key=lambda file: file.index)), tuple(damaged)


def choose_embedded(files: Iterable[PlayFile], limit: int = EMBEDDED_BYTES) -> frozenset[Path]:
    """Which files are put into the page: in this order, as long as there is room."""
    chosen: set[Path] = set()
    for file in files:
        if file.size <= min(limit, FILE_BYTES):
            chosen.add(file.path)
            limit -= file.size
    return frozenset(chosen)


def make_players(
    files: Sequence[PlayFile], prompts: Sequence[str], when: str, embedded: frozenset[Path], page_folder: Path
) -> tuple[Player, ...]:
    """Files as the page shows them.

    Args:
        files: Of one sheet.
        prompts: Of the sheet, by row.
        when: When the sheet was made, in words.
        embedded: Those to put into the page.
        page_folder: Where the page lies, for the links to the others.
    """
    players = []
    for file in files:
        kind = _TYPES[file.path.suffix].partition("/")[0]
        caption = prompts[file.index] if file.index < len(prompts) else f"prompt {file.index}"
        linked = file.path not in embedded
        uri = _link(file.path, page_folder) if linked else _data_uri(file.path)
        players.append(Player(kind, uri, caption, f"{kind} {when}: {caption}", linked))
    return tuple(players)


def _data_uri(path: Path) -> str:
    return f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _link(path: Path, folder: Path) -> str:
    try:
        return quote(Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix())
    except ValueError:  # another drive of Windows
        return path.resolve().as_uri()


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
        return _whole_mp4(content) if path.suffix == ".mp4" else _whole_wav(content)
    except OSError:
        return False


def _whole_mp4(content: bytes) -> bool:
    """Whether the boxes of ISO/IEC 14496-12 fill the file, beginning with its type, and its index is among them."""
    names, place = [], 0
    while place + 8 <= len(content):
        size, name = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        if size == 1 and place + 16 <= len(content):
            size = int.from_bytes(content[place + 8 : place + 16], "big")
        if size < 8 or not _BOX.match(name):
            return False
        names.append(name)
        place += size
    return place == len(content) and names[:1] == [b"ftyp"] and b"moov" in names


def _whole_wav(content: bytes) -> bool:
    try:
        with wave.open(io.BytesIO(content)) as file:
            expected = file.getnframes() * file.getnchannels() * file.getsampwidth()
            return len(file.readframes(file.getnframes())) == expected
    except (wave.Error, EOFError):
        return False
