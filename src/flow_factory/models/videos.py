"""Videos in and out of a video VAE, as the diffusers pipelines do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flow_factory.models.images import to_pil


def video_bytes(pipeline: Any, decoded: Tensor) -> list[Tensor]:
    """uint8 videos [F, C, H, W] on CPU from decoded pixels [B, C, F, H, W] in about [-1, 1].

    Rounded as the pipeline's own PIL output is, so that a reward sees what a user would save.
    """
    frames = pipeline.video_processor.postprocess_video(decoded, output_type="pt")
    return list((frames.float() * 255).round().to(torch.uint8).cpu().unbind())


def video_pixels(pipeline: Any, media: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pixels [B, C, F, H, W] in [-1, 1], in the VAE's dtype, from uint8 videos [F, C, H, W] of one size and length."""
    frames = torch.stack(list(media)).float() / 255
    return pipeline.video_processor.preprocess_video(frames).to(device, pipeline.vae.dtype)


def to_pil_frames(frames: Tensor) -> list[Image.Image]:
    """The pictures of uint8 [F, 3, H, W], exactly; what pipelines take condition videos as."""
    return [to_pil(frame) for frame in frames]
