"""Videos and sounds as latents of MiniMax-H3: what the pipeline's decode steps undo.

The pipeline itself encodes only what is given to it. Its video posteriors are samples by a seed of its own, rounded to
float16; for what is trained towards, the mode is taken, and nothing is rounded. Of sounds it takes the mode, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import align_num_frames, audio_latent_num_frames
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.images import posterior_latents
from flow_factory.samples import Audio


def encode_videos(
    pipeline: Any, videos: Sequence[Tensor], generators: Sequence[torch.Generator] | None, device: torch.device
) -> Tensor:
    """Standardised latents [B, C, f, h, w], float32, of uint8 videos [F, 3, H, W] of one size and length.

    Args:
        pipeline: Whose VAE is used.
        videos: The videos.
        generators: Row i is a sample by `generators[i]`; None takes the posterior's mode.
        device: Where the VAE is.

    Raises:
        InputError: For a number of frames that the model does not make.
    """
    frames, chunk, rest = len(videos[0]), pipeline.vae_frames_per_chunk, pipeline.vae_latents_per_chunk
    above = align_num_frames(frames, chunk, rest)
    if frames != above:
        near = f"{above - chunk} or {above}" if above > chunk else f"{above}"
        raise InputError(
            f"a video of {frames} frames cannot be encoded: MiniMax-H3 makes {rest} more than a multiple of {chunk} "
            f"frames; use {near}."
        )
    pixels = torch.stack(list(videos)).transpose(1, 2).to(device, torch.float32) / 255
    normal = (pixels - _along(1, pipeline.pixel_mean, pixels)) / _along(1, pipeline.pixel_std, pixels)
    return _standardised(pipeline.vae, posterior_latents(pipeline.vae.encode(normal).latent_dist, generators), 1)


def encode_sounds(pipeline: Any, sounds: Sequence[Audio], frames: int, device: torch.device) -> Tensor:
    """Standardised latents [B, 2, C, L], float32, of stereo sounds: modes of their posteriors, as the pipeline takes.

    Args:
        pipeline: Whose VAE is used; it hears one channel at a time.
        sounds: Each as long as the model makes it for the frames.
        frames: Frames of the videos that they go with.
        device: Where the VAE is.

    Raises:
        InputError: For another rate, length or number of channels than the model makes.
    """
    rate, vae = pipeline.audio_sampling_rate, pipeline.audio_vae
    samples = audio_latent_num_frames(frames) * vae.hop_length
    for sound in sounds:
        channels, given = sound.waveform.shape
        if sound.sample_rate != rate:
            raise InputError(
                f"a sound of {sound.sample_rate} Hz cannot be encoded: MiniMax-H3 makes {rate} Hz; resample it."
            )
        if channels != pipeline.audio_channels:
            raise InputError(
                f"a sound of {channels} channel(s) cannot be encoded: MiniMax-H3 makes {pipeline.audio_channels}; mix "
                f"it to stereo, of mono take the one channel twice."
            )
        if given != samples:
            raise InputError(
                f"a sound of {given} samples cannot be encoded with a video of {frames} frames, for which MiniMax-H3 "
                f"makes {samples} ({samples / rate:.3f} seconds); cut it off, or fill it up with silence."
            )
    waveforms = torch.stack([sound.waveform for sound in sounds]).to(device, torch.float32)  # [B, 2, samples]
    latents = posterior_latents(vae.encode(waveforms.flatten(0, 1).unsqueeze(1)).latent_dist, None)
    return _standardised(vae, latents.unflatten(0, waveforms.shape[:2]), 2)


def _standardised(vae: Any, latents: Tensor, axis: int) -> Tensor:
    mean, std = (_along(axis, getattr(vae.config, name), latents) for name in ("latents_mean", "latents_std"))
    return (latents - mean) / std


def _along(axis: int, values: Sequence[float], like: Tensor) -> Tensor:
    """A number per index of one axis, in a shape that broadcasts."""
    shape = [1] * like.ndim
    shape[axis] = -1
    return torch.tensor(values, device=like.device, dtype=like.dtype).view(shape)
