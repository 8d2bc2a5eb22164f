"""What a person sees of a sample: a picture for sheets, what it was made from, and files that play.

A video is a strip of its frames, with the waveform of its sound. Sheets of pictures and of strips are laid out here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image
from torch import Tensor

from flow_factory.samples import Audio, BaseSample, ImageSample, T2AVSample, VideoSample
from flow_factory.tracking.grids import MAX_TILE, save_comparison, save_grid, to_pil
from flow_factory.tracking.players import encode_mp4, encode_wav
from flow_factory.tracking.strips import (
    FRAME_GAP,
    FRAME_SIZE,
    STRIP_FRAMES,
    frame_height,
    given_pictures,
    stacked,
    video_strip,
    waveform,
)

_STRIP_WIDTH = STRIP_FRAMES * (FRAME_SIZE + FRAME_GAP) - FRAME_GAP
_COLUMNS = 8


@dataclass(frozen=True)
class Preview:
    """What is seen and heard of one sample.

    Attributes:
        picture: The picture itself, exactly; a strip of frames of a video.
        is_strip: Whether it is of a video.
        given: The condition media it was made from, or None.
        files: Suffix ("mp4", "wav") to the content of a file that plays.
    """

    picture: Image.Image
    is_strip: bool = False
    given: Image.Image | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def preview_of(sample: BaseSample, suffixes: frozenset[str] = frozenset()) -> Preview | None:
    """What is seen of a sample.

    Args:
        sample: With decoded media.
        suffixes: Files to make of it, of those that there can be: "mp4" of a video, "wav" of a sound.

    Returns:
        None for a sample without decoded pictures.

    Raises:
        InputError: If an "mp4" is to be made and PyAV is missing.
        ValueError: If it is to be made of a video without a frame rate.
    """
    if isinstance(sample, ImageSample) and sample.image is not None:
        height, width = sample.image.shape[-2:]
        return Preview(to_pil(sample.image), given=_given(sample, (height, width)))
    if not isinstance(sample, VideoSample) or sample.video is None:
        return None
    sound = sound_of(sample)
    strip = video_strip(sample.video, sample.fps, sound)
    files: dict[str, bytes] = {}
    if "mp4" in suffixes:
        if sample.fps is None:
            raise ValueError(
                f"a video of {sample.prompt!r} has no frame rate; the adapter's `media_fields` gives `fps`."
            )
        files["mp4"] = encode_mp4(sample.video, sample.fps, sound)
    if "wav" in suffixes and sound is not None:
        files["wav"] = encode_wav(sound)
    return Preview(strip, True, _given(sample, (frame_height(sample.video), strip.width)), files)


def sound_of(sample: BaseSample) -> Audio | None:
    """The sound of a sample, if it has any."""
    if not isinstance(sample, T2AVSample) or sample.audio is None or sample.sample_rate is None:
        return None
    return Audio(sample.audio, sample.sample_rate)


def save_previews(
    rows: Sequence[tuple[str, Sequence[Preview]]], captions: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Saves a contact sheet: pictures side by side, videos one under the other, with what they were made from above.

    Args:
        rows: Title and previews of each row, such as before and after training; a single row needs no title.
        captions: The prompts, one per column.
        path: Target PNG file; its folder is created.

    Raises:
        ValueError: If there is nothing to show, or rows and captions differ in length.
    """
    strips = any(preview.is_strip for _, previews in rows for preview in previews)
    given = [preview.given for preview in rows[0][1]] if rows else []
    pictures: list[tuple[str, Sequence[Image.Image | None]]] = [
        (title, [preview.picture for preview in previews]) for title, previews in rows
    ]
    if any(item is not None for item in given):
        pictures = [("given", given), *((title or "made", row) for title, row in pictures)]
    if len(pictures) == 1 and not strips:
        save_grid([preview.picture for preview in rows[0][1]], path, captions)
    else:
        save_comparison(
            pictures, captions, path, 1 if strips else _COLUMNS, max_tile=_STRIP_WIDTH if strips else MAX_TILE
        )


def _given(sample: BaseSample, size: tuple[int, int]) -> Image.Image | None:
    """Condition media of a sample; pictures are fitted into a height and a width, a video's frames are numbered."""
    pictures: Sequence[Tensor] = getattr(sample, "condition_images", ())
    video: Tensor | None = getattr(sample, "condition_video", None)
    videos: Sequence[Tensor] = getattr(sample, "condition_videos", ()) if video is None else (video,)
    sounds: Sequence[Audio] = getattr(sample, "condition_sounds", ())
    parts = [given_pictures(pictures, size)] if pictures else []
    parts += [video_strip(frames, None) for frames in videos]
    parts += [waveform(sound, size[1]) for sound in sounds]
    return stacked(parts, FRAME_GAP) if parts else None
