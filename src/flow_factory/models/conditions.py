"""Encoded prompts of models that are conditioned on text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from flow_factory.errors import InputError
from flow_factory.samples import Condition

PromptsT = TypeVar("PromptsT", bound="PromptCondition")


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
    def of(cls: type[PromptsT], positive: Prompts, negative: Prompts | None = None) -> PromptsT:
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
            raise negatives_missing()
        return Prompts(self.negative_prompt_embeds, self.negative_pooled_prompt_embeds, self.negative_prompt_mask)

    @cached_property
    def guided(self) -> Prompts:
        """Negatives, then positives, for one forward of 2B rows; joined once per batch.

        Where lengths differ, the shorter are padded: such models read a mask.

        Raises:
            InputError: If the negatives were not encoded.
        """
        pairs = zip(self.negative, self.positive, strict=True)
        embeds, pooled, mask = (None if n is None or p is None else _join(n, p) for n, p in pairs)
        assert embeds is not None
        return Prompts(embeds, pooled, mask)


def negatives_missing() -> InputError:
    """What to raise where guidance asks for negative prompts that were not encoded."""
    return InputError(
        "guidance needs negative conditions, but these prompts were encoded without them. Encode with "
        "need_negative=True; a trainer that optimises with more guidance than it samples with overrides "
        "get_preprocess_guidance_scale()."
    )


def pad_texts(texts: Sequence[Tensor]) -> Prompts:
    """Texts [L_i, C] of different lengths as one batch, zeros behind the shorter ones, with a mask."""
    mask = pad_sequence([torch.ones(len(t), dtype=torch.long, device=t.device) for t in texts], batch_first=True)
    return Prompts(pad_sequence(list(texts), batch_first=True), mask=mask)


def _join(negative: Tensor, positive: Tensor) -> Tensor:
    length = max(negative.shape[1], positive.shape[1])
    return torch.cat([pad_tokens(negative, length), pad_tokens(positive, length)])


def collate_padded(conditions: Sequence[PromptsT], multiple: int = 1) -> PromptsT:
    """Joins conditions of different lengths: zeros (masked out) behind the shorter ones.

    Args:
        conditions: All with masks.
        multiple: Lengths are rounded up to a multiple of it, so that batches of similar prompts have equal lengths and
            a row's numbers do not depend on its neighbours.
    """
    return type(conditions[0]).cat([pad_condition(c, *_lengths(conditions, multiple)) for c in conditions])


def pad_condition(condition: PromptsT, length: int, negative_length: int = 0) -> PromptsT:
    """Prompts padded to `length` tokens, negatives to `negative_length`; pooled embeddings are left as they are."""
    return _each_text(condition, length, negative_length, pad_tokens)


def trim_condition(condition: PromptsT, length: int, negative_length: int = 0) -> PromptsT:
    """The first `length` tokens of prompts, `negative_length` of negatives: `pad_condition` undone."""
    return _each_text(condition, length, negative_length, lambda tokens, count: tokens[:, :count])


def _each_text(
    condition: PromptsT, length: int, negative_length: int, change: Callable[[Tensor, int], Tensor]
) -> PromptsT:
    texts = {f.name: getattr(condition, f.name) for f in fields(PromptCondition) if "pooled" not in f.name}
    lengths = {name: negative_length if name.startswith("negative") else length for name in texts}
    return replace(condition, **{n: change(t, lengths[n]) for n, t in texts.items() if t is not None})


def _lengths(conditions: Sequence[PromptCondition], multiple: int) -> tuple[int, int]:
    longest = max(c.prompt_embeds.shape[1] for c in conditions)
    negatives = [c.negative_prompt_embeds.shape[1] for c in conditions if c.negative_prompt_embeds is not None]
    return -(-longest // multiple) * multiple, -(-max(negatives, default=0) // multiple) * multiple


def negative_texts(negative_prompts: Sequence[str | None] | None, count: int) -> list[str]:
    """`count` negative prompts; None, for one or for all, stands for the empty text."""
    return [text or "" for text in negative_prompts or [None] * count]


def pad_tokens(tensor: Tensor, length: int) -> Tensor:
    """Zeros behind the tokens (dimension 1) up to `length`."""
    missing = length - tensor.shape[1]
    return tensor if missing <= 0 else pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing))
