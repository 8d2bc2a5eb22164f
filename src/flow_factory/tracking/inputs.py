"""Digests of what a run reads: base weights and training data. A resumed run must find them unchanged.

The configuration only names these files; a model folder that was trained again, a prompt file that was edited or a
picture that was replaced under the same name would make a resumed run another run without a word. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_factory.hparams.builtin import resolve_builtin

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments, DatasetArguments

_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")
_WHOLE_UP_TO = 16 << 20  # larger files are sampled: hashing tens of GB would take longer than loading them
_PIECE = 1 << 20
# Pictures are many. They are compressed, so that another picture differs in its size or from where it differs onwards.
_WHOLE_MEDIA_UP_TO, _MEDIA_PIECE = 64 << 10, 16 << 10
_LINES_TOGETHER = 100


def describe_inputs(config: Arguments) -> dict[str, str]:
    """Digest of every local input file by its place: "model/vae/config.json", "data/default/train.txt".

    Media that a data file names have one digest for each hundred of its lines ("media of data/default/train.jsonl,
    lines 101 to 200"), so that it can be said where one has changed, and a large dataset does not make a long list.
    Models named by a Hub id and files that are missing are left out (loading them says what is missing).
    """
    found: dict[str, str] = {}
    roots = {"model": config.model_args.model_name_or_path, "model.resume_path": config.model_args.resume_path}
    for name, given in roots.items():
        if given is None:
            continue
        root = Path(resolve_builtin(given, "model")).expanduser()
        for path in _model_files(root):
            place = path.relative_to(root).as_posix() if root.is_dir() else path.name
            found[f"{name}/{place}"] = digest(path)
    for source in config.data_args.train_sources():
        split = source.train.split if source.train is not None else "train"
        folder = Path(resolve_builtin(source.dataset_dir, "prompts")).expanduser()
        for path in (folder / f"{split}.txt", folder / f"{split}.jsonl"):
            if path.is_file():
                place = f"data/{source.name}/{path.name}"
                found[place] = digest(path, whole_up_to=path.stat().st_size)
                if path.suffix == ".jsonl":
                    found |= {f"media of {place}, {lines}": value for lines, value in _media_digests(path, source)}
    return found


def digest(path: Path, whole_up_to: int = _WHOLE_UP_TO, piece: int = _PIECE) -> str:
    """BLAKE2 of a file's size and content; of larger files than `whole_up_to` the beginning, the middle and the end."""
    size = path.stat().st_size
    hasher = hashlib.blake2b(str(size).encode() + b"\0", digest_size=16)
    with open(path, "rb") as handle:
        if size <= whole_up_to:
            hasher.update(handle.read())
        else:
            for start in (0, size // 2, size - piece):
                handle.seek(start)
                hasher.update(handle.read(piece))
    return hasher.hexdigest()


def changed_inputs(saved: dict[str, str], present: dict[str, str]) -> list[str]:
    """One phrase per file that is not what it was."""
    phrases = [f"{place} has another content" for place in saved if present.get(place, saved[place]) != saved[place]]
    phrases += [f"{place} is gone" for place in saved if place not in present]
    phrases += [f"{place} is new" for place in present if place not in saved]
    return sorted(phrases)


def _media_digests(path: Path, source: DatasetArguments) -> Iterator[tuple[str, str]]:
    """Lines of a data file and one digest of the media that they name, with their names; lines without media left out.

    Whatever names a file in the media folders is taken for one, so that stored examples, condition media under a
    model's own keys and files that only a reward reads are all found. What is wrong with a line is said elsewhere.
    """
    given = {"images": source.image_dir, "videos": source.video_dir, "audios": source.audio_dir}
    folders = [path.parent / name if own is None else Path(own).expanduser() for name, own in given.items()]
    # Absolute paths need some folder to be joined to, and any will do.
    folders = [folder for folder in folders if folder.is_dir()] or folders[:1]
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    for start in range(0, len(lines), _LINES_TOGETHER):
        together = lines[start : start + _LINES_TOGETHER]
        media = [named for line in together for named in _files_named(line, folders)]
        if media:
            parts = [f"{name}\0{digest(file, _WHOLE_MEDIA_UP_TO, _MEDIA_PIECE)}\0" for name, file in media]
            hasher = hashlib.blake2b("".join(parts).encode("utf-8", "surrogatepass"), digest_size=16)
            yield f"lines {start + 1} to {start + len(together)}", hasher.hexdigest()


def _files_named(line: bytes, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The texts in a line's object that name a file in one of the folders, each with the file."""
    try:
        waiting: list[Any] = [json.loads(line)] if line.strip() else []
    except (ValueError, RecursionError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            # os.path.isfile: a text may be longer than a file's name, or hold characters that none has.
            yield from ((value, folder / value) for folder in folders if os.path.isfile(folder / value))


def _model_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and path.suffix in _MODEL_FILES and not hidden:
                yield path
