"""The one sequence that the network runs over: [text | conditioning | sound | video]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    patchify_video_latents,
)
from diffusers.utils.torch_utils import maybe_adjust_dtype_for_device
from torch import Tensor

from flow_factory.models.minimax_h3.conditions import PackedText

Built = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]
"""What the pipeline's functions return that place the rows of a sequence."""

# Noise levels of the rows, by their index into `timestep`. Texts count as generated frames.
_VIDEO, _AUDIO, _GIVEN_VIDEO, _GIVEN_AUDIO = range(4)


@dataclass(frozen=True)
class Layout:
    """Where the rows of one sequence lie.

    Attributes:
        inputs: What the network is told of them, on the device.
        given_video: Rows in front of the generated video's, without their noise, [n, C p]: of keyframes, or of pictures
            and videos; None without.
        given_audio: Rows in front of the generated sound's, [m, C']: of sounds, which get no noise; None without.
    """

    inputs: dict[str, Tensor]
    given_video: Tensor | None
    given_audio: Tensor | None

    @classmethod
    def of(cls, text: PackedText, built: Built, patch: tuple[int, int, int], device: torch.device) -> Layout:
        """From a text with what is given, and what the pipeline's function returned for it."""
        positions, tags, video, audio, tokens, given_video, given_audio = built
        levels = torch.full((len(tags),), _VIDEO)
        levels[video[:given_video]] = _GIVEN_VIDEO
        levels[audio[given_audio:]] = _AUDIO
        levels[audio[:given_audio]] = _GIVEN_AUDIO
        inputs = {
            # Float64 where the device has it; the network rounds to float32.
            "position_ids": positions.to(device, maybe_adjust_dtype_for_device(positions.dtype, device)),
            "token_tags": tags.to(device),
            "video_indices": video.to(device),
            "audio_indices": audio.to(device),
            "text_indices": tokens.to(device),
            "timestep_indices": levels.to(device),
        }
        pictures = [pack_video(one.latents, patch) for one in text.conditioning if one.latents is not None]
        sounds = [one.sound for one in text.conditioning if one.sound is not None]
        return cls(inputs, torch.cat(pictures) if pictures else None, torch.cat(sounds) if sounds else None)

    def timesteps(self, video: Tensor, audio: Tensor, anchor: float) -> Tensor:
        """The network's time of each level.

        The pipeline looks up the distinct ones of a step, which gives each row the same time.

        Args:
            video: Time of the generated video, [1]; 0 is noise and 1 data.
            audio: Time of the generated sound, [1].
            anchor: The time that given pictures and videos are noised to; later, they go along with the video.
        """
        levels = [video, audio]
        if self.given_video is not None:
            levels.append(video.clamp(min=anchor))
        if self.given_audio is not None:
            levels.append(torch.ones_like(audio))
        return torch.cat(levels)


def keyframe_layout(pipeline: Any, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
    """The sequence of a text, with a first frame, a last frame or both, if there are any."""
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        text.tags.cpu(), *shape, *_modalities(pipeline), tuple(one.kind for one in text.conditioning)
    )


def reference_layout(pipeline: Any, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
    """The sequence of a text with references."""
    given: Any = text.conditioning  # as good as the pipeline's own references, of which it reads the kinds
    return MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        text.tags.cpu(),
        given,
        [one.latents for one in given if one.latents is not None],
        [one.sound for one in given if one.sound is not None],
        *shape,
        *_modalities(pipeline),
    )


def _modalities(pipeline: Any) -> tuple[Any, int, int, int]:
    return pipeline.patch_size, pipeline.audio_channels, pipeline.audio_tag, pipeline.video_tag


def pack_video(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Rows [f h w, C p], p the elements of a patch, of latents [1, C, frames, height, width]."""
    return patchify_video_latents(latents, patch)


def unpack_video(rows: Tensor, like: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """The inverse of `pack_video`, in the shape of `like`."""
    _, channels, frames, height, width = like.shape
    t, h, w = patch
    cells = rows.reshape(1, frames // t, height // h, width // w, channels, t, h, w)
    return cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like.shape)


def pack_audio(latents: Tensor) -> Tensor:
    """Rows [2 L, C] of a stereo sound's latents [1, 2, C, L], one channel after the other."""
    return latents[0].transpose(1, 2).reshape(-1, latents.shape[2])


def unpack_audio(rows: Tensor, channels: int = 2) -> Tensor:
    """The inverse of `pack_audio`."""
    return rows.reshape(1, channels, -1, rows.shape[-1]).transpose(2, 3).contiguous()
