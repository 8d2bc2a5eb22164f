"""Prompts of LTX-2 as its transformer reads them: an encoding for the video and one for the sound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flow_factory.models.conditions import negatives_missing
from flow_factory.samples import Condition


class JointPrompts(NamedTuple):
    """One encoding of B texts, padded to one length.

    Attributes:
        video: What the video reads, [B, L, C].
        audio: What the sound reads, [B, L, C'].
        mask: [B, L], 1 at tokens that are read.
    """

    video: Tensor
    audio: Tensor
    mask: Tensor


@dataclass(frozen=True)
class LTX2Condition(Condition):
    """Prompts behind the connectors, which are frozen and run once for each text.

    Attributes:
        video_embeds, audio_embeds, prompt_mask: As in `JointPrompts`.
        frame_rate: Frames per second that positions in time are counted with, float32 [B].
        negative_video_embeds, negative_audio_embeds, negative_prompt_mask: The same of negative prompts, or None.
    """

    video_embeds: Tensor
    audio_embeds: Tensor
    prompt_mask: Tensor
    frame_rate: Tensor
    negative_video_embeds: Tensor | None = None
    negative_audio_embeds: Tensor | None = None
    negative_prompt_mask: Tensor | None = None

    @property
    def positive(self) -> JointPrompts:
        """The prompts."""
        return JointPrompts(self.video_embeds, self.audio_embeds, self.prompt_mask)

    @cached_property
    def guided(self) -> JointPrompts:
        """Negatives, then positives, for one forward of 2B rows; joined once per batch.

        Raises:
            InputError: If the negatives were not encoded.
        """
        negative = (self.negative_video_embeds, self.negative_audio_embeds, self.negative_prompt_mask)
        pairs = [torch.cat([n, p]) for n, p in zip(negative, self.positive, strict=True) if n is not None]
        if len(pairs) != len(negative):
            raise negatives_missing()
        return JointPrompts(*pairs)
