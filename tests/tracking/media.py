"""Samples with videos and sounds whose every frame and second is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flow_factory.rewards.smoke import make_sample
from flow_factory.samples import Audio, BaseSample, T2AVSample, T2VSample


def clip(count: int = 9, height: int = 32, width: int = 48, seed: int = 0) -> Tensor:
    """Frames of one colour each, uint8 [F, 3, H, W]: red tells the frame, green and blue the clip."""
    red = torch.linspace(0, 250, count).round().to(torch.uint8)
    frames = torch.empty(count, 3, height, width, dtype=torch.uint8)
    frames[:, 0] = red[:, None, None]
    frames[:, 1], frames[:, 2] = 40 * (seed + 1) % 256, 90
    return frames


def tone(seconds: float = 1.0, sample_rate: int = 24000, channels: int = 2, hertz: float = 440.0) -> Audio:
    """A sine of amplitude 1/2 whose pitch glides, so that no shift of it equals another."""
    t = torch.arange(round(seconds * sample_rate)) / sample_rate
    wave = 0.5 * torch.sin(2 * torch.pi * (hertz * t + 100 * t * t))
    return Audio(wave.repeat(channels, 1), sample_rate)


def video_sample(
    sample_class: type[BaseSample] = T2VSample, frames: Tensor | None = None, fps: float = 8.0, **fields: Any
) -> BaseSample:
    """A sample of a class that has a video; `fields` are set on it."""
    sample = make_sample(sample_class, torch.zeros(3, 32, 48, dtype=torch.uint8), "a prompt", "toy", 0, {})
    values = {"video": clip() if frames is None else frames, "fps": fps, **fields}
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def sounding_sample(sound: Audio | None = None, **fields: Any) -> BaseSample:
    """A video with its sound."""
    sound = sound or tone()
    return video_sample(T2AVSample, audio=sound.waveform, sample_rate=sound.sample_rate, **fields)
