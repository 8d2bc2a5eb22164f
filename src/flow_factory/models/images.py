"""Pictures in and out of an image VAE, as the diffusers pipelines do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor


def to_bytes(pipeline: Any, decoded: Tensor) -> list[Tensor]:
    """uint8 images [C, H, W] on CPU from decoded pixels [B, C, H, W] in about [-1, 1].

    Rounded as the pipeline's own PIL output is, so that a reward sees what a user would save.
    """
    pixels = pipeline.image_processor.postprocess(decoded, output_type="pt")
    return list((pixels.float() * 255).round().to(torch.uint8).cpu().unbind())


def to_pil(picture: Tensor) -> Image.Image:
    """The picture of uint8 [3, H, W], exactly; what pipelines take condition pictures as."""
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().cpu().numpy())


def to_pixels(pipeline: Any, media: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pixels [B, C, H, W] in [-1, 1], in the VAE's dtype if there is one, from uint8 images [C, H, W] of one size."""
    pixels = pipeline.image_processor.preprocess(torch.stack(list(media)).float() / 255)
    return pixels.to(device, getattr(pipeline, "vae", pipeline).dtype)


def decode_images(pipeline: Any, latents: Tensor) -> list[Tensor]:
    """uint8 images of scaled and shifted latents [B, C, H, W]."""
    vae = pipeline.vae
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor
    if getattr(vae.config, "shift_factor", None) is not None:
        scaled = scaled + vae.config.shift_factor
    return to_bytes(pipeline, vae.decode(scaled, return_dict=False)[0])


def encode_images(
    pipeline: Any, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None, device: torch.device
) -> Tensor:
    """Scaled and shifted latents [B, C, H, W], float32, of uint8 images: the inverse of `decode_images`.

    Args:
        pipeline: Its VAE and image processor are used.
        media: B images of one size.
        generators: One per row for a sample of the posterior; None takes its mode.
        device: Where the VAE is.
    """
    vae = pipeline.vae
    latents = posterior_latents(vae.encode(to_pixels(pipeline, media, device)).latent_dist, generators)
    return (latents - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor


def posterior_latents(posterior: Any, generators: Sequence[torch.Generator] | None) -> Tensor:
    """The posterior's mode, or a sample with row i from `generators[i]`; float32."""
    return (posterior.mode() if generators is None else posterior.sample(generator=list(generators))).float()
