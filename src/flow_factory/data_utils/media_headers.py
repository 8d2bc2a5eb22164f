"""Whether media files are of the kind that their slots take, read off their headers, so that `check` can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flow_factory.contracts import Modality
from flow_factory.data_utils.offline_media import image_size
from flow_factory.data_utils.prompt_files import PromptRow
from flow_factory.data_utils.video_files import sound_rate, video_facts


def check_media_headers(rows: Iterable[PromptRow], folders: Mapping[Modality, Path], path: str | Path) -> None:
    """Opens every media file once, without decoding it.

    Args:
        rows: The rows of a prompt file, whose media files exist.
        folders: What their paths are relative to.
        path: The prompt file, for messages.

    Raises:
        InputError: Naming the prompt file, the line and the media file, if one is of another kind, empty or damaged.
    """
    seen: set[tuple[Modality, Path]] = set()
    for row in rows:
        for ref in row.media:
            file = folders[ref.modality] / ref.path
            if (ref.modality, file) not in seen:
                seen.add((ref.modality, file))
                _FACTS[ref.modality](file, f"{path}:{row.line}")


_FACTS = {Modality.IMAGE: image_size, Modality.VIDEO: video_facts, Modality.AUDIO: sound_rate}
