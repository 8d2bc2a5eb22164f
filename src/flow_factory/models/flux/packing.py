"""Latents as tokens: 2 x 2 latents are the channels of one token, row by row (FLUX.1, Qwen-Image and their kin)."""

from __future__ import annotations

from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """Tokens [B, (H / 2) (W / 2), 4 C] of latents [B, C, H, W] with even sides."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`; height and width in latents."""
    return FluxPipeline._unpack_latents(tokens, height, width, vae_scale_factor=1)
