"""Whether media files are of the kind that their slots take, read off their headers, so that `check` can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from flow_factory.contracts import Modality
from flow_factory.data_utils.offline_media import image_size
from flow_factory.data_utils.prompt_files import PromptRow
from flow_factory.data_utils.video_files import sound_rate, video_facts

MOST_OPENED = 500
"""Files of a prompt file that `check` opens: it is asked often, and a video takes it about ten milliseconds."""


def check_media_headers(
    rows: Iterable[PromptRow], folders: Mapping[Modality, Path], path: str | Path, most: int = MOST_OPENED
) -> int:
    """Opens each of the first media files once, and decodes no more than a video's first frame.

    Args:
        rows: The rows of a prompt file, whose media files exist.
        folders: What their paths are relative to.
        path: The prompt file, for messages.
        most: How many files are opened.

    Returns:
        How many different files were left unopened.

    Raises:
        InputError: Naming the prompt file, the line and the media file, if one is of another kind, empty or damaged.
    """
    files: dict[tuple[Modality, Path], int] = {}
    for row in rows:
        for ref in row.media:
            files.setdefault((ref.modality, folders[ref.modality] / ref.path), row.line)
    for (modality, file), line in islice(files.items(), most):
        _FACTS[modality](file, f"{path}:{line}")
    return max(0, len(files) - most)


_FACTS = {Modality.IMAGE: image_size, Modality.VIDEO: video_facts, Modality.AUDIO: sound_rate}
