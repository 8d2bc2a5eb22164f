"""Encoded prompts of models that are conditioned on text alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flow_factory.errors import InputError
from flow_factory.samples import Condition


class Prompts(NamedTuple):
    """One encoding of B texts, as a network takes it.

    Attributes:
        embeds: [B, L, C].
        pooled: [B, P], or None where the model has no pooled embedding.
        mask: [B, L], True (or 1) at tokens and False (or 0) at padding, or None where all are read.
    """

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class PromptCondition(Condition):
    """Prompts, and negative prompts where guidance needs them.

    Attributes:
        prompt_embeds: [B, L, C].
        pooled_prompt_embeds: [B, P], or None.
        prompt_mask: [B, L], or None.
        negative_prompt_embeds: [B, L', C], or None if no guidance needs them.
        negative_pooled_prompt_embeds: [B, P], or None.
        negative_prompt_mask: [B, L'], or None.
    """

    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor | None = None
    prompt_mask: Tensor | None = None
    negative_prompt_embeds: Tensor | None = None
    negative_pooled_prompt_embeds: Tensor | None = None
    negative_prompt_mask: Tensor | None = None

    @classmethod
    def of(cls, positive: Prompts, negative: Prompts | None = None) -> PromptCondition:
        """The condition of two encodings."""
        negative_embeds, negative_pooled, negative_mask = negative or (None, None, None)
        return cls(*positive, negative_embeds, negative_pooled, negative_mask)

    @property
    def positive(self) -> Prompts:
        """The prompts."""
        return Prompts(self.prompt_embeds, self.pooled_prompt_embeds, self.prompt_mask)

    @property
    def negative(self) -> Prompts:
        """The negative prompts.

        Raises:
            InputError: If they were not encoded.
        """
        if self.negative_prompt_embeds is None:
            raise InputError(
                "guidance needs negative conditions, but these prompts were encoded without them. Encode with "
                "need_negative=True; a trainer that optimises with more guidance than it samples with overrides "
                "get_preprocess_guidance_scale()."
            )
        return Prompts(self.negative_prompt_embeds, self.negative_pooled_prompt_embeds, self.negative_prompt_mask)

    @cached_property
    def guided(self) -> Prompts:
        """Negatives, then positives, for one forward of 2B rows; joined once per batch.

        Raises:
            InputError: If the negatives were not encoded.
        """
        pairs = zip(self.negative, self.positive, strict=True)
        embeds, pooled, mask = (
            None if negative is None or positive is None else torch.cat([negative, positive])
            for negative, positive in pairs
        )
        assert embeds is not None
        return Prompts(embeds, pooled, mask)


def negative_texts(negative_prompts: object, count: int) -> list[str]:
    """`count` negative prompts; None, for one or for all, stands for the empty text."""
    texts = list(negative_prompts) if negative_prompts else [None] * count  # type: ignore[call-overload]
    return [text or "" for text in texts]


def pad_tokens(tensor: Tensor, length: int) -> Tensor:
    """Zeros behind the tokens (dimension 1) up to `length`."""
    missing = length - tensor.shape[1]
    return tensor if missing <= 0 else pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing))
