"""Condition media of cases: made from a seed, written to files without loss, and changed a little."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from flow_factory.models.images import to_pil
from flow_factory.samples import Audio, Media, MediaItem, Video


def picture(seed: int, size: tuple[int, int] = (32, 48)) -> Tensor:
    """A smooth random picture, uint8 [3, H, W]; size is (height, width)."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (interpolate(coarse, size, mode="bicubic").clamp(0, 1)[0] * 255).round().to(torch.uint8)


def pictures(media: Media) -> list[Image.Image]:
    """All pictures of a row, as pipelines take them."""
    return [to_pil(item) for items in media.values() for item in items if isinstance(item, Tensor)]


def clip(seed: int, frames: int = 5, size: tuple[int, int] = (32, 48), fps: float = 8.0) -> Video:
    """Random smooth frames."""
    return Video(torch.stack([picture(1000 * seed + i, size) for i in range(frames)]), fps)


def tone(seed: int, seconds: float = 0.5, sample_rate: int = 16000) -> Audio:
    """A stereo tone whose pitch depends on the seed."""
    t = torch.arange(int(seconds * sample_rate)) / sample_rate
    waves = [0.5 * torch.sin(2 * torch.pi * (200 + 50 * seed + 25 * c) * t) for c in range(2)]
    return Audio(torch.stack(waves), sample_rate)


def inverted(item: MediaItem) -> MediaItem:
    """The same kind of medium with other contents."""
    if isinstance(item, Tensor):
        return 255 - item
    if isinstance(item, Video):
        return replace(item, frames=255 - item.frames)
    return replace(item, waveform=item.waveform.flip(-1) * 0.5)


def save(item: MediaItem, stem: Path) -> Path:
    """Writes a medium without loss; the suffix is added to `stem`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(item, Tensor):
        path = stem.with_suffix(".png")
        Image.fromarray(item.permute(1, 2, 0).numpy()).save(path)
        return path
    path = stem.with_suffix(".mkv" if isinstance(item, Video) else ".wav")
    with av.open(str(path), "w") as container:
        if isinstance(item, Video):
            _encode_frames(container, item, _frame_stream(container, item))
        else:
            _encode_sound(container, item, _sound_stream(container, item))
    return path


def save_with_sound(video: Video, sound: Audio, stem: Path, start: float = 0.0) -> Path:
    """Writes a video with a sound track that starts so many seconds later, without loss; adds the suffix to `stem`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".mkv")
    with av.open(str(path), "w") as container:
        streams = _frame_stream(container, video), _sound_stream(container, sound)  # both before the first packet
        _encode_frames(container, video, streams[0])
        _encode_sound(container, sound, streams[1], start)
    return path


def _frame_stream(container: av.container.OutputContainer, video: Video) -> Any:
    stream: Any = container.add_stream("ffv1", rate=round(video.fps))
    stream.height, stream.width = video.frames.shape[-2:]
    stream.pix_fmt = "bgr0"
    return stream


def _encode_frames(container: av.container.OutputContainer, video: Video, stream: Any) -> None:
    for frame in video.frames:
        array = frame.permute(1, 2, 0).contiguous().numpy()
        container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
    container.mux(stream.encode())


def _layout(audio: Audio) -> str:
    return "mono" if len(audio.waveform) == 1 else "stereo"


def _sound_stream(container: av.container.OutputContainer, audio: Audio) -> Any:
    return container.add_stream("pcm_f32le", rate=audio.sample_rate, layout=_layout(audio))


def _encode_sound(container: av.container.OutputContainer, audio: Audio, stream: Any, start: float = 0.0) -> None:
    interleaved = np.ascontiguousarray(audio.waveform.T.reshape(1, -1).numpy())
    frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=_layout(audio))
    frame.sample_rate = audio.sample_rate
    frame.pts, frame.time_base = round(start * audio.sample_rate), Fraction(1, audio.sample_rate)
    container.mux(stream.encode(frame))
    container.mux(stream.encode())
