"""Condition media of prompts as tensors. Videos and waveforms are decoded with PyAV (the extra `video`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_factory.contracts import Modality
from flow_factory.data_utils.offline_media import read_image
from flow_factory.data_utils.prompt_dataset import MediaFile
from flow_factory.data_utils.video_files import opened, subject
from flow_factory.errors import InputError
from flow_factory.samples import Audio, MediaItem, Video


def load_media(files: Sequence[MediaFile]) -> dict[str, tuple[MediaItem, ...]]:
    """Decodes the condition media of one prompt: slot to its items, in order.

    Raises:
        InputError: Naming the file, if one cannot be decoded.
    """
    found: dict[str, tuple[MediaItem, ...]] = {}
    for file in files:
        found[file.slot] = (*found.get(file.slot, ()), read_media(file.path, file.modality))
    return found


def read_media(path: Path, modality: Modality) -> MediaItem:
    """One file as the tensors that adapters take.

    Raises:
        InputError: If it cannot be decoded.
    """
    if modality is Modality.IMAGE:
        return image_tensor(path)
    return read_video(path) if modality is Modality.VIDEO else read_audio(path)


def image_tensor(path: Path) -> Tensor:
    """A picture in RGB, uint8 [3, H, W]; see `read_image` for orientation and transparency."""
    return torch.from_numpy(np.array(read_image(path))).permute(2, 0, 1).contiguous()


def read_video(path: Path, num_frames: int | None = None, place: str = "") -> Video:
    """Frames of the first video stream, uint8 [F, 3, H, W], with the stream's average rate.

    Args:
        path: The file.
        num_frames: How many to read, from the first on; None reads all.
        place: `file:line` that names it, for messages.

    Raises:
        InputError: If the file has no frames, or cannot be decoded.
    """
    with opened(path, place) as container:
        stream = next(iter(container.streams.video), None)
        decoded = [] if stream is None else itertools.islice(container.decode(stream), num_frames)
        frames = [frame.to_ndarray(format="rgb24") for frame in decoded]
        rate = None if stream is None else stream.average_rate or stream.guessed_rate
    if not frames or not rate:
        raise InputError(f"{subject(path, place)} holds no video frames; replace the file or remove its record.")
    return Video(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous(), float(rate))


def read_audio(path: Path) -> Audio:
    """The first audio stream, float32 [channels, samples] in [-1, 1], at its own rate.

    Raises:
        InputError: If the file has no sound, or cannot be decoded.
    """
    with opened(path) as container:
        import av

        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise InputError(f"{path} holds no sound; replace the file or remove its record.")
        rate = stream.rate
        resampler = av.AudioResampler(format="fltp", rate=rate)
        decoded = [*container.decode(stream), None]  # None flushes what the resampler still holds
        chunks = [frame.to_ndarray() for part in decoded for frame in resampler.resample(part)]
    if not chunks:
        raise InputError(f"{path} holds no sound; replace the file or remove its record.")
    return Audio(torch.from_numpy(np.concatenate(chunks, axis=1)).clamp(-1, 1), rate)
