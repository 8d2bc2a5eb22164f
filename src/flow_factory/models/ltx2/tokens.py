"""Layouts of LTX-2's latents: as a video and a spectrogram, as which states have them, and as the network's tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def pack_video(pipeline: Any, latents: Tensor) -> Tensor:
    """Tokens [B, S, D] of latents [B, C, f, h, w]; of a mask [B, 1, f, h, w], too."""
    spatial, temporal = pipeline.transformer_spatial_patch_size, pipeline.transformer_temporal_patch_size
    return pipeline._pack_latents(latents, spatial, temporal)


def unpack_video(pipeline: Any, tokens: Tensor, like: Tensor) -> Tensor:
    """The inverse of `pack_video`, for latents with the shape of `like`."""
    frames, height, width = like.shape[-3:]
    spatial, temporal = pipeline.transformer_spatial_patch_size, pipeline.transformer_temporal_patch_size
    cells = (frames // temporal, height // spatial, width // spatial)
    return pipeline._unpack_latents(tokens, *cells, spatial, temporal)


def pack_audio(pipeline: Any, latents: Tensor) -> Tensor:
    """Tokens [B, L, C M] of latents [B, C, L, M], one for each moment."""
    return pipeline._pack_audio_latents(latents)


def unpack_audio(pipeline: Any, tokens: Tensor, like: Tensor) -> Tensor:
    """The inverse of `pack_audio`, for latents with the shape of `like`."""
    return pipeline._unpack_audio_latents(tokens, *like.shape[-2:])
