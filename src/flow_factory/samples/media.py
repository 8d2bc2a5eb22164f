"""Decoded media that are given to a model, and one example's inputs as an adapter encodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Video:
    """Frames, uint8 [F, C, H, W] on CPU, shown at `fps` Hz."""

    frames: Tensor
    fps: float


@dataclass(frozen=True, eq=False)
class Audio:
    """A waveform, float32 [channels, samples] in [-1, 1] on CPU, at `sample_rate` Hz."""

    waveform: Tensor
    sample_rate: int


@dataclass(frozen=True, eq=False)
class VideoWithSound:
    """What a joint model makes of one row: frames, uint8 [F, C, H, W] on CPU, and the sound that goes with them."""

    frames: Tensor
    sound: Audio


@dataclass(frozen=True, eq=False)
class VideosWithSound:
    """Several of one size and length, as one batch.

    Attributes:
        frames: uint8 [B, F, C, H, W] on CPU.
        waveforms: float32 [B, channels, samples] in [-1, 1] on CPU.
        sample_rate: Hz.
    """

    frames: Tensor
    waveforms: Tensor
    sample_rate: int

    @classmethod
    def stack(cls, items: Sequence[VideoWithSound]) -> VideosWithSound:
        """The batch of these, which have one sample rate."""
        frames = torch.stack([item.frames for item in items])
        return cls(frames, torch.stack([item.sound.waveform for item in items]), items[0].sound.sample_rate)

    def unbind(self) -> tuple[VideoWithSound, ...]:
        """The items; the inverse of `stack`."""
        pairs = zip(self.frames, self.waveforms, strict=True)
        return tuple(VideoWithSound(frames, Audio(sound, self.sample_rate)) for frames, sound in pairs)


MediaItem = Tensor | Video | Audio
"""An image is a uint8 tensor [C, H, W] on CPU."""

Media = Mapping[str, tuple[MediaItem, ...]]
"""Name of an input slot to what fills it, in order."""


@dataclass(frozen=True)
class ConditionInputs:
    """What one example is generated from, before it is encoded.

    Attributes:
        prompt: The text.
        size: Height and width of the output in pixels, which some models bring their condition media to.
        negative_prompt: The negative text, or None.
        media: Decoded condition media by slot; empty for text alone.
    """

    prompt: str
    size: tuple[int, int]
    negative_prompt: str | None = None
    media: Media = field(default_factory=dict)

    def images(self, slot: str | None = None) -> list[Tensor]:
        """The images of a slot, or of all slots in order."""
        chosen = self.media.values() if slot is None else [self.media.get(slot, ())]
        return [item for items in chosen for item in items if isinstance(item, Tensor)]

    def videos(self) -> list[Video]:
        """The videos of all slots in order."""
        return [item for items in self.media.values() for item in items if isinstance(item, Video)]

    def audios(self) -> list[Audio]:
        """The waveforms of all slots in order."""
        return [item for items in self.media.values() for item in items if isinstance(item, Audio)]
