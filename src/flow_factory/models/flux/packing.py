"""Latents as tokens: 2 x 2 latents are the channels of one token, row by row (FLUX.1, Qwen-Image and their kin)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor

from flow_factory.models.conditions import PromptCondition
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import LatentState


def pack(latents: Tensor) -> Tensor:
    """Tokens [B, (H / 2) (W / 2), 4 C] of latents [B, C, H, W] with even sides."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`; height and width in latents."""
    return FluxPipeline._unpack_latents(tokens, height, width, vae_scale_factor=1)


def flatten(places: Tensor) -> Tensor:
    """Tokens [B, h w, C] of [B, C, h, w], one for each place (FLUX.2, which packs latents before it standardises)."""
    return places.flatten(2).transpose(1, 2)


def unflatten(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `flatten`; height and width in tokens."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


class PackedLatentsAdapter(TextToImageAdapter):
    """For pipelines that keep their latents packed. The state here is unpacked, so that its shape tells the size.

    Attributes:
        no_media: Arguments of the pipeline's `prepare_latents` that leave condition media out.
    """

    no_media: ClassVar[Mapping[str, None]] = {}

    @property
    def latent_channels(self) -> int:
        return self.pipeline.transformer.config.in_channels // 4

    def prepare_latents(
        self,
        condition: PromptCondition,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        packed = self.pipeline.prepare_latents(
            batch_size=len(generators),
            num_channels_latents=self.latent_channels,
            height=height,
            width=width,
            dtype=torch.float32,
            device=self.device,
            generator=list(generators),
            **self.no_media,
        )
        packed = packed[0] if isinstance(packed, tuple) else packed  # some return the tokens' positions as well
        factor = self.pipeline.vae_scale_factor
        return LatentState.single(unpack(packed, height // factor, width // factor))
