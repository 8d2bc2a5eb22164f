"""Latents standardised per channel, as VAEs of the Wan and Qwen-Image kind have them in their configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    shape = (1, vae.config.z_dim, *([1] * (like.ndim - 2)))
    mean, std = (torch.tensor(getattr(vae.config, name)).view(shape) for name in ("latents_mean", "latents_std"))
    return mean.to(like.device, like.dtype), (1.0 / std).to(like.device, like.dtype)


def standardise(vae: Any, latents: Tensor) -> Tensor:
    """Latents [B, C, ...] of the VAE's encoder as the network takes them."""
    mean, inverse_std = _statistics(vae, latents)
    return (latents - mean) * inverse_std


def destandardise(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `standardise`, in the VAE's dtype."""
    latents = latents.to(vae.dtype)
    mean, inverse_std = _statistics(vae, latents)
    return latents / inverse_std + mean
