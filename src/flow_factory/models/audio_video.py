"""What models share that make a video and its sound together: two components in one trajectory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from flow_factory.models.abc import BaseAdapter, ConditionT
from flow_factory.samples import Audio, Grid, T2AVSample, VideoWithSound

VIDEO, AUDIO = "video", "audio"
"""Names of the components, in their order in states and grids."""


class AudioVideoAdapter(BaseAdapter[ConditionT]):
    """A state of the components `VIDEO` and `AUDIO`; one `VideoWithSound` per row out.

    A subclass gives what every adapter gives, and the frame rate. What starts from pictures has another `sample_class`
    with the same fields (`I2AVSample`).
    """

    sample_class = T2AVSample
    media_field = "video"

    @abstractmethod
    def frame_rate(self, generation: Any) -> float:
        """Frames per second that a video made with these model-specific fields is shown at."""

    def media_fields(self, media: VideoWithSound, generation: Any = None) -> dict[str, Any]:
        return {
            self.media_field: media.frames,
            "fps": self.frame_rate(generation or self.config.train_generation),
            "audio": media.sound.waveform,
            "sample_rate": media.sound.sample_rate,
        }


def with_sound(frames: Sequence[Tensor], waveforms: Tensor, sample_rate: int) -> list[VideoWithSound]:
    """Decoded rows of a batch.

    Args:
        frames: B videos, uint8 [F, C, H, W] on CPU.
        waveforms: [B, channels, samples], any dtype and device; what lies outside of [-1, 1] is cut off.
        sample_rate: Hz.
    """
    sounds = waveforms.detach().float().clamp(-1, 1).cpu()
    return [
        VideoWithSound(video, Audio(sound.clone(), sample_rate)) for video, sound in zip(frames, sounds, strict=True)
    ]


def shared_grid(grid: Grid, components: Iterable[str] = (VIDEO, AUDIO)) -> Grid:
    """The same grid for every component: of pipelines that give the sound a copy of the video's scheduler."""
    timesteps = next(iter(grid.timesteps.values()))
    names = tuple(components)
    return Grid(dict.fromkeys(names, grid.primary), dict.fromkeys(names, timesteps))
