"""What video adapters share: latents with frames, a video VAE, and a number of frames among the model's fields."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flow_factory.models.conditions import PromptCondition
from flow_factory.models.prompted import PromptedAdapter
from flow_factory.models.videos import video_bytes, video_pixels
from flow_factory.samples import LatentState, T2VSample


class VideoAdapter(PromptedAdapter):
    """A state of latents [B, C, f, h, w], whose shape tells the video's; uint8 videos [F, C, H, W] out.

    A subclass gives `load_pipeline`, `predict_velocity`, `encode_texts`, the VAE's two directions, and the frame rate.
    The model's own fields have `num_frames`. What starts from pictures or a video has another `sample_class`.
    """

    sample_class = T2VSample
    media_field = "video"

    @abstractmethod
    def frame_rate(self, generation: Any) -> float:
        """Frames per second that a video made with these model-specific fields is shown at."""

    @abstractmethod
    def decode_pixels(self, latents: Tensor) -> Tensor:
        """Pixels [B, C, F, H, W] in about [-1, 1] of latents [B, C, f, h, w] as the network makes them."""

    @abstractmethod
    def encode_pixels(self, pixels: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        """The inverse of `decode_pixels`, float32: the posterior's mode, or a sample, row i from `generators[i]`."""

    @property
    def latent_channels(self) -> int:
        """C of the state."""
        return self.pipeline.transformer.config.in_channels

    def media_fields(self, media: Any, generation: Any = None) -> dict[str, Any]:
        fields = generation or self.config.train_generation
        return {self.media_field: media, "fps": self.frame_rate(fields)}

    def draw_noise(self, generators: Sequence[torch.Generator], height: int, width: int, num_frames: int) -> Tensor:
        """Float32 noise [B, C, f, h, w], row i from `generators[i]` as the pipeline would draw it."""
        return self.pipeline.prepare_latents(
            batch_size=len(generators),
            num_channels_latents=self.latent_channels,
            height=height,
            width=width,
            num_frames=num_frames,
            dtype=torch.float32,
            device=self.device,
            generator=list(generators),
        )

    def prepare_latents(
        self,
        condition: PromptCondition,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        fields = generation or self.config.train_generation
        return LatentState.single(self.draw_noise(generators, height, width, fields.num_frames))

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return video_bytes(self.pipeline, self.decode_pixels(state.only))

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of uint8 videos [F, C, H, W] of one size and length: the posterior's mode, or a sample."""
        return LatentState.single(self.encode_pixels(video_pixels(self.pipeline, media, self.device), generators))
