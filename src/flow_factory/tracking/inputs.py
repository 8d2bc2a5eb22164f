"""Digests of what a run reads: base weights and training prompts. A resumed run must find them unchanged.

The configuration only names these files; a model folder that was trained again or a prompt file that was edited under
the same name would make a resumed run another run without a word. Needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flow_factory.hparams.builtin import resolve_builtin

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments

_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")
_WHOLE_UP_TO = 16 << 20  # larger files are sampled: hashing tens of GB would take longer than loading them
_PIECE = 1 << 20


def describe_inputs(config: Arguments) -> dict[str, str]:
    """Digest of every local input file by its place: "model/vae/config.json", "data/default/train.txt".

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
                found[f"data/{source.name}/{path.name}"] = digest(path)
    return found


def digest(path: Path) -> str:
    """BLAKE2 of a file's size and content; of large files the beginning, the middle and the end."""
    size = path.stat().st_size
    hasher = hashlib.blake2b(str(size).encode() + b"\0", digest_size=16)
    with open(path, "rb") as handle:
        if size <= _WHOLE_UP_TO:
            hasher.update(handle.read())
        else:
            for start in (0, size // 2, size - _PIECE):
                handle.seek(start)
                hasher.update(handle.read(_PIECE))
    return hasher.hexdigest()


def changed_inputs(saved: dict[str, str], present: dict[str, str]) -> list[str]:
    """One phrase per file that is not what it was."""
    phrases = [f"{place} has another content" for place in saved if present.get(place, saved[place]) != saved[place]]
    phrases += [f"{place} is gone" for place in saved if place not in present]
    phrases += [f"{place} is new" for place in present if place not in saved]
    return sorted(phrases)


def _model_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and path.suffix in _MODEL_FILES and not hidden:
                yield path
