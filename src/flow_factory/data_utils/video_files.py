"""Files of video and sound, opened with PyAV (the extra `video`); imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_factory.data_utils.offline_media import Size
from flow_factory.errors import InputError

SILENCE = 0.1
"""Seconds of sound that a stored video may lack, at its ends together; there it is silent."""


@dataclass(frozen=True)
class Soundtrack:
    """What a video's file says of its sound.

    Attributes:
        frame_rate: Frames per second of the video.
        start: Seconds from the first frame to the beginning of the sound; negative where that is earlier.
        end: Seconds from the first frame to the end of the sound.
    """

    frame_rate: float
    start: float
    end: float

    def missing(self, seconds: float) -> float:
        """How many of the first so many seconds of the video have no sound."""
        return seconds - max(0.0, min(self.end, seconds) - max(self.start, 0.0))


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
    """Height and width of the first video stream as it is shown, and its number of frames; one frame is decoded.

    The number is the header's. Where that does not say it, or counts frames that are not shown, as in a clip that was
    trimmed without encoding it anew, it is that of the stream's packets.

    Raises:
        InputError: If the file cannot be opened, or has no frames.
    """
    with opened(path, place) as container:
        stream = next(iter(container.streams.video), None)
        frames, first = (0, None) if stream is None else _count(container, stream)
    if not frames or first is None:
        raise InputError(f"{subject(path, place)} holds no video frames; replace the file or remove its record.")
    size = first.height, first.width
    return size[::-1] if quarter_turns(first) % 2 else size, frames


def quarter_turns(frame: Any) -> int:
    """How often a decoded frame is turned by 90 degrees counterclockwise to be shown: phones store all that lying."""
    return round(frame.rotation / 90) % 4


def _count(container: Any, stream: Any) -> tuple[int, Any]:
    """The number of frames that are shown, and the first one; None if none can be decoded."""
    frames = 0 if _is_trimmed(stream) else stream.frames
    counted, first = 0, None
    for packet in container.demux(stream):
        counted += packet.size > 0 and not packet.is_discard
        if first is None:
            first = next(iter(packet.decode()), None)
        if first is not None and frames:
            return frames, first
    return frames or counted, first


def _is_trimmed(stream: Any) -> bool:
    """Whether the header's frames last longer or shorter than the stream, some of them being left out."""
    if stream.duration is None or not stream.average_rate:
        return False
    return abs(float(stream.duration * stream.time_base * stream.average_rate) - stream.frames) > 0.5


def decode_to_end(path: Path, place: str = "") -> None:
    """Decodes the first video stream and, if there is any, the first audio stream, and keeps nothing.

    Raises:
        InputError: If they cannot be decoded, or there are fewer frames than `video_facts` says.
    """
    _, promised = video_facts(path, place)
    with opened(path, place) as container:
        from av import VideoFrame

        chosen = [*container.streams.video[:1], *container.streams.audio[:1]]
        frames = sum(isinstance(frame, VideoFrame) for frame in container.decode(chosen))
    if frames < promised:
        raise InputError(
            f"{subject(path, place)} ends after {frames} of {promised} frames; replace the file or remove its record."
        )


def soundtrack_facts(path: Path, place: str = "") -> Soundtrack:
    """Where the first audio stream lies beside the first video stream, with nothing decoded.

    Raises:
        InputError: If the file cannot be opened, or lacks one of them.
    """
    with opened(path, place) as container:
        video, sound = streams(container, path, place)
        rate = video.average_rate or video.guessed_rate
        if not rate:
            raise InputError(f"{subject(path, place)} does not say how many frames a second it has; store it anew.")
        if sound.duration is not None:
            end = (sound.start_time or 0) + sound.duration
        else:  # some containers do not say it
            packets = [packet for packet in container.demux(sound) if packet.pts is not None]
            end = max((packet.pts + (packet.duration or 0) for packet in packets), default=0)
        first = start_time(video)
        return Soundtrack(float(rate), start_time(sound) - first, float(end * sound.time_base) - first)


def streams(container: Any, path: Path, place: str = "") -> tuple[Any, Any]:
    """The first video and the first audio stream.

    Raises:
        InputError: If there are not both.
    """
    video, sound = (next(iter(found), None) for found in (container.streams.video, container.streams.audio))
    if video is None:
        raise InputError(f"{subject(path, place)} holds no video frames; replace the file or remove its record.")
    if sound is None:
        raise InputError(
            f"{subject(path, place)} has no sound track, and the model learns videos with their sound; add a track, or "
            f"remove the record."
        )
    return video, sound


def start_time(stream: Any) -> float:
    """Seconds at which a stream begins."""
    return float((stream.start_time or 0) * stream.time_base)
