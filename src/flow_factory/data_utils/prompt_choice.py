"""Which prompts to make pictures of, and how many of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flow_factory.contracts import Modality
from flow_factory.data_utils.json_lines import has_lone_surrogate
from flow_factory.data_utils.prompt_dataset import MediaFile, media_files
from flow_factory.data_utils.prompt_files import (
    PromptRow,
    check_media_files,
    find_prompt_file,
    has_split,
    media_folders,
    read_prompts,
)
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetEvalSpec

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments, DatasetArguments

DEFAULT_PICTURES = 16


@dataclass(frozen=True)
class PromptChoice:
    """One picture to make.

    Attributes:
        prompt: The text.
        negative_prompt: The negative text, or None.
        index: Row of the prompt in its list, which seeds the noise as it does in evaluations.
        member: Which picture of this prompt, from 0.
        source: Name of the evaluation set, or None for prompts that were given.
        media: Condition media.
    """

    prompt: str
    negative_prompt: str | None
    index: int
    member: int
    source: str | None
    media: tuple[MediaFile, ...] = ()


def choose_prompts(
    config: Arguments, texts: Sequence[str] = (), file: Path | None = None, count: int | None = None
) -> list[PromptChoice]:
    """The pictures to make: of given texts, of a file's prompts, or of the first ones of the evaluation set.

    Args:
        config: Names the evaluation sets.
        texts: Prompts.
        file: A `.txt` or `.jsonl` file of prompts.
        count: Pictures in all, dealt evenly to the prompts in order; None makes one of each (of an evaluation set, the
            first 16).

    Raises:
        InputError: If a prompt is empty, there are none, `count` leaves given texts out, the model needs media that
            texts alone do not give, or a media file is missing.
    """
    if texts and file is not None:
        raise InputError("--prompt and --prompts are both given; put all prompts into the file, or leave it out.")
    source: str | None = None
    path, folders = Path(), {}
    if texts:
        _check_text_suffices(config)
        rows = [_row(text) for text in texts]
    elif file is not None:
        path = file.expanduser()
        rows, folders = read_prompts(path, config.spec.io), media_folders(path.parent)
        if not rows:
            raise InputError(f"--prompts {file} holds no prompts.")
    else:
        dataset = default_dataset(config)
        source = dataset.name
        spec = dataset.eval or DatasetEvalSpec()
        path = find_prompt_file(dataset.dataset_dir, spec.split)
        folders = media_folders(dataset.dataset_dir, dataset.image_dir, dataset.video_dir, dataset.audio_dir)
        rows = read_prompts(path, config.spec.io)[: spec.max_dataset_size]
        rows = rows[: DEFAULT_PICTURES if count is None else count]
    check_media_files(rows, folders, path)
    total = len(rows) if count is None else count
    if texts and total < len(rows):
        raise InputError(f"--num {total} is fewer than the {len(rows)} prompts given; raise it, or give fewer prompts.")
    choices = []
    for index, row in enumerate(rows):
        media = media_files(row, folders)
        for member in range(-(-max(0, total - index) // len(rows))):
            choices.append(PromptChoice(row.prompt, row.negative_prompt, index, member, source, media))
    return choices


def default_dataset(config: Arguments) -> DatasetArguments:
    """The first dataset that is evaluated.

    Raises:
        InputError: If there is none.
    """
    for dataset in config.data_args.sources():
        if dataset.eval is not None:
            if dataset.eval.enabled:
                return dataset
        elif has_split(dataset.dataset_dir, DatasetEvalSpec().split):
            return dataset
    raise InputError(
        "the configuration has no evaluation set whose prompts could be taken: no dataset has a test split. Give "
        "--prompt TEXT or --prompts FILE."
    )


def _check_text_suffices(config: Arguments) -> None:
    io = config.spec.io
    needed = [s.name for s in io.inputs if s.required and s.modality is not Modality.TEXT]
    needed += [" or ".join(io.one_of)] if io.one_of else []
    if needed:
        raise InputError(
            f"--prompt gives text alone, and {config.model_args.model_type} needs {' and '.join(needed)} as well; give "
            f"--prompts FILE.jsonl, whose rows name the files."
        )


def _row(text: str) -> PromptRow:
    if not text.strip():
        raise InputError(f"--prompt {text!r} is empty; give a text, or leave it out for the evaluation set's prompts.")
    if has_lone_surrogate(text):  # what a shell hands on that is no UTF-8
        raise InputError(f"--prompt {text!r} is no UTF-8; write it in UTF-8, or give a file with --prompts.")
    return PromptRow(text.strip())
