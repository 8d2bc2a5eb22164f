"""Condition media of prompts as tensors. Videos and waveforms are decoded with PyAV (the extra `video`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_factory.contracts import Modality, SoundFormat
from flow_factory.data_utils.offline_media import read_image
from flow_factory.data_utils.prompt_dataset import MediaFile
from flow_factory.data_utils.video_files import SILENCE, opened, quarter_turns, start_time, streams, subject
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
    """Frames of the first video stream, turned as a player shows them, uint8 [F, 3, H, W], with its average rate.

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
        frames = [np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns(frame)) for frame in decoded]
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
        chunks = list(_resampled(container, stream, resampler, str(path)))
    if not chunks:
        raise InputError(f"{path} holds no sound; replace the file or remove its record.")
    return Audio(torch.from_numpy(np.concatenate(chunks, axis=1)).clamp(-1, 1), rate)


def read_soundtrack(path: Path, sound: SoundFormat, place: str = "") -> Audio:
    """The sound of a video from its first frame on, float32 [channels, samples] in [-1, 1], as a model hears it.

    FFmpeg brings it to the rate and the channels; mono becomes two channels of half its power each. What the file has
    beyond the samples is cut off, and what it lacks is silent, up to `SILENCE` seconds.

    Args:
        path: The file.
        sound: What the sound is brought to.
        place: `file:line` that names it, for messages.

    Raises:
        InputError: If the file has no sound track, lacks more of it, or cannot be decoded.
    """
    with opened(path, place) as container:
        import av

        video, stream = streams(container, path, place)
        offset = round((start_time(stream) - start_time(video)) * sound.sample_rate)
        layout = "mono" if sound.channels == 1 else "stereo"
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=sound.sample_rate)
        chunks: list[np.ndarray] = []
        decoded = 0
        for chunk in _resampled(container, stream, resampler, subject(path, place)):
            chunks.append(chunk)
            decoded += chunk.shape[1]
            if decoded >= sound.samples - offset:
                break
    begin = max(0, offset)
    heard = np.concatenate(chunks, axis=1) if chunks else np.zeros((sound.channels, 0), dtype=np.float32)
    heard = heard[:, begin - offset :][:, : max(0, sound.samples - begin)]
    count = heard.shape[1]
    if sound.samples - count > SILENCE * sound.sample_rate:
        raise InputError(
            f"{subject(path, place)} has sound for {count / sound.sample_rate:.2f} of the {sound.seconds:.2f} seconds "
            f"that are trained on; replace the file or remove its record."
        )
    waveform = np.zeros((sound.channels, sound.samples), dtype=np.float32)
    waveform[:, begin : begin + count] = heard
    return Audio(torch.from_numpy(waveform).clamp(-1, 1), sound.sample_rate)


def _resampled(container: Any, stream: Any, resampler: Any, name: str) -> Iterator[np.ndarray]:
    """The sound of a stream in pieces, float32 [channels, samples]; `name` is what messages call the file."""
    kinds: set[tuple[int, str]] = set()
    for frame in itertools.chain(container.decode(stream), [None]):  # None flushes what the resampler still holds
        if frame is not None:
            kinds.add((frame.sample_rate, frame.layout.name))
        if len(kinds) > 1:
            said = " and ".join(f"{layout} of {rate} Hz" for rate, layout in sorted(kinds))
            raise InputError(f"{name} holds {said}, one after the other; store it anew, or remove its record.")
        yield from (part.to_ndarray() for part in resampler.resample(frame))
