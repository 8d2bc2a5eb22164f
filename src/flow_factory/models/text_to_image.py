"""What text-to-image adapters share: spatial latents and an image VAE with one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flow_factory.models.conditions import PromptCondition
from flow_factory.models.images import decode_images, encode_images
from flow_factory.models.prompted import PromptedAdapter
from flow_factory.samples import LatentState, T2ISample


class TextToImageAdapter(PromptedAdapter):
    """A state of latents [B, C, H / f, W / f], whose shape tells the picture's size; uint8 pictures [C, H, W] out.

    A subclass gives `load_pipeline`, `predict_velocity`, and `encode_texts` or the whole of `encode_prompt`.
    """

    sample_class = T2ISample

    @property
    def latent_channels(self) -> int:
        """C of the state."""
        return self.pipeline.transformer.config.in_channels

    def prepare_latents(
        self,
        condition: PromptCondition,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        return LatentState.single(
            self.pipeline.prepare_latents(
                len(generators), self.latent_channels, height, width, torch.float32, self.device, list(generators)
            )
        )

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return decode_images(self.pipeline, state.only)

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of uint8 images [C, H, W]: the posterior's mode, or a sample, row i from `generators[i]`."""
        return LatentState.single(encode_images(self.pipeline, media, generators, self.device))
