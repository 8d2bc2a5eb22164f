"""Prompts with the pictures or the video that a Wan video starts from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flow_factory.models.conditions import PromptCondition


@dataclass(frozen=True)
class FramesCondition(PromptCondition):
    """Prompts with given frames.

    Attributes:
        frames: The first frame's latents [B, C, 1, h, w] for networks that have them pinned; else what goes behind the
            state's channels: a mask of the given frames and their latents, [B, 4 + C, f, h, w].
        image_embeds: [B, n, L, P] of n given frames, for networks with an image encoder; else None.
    """

    frames: Tensor | None = None
    image_embeds: Tensor | None = None


@dataclass(frozen=True)
class VideoCondition(PromptCondition):
    """Prompts with a video.

    Attributes:
        video: Its latents [B, C, f, h, w].
    """

    video: Tensor | None = None
