"""Train the tiny AutoencoderKL: 64 x 64 pictures to 4 x 16 x 16 latents with unit scale in every channel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from flow_factory.rewards.shapes_world import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_SIZE,
    MAX_COUNT,
    SHAPES,
    Kind,
    Scene,
    render,
    sample_scene,
)

Log = Callable[[str], None]
KINDS: tuple[Kind, ...] = ("single", "count", "number")


def draw_scenes(rng: np.random.Generator, count: int, weights: tuple[float, float, float]) -> list[Scene]:
    """Draw scenes of both sides of the split, kinds in proportion to `weights` (single, count, number)."""
    kinds = rng.choice(len(KINDS), size=count, p=np.asarray(weights) / sum(weights))
    return [sample_scene(rng, KINDS[kind]) for kind in kinds]


def mistaken(scene: Scene, rng: np.random.Generator) -> Scene:
    """Scene with one attribute replaced by another value; what is shown is twice as likely to change as its colours."""
    attributes = ["background", "colour", "subject", "subject"] + ["count"] * (2 if scene.kind == "count" else 0)
    attribute = attributes[rng.integers(len(attributes))]
    if attribute == "subject" and scene.number is not None:
        digits = list(scene.digits)
        place = int(rng.integers(len(digits)))
        least = 1 if place == 0 and len(digits) == 2 else 0  # no leading zero
        digits[place] = int(rng.choice([digit for digit in range(least, 10) if digit != digits[place]]))
        return replace(scene, number=int("".join(map(str, digits))))
    values = {
        "background": tuple(BACKGROUNDS),
        "colour": tuple(COLOURS),
        "shape": SHAPES,
        "count": tuple(range(2, MAX_COUNT + 1)),
    }
    name = "shape" if attribute == "subject" else attribute
    others = [value for value in values[name] if value != getattr(scene, name)]
    return replace(scene, **{name: others[int(rng.integers(len(others)))]})


def draw_pictures(scenes: list[Scene], rng: np.random.Generator) -> torch.Tensor:
    """Pictures of scenes as uint8 (N, 3, 64, 64)."""
    pixels = np.stack([np.asarray(render(scene, rng)) for scene in scenes])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def to_signed(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 0..255 to float -1..1, the range an AutoencoderKL works in."""
    return pictures.float() / 127.5 - 1.0


def build_autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def reconstruction_loss(picture: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L1 and L2 on pixels, and L1 on their horizontal and vertical differences, which keeps edges sharp."""
    loss = F.l1_loss(picture, target) + F.mse_loss(picture, target)
    for dim in (-1, -2):
        loss = loss + 0.5 * F.l1_loss(picture.diff(dim=dim), target.diff(dim=dim))
    return loss


def train_autoencoder(
    folder: Path, steps: int, batch_size: int, learning_rate: float, seed: int, log: Log
) -> AutoencoderKL:
    """Train from scratch and save to `folder`; a finished folder is loaded and returned as it is.

    Gaussian noise is added to the latents in training: the diffusion model's latents are never exact either.
    """
    if (folder / "config.json").exists():
        return AutoencoderKL.from_pretrained(folder)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = build_autoencoder()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 50) * 0.5 * (1 + math.cos(math.pi * min(1.0, i / steps)))
    )
    log(
        f"autoencoder: {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters, {steps} steps of {batch_size}"
    )
    start = time.monotonic()
    for step in range(steps):
        target = to_signed(draw_pictures(draw_scenes(rng, batch_size, (1, 1, 1)), rng))
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(target).latent_dist
            latents = posterior.mode() + 0.1 * torch.randn(posterior.mean.shape)
            picture = vae.decode(latents).sample
        loss = reconstruction_loss(picture.float(), target) + 1e-4 * posterior.mean.float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            log(f"autoencoder step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s")
    pictures = draw_pictures(draw_scenes(rng, 256, (1, 1, 1)), rng)
    normalise_latents(vae, pictures)
    with torch.no_grad():
        decoded = vae.decode(vae.encode(to_signed(pictures)).latent_dist.mode()).sample.clamp(-1, 1)
    mse = F.mse_loss(decoded, to_signed(pictures)).item()
    log(f"autoencoder: PSNR {10 * math.log10(4 / mse):.1f} dB on fresh pictures")
    vae.save_pretrained(folder, safe_serialization=True)
    return vae


@torch.no_grad()
def normalise_latents(vae: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Give every latent channel unit standard deviation, in place, without changing what the autoencoder computes.

    Scales are folded into the convolutions on both sides of the latents; the common mean goes into `shift_factor`.
    """
    latents = vae.encode(to_signed(pictures)).latent_dist.mode()
    scale = latents.std(dim=(0, 2, 3))
    channels = scale.numel()
    vae.encoder.conv_out.weight[:channels] /= scale[:, None, None, None]
    vae.encoder.conv_out.bias[:channels] /= scale
    vae.encoder.conv_out.bias[channels:] -= 2 * scale.log()  # the second half predicts log-variances
    vae.decoder.conv_in.weight *= scale[None, :, None, None]
    latents = vae.encode(to_signed(pictures)).latent_dist.mode()
    vae.register_to_config(scaling_factor=1.0 / latents.std().item(), shift_factor=latents.mean().item())
