"""Encoded prompts of Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.samples import Condition


@dataclass(frozen=True)
class SD3Condition(Condition):
    """What the transformer takes besides latents and time.

    Attributes:
        prompt_embeds: [B, L, C], CLIP tokens followed by T5 tokens.
        pooled_prompt_embeds: [B, P].
        negative_prompt_embeds: [B, L, C], or None if no guidance needs them.
        negative_pooled_prompt_embeds: [B, P], or None.
    """

    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None = None
    negative_pooled_prompt_embeds: Tensor | None = None

    @cached_property
    def guided(self) -> tuple[Tensor, Tensor]:
        """(embeds [2B, L, C], pooled [2B, P]), negatives first as in the pipeline; joined once per batch.

        Raises:
            InputError: If the negatives were not encoded.
        """
        if self.negative_prompt_embeds is None or self.negative_pooled_prompt_embeds is None:
            raise InputError(
                "guidance_scale > 1 needs negative conditions, but these prompts were encoded without them. Encode "
                "with need_negative=True; a trainer that optimises with more guidance than it samples with overrides "
                "get_preprocess_guidance_scale()."
            )
        return (
            torch.cat([self.negative_prompt_embeds, self.prompt_embeds]),
            torch.cat([self.negative_pooled_prompt_embeds, self.pooled_prompt_embeds]),
        )
