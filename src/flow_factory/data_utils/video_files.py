"""Files of video and sound, opened with PyAV (the extra `video`); imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flow_factory.data_utils.offline_media import Size
from flow_factory.errors import InputError


@contextmanager
def opened(path: Path, place: str = "") -> Iterator[Any]:
    """The file as an open PyAV container; what goes wrong inside is said with the file's name.

    Args:
        path: The file.
        place: `file:line` that names it, for messages.

    Raises:
        InputError: If PyAV is missing, or the file cannot be decoded.
    """
    try:
        import av
        from av.error import FFmpegError
    except ModuleNotFoundError as error:
        raise InputError(f'{path}: reading video and sound needs PyAV: pip install "flow-factory[video]".') from error
    try:
        with av.open(str(path)) as container:
            yield container
    except (FFmpegError, OSError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be decoded: {error}"
        raise InputError(f"{subject(path, place)} {what}; replace the file or remove its record.") from error


def subject(path: Path, place: str = "") -> str:
    """How messages name a file."""
    return f"{place}: {path}" if place else str(path)


def sound_rate(path: Path, place: str = "") -> int:
    """Samples per second of the first audio stream, with nothing decoded.

    Raises:
        InputError: If the file cannot be opened, or has no sound.
    """
    with opened(path, place) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise InputError(f"{subject(path, place)} holds no sound; replace the file or remove its record.")
        return stream.rate


def video_facts(path: Path, place: str = "") -> tuple[Size, int]:
    """Height and width of the first video stream, and its number of frames, with nothing decoded.

    The number is the header's, else that of the stream's packets (some containers do not say it).

    Raises:
        InputError: If the file cannot be opened, or has no frames.
    """
    with opened(path, place) as container:
        stream = next(iter(container.streams.video), None)
        frames = 0
        if stream is not None:
            frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        if stream is None or not frames:
            raise InputError(f"{subject(path, place)} holds no video frames; replace the file or remove its record.")
        return (stream.height, stream.width), frames
