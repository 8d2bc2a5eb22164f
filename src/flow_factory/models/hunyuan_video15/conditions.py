"""What a HunyuanVideo 1.5 video is made from: two encodings of a text, and a first frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded, pad_tokens

GlyphConditionT = TypeVar("GlyphConditionT", bound="GlyphCondition")

PROMPT_MULTIPLE = 64
GLYPH_MULTIPLE = 32


class Texts(NamedTuple):
    """Both encodings of B texts: as the language model reads them, and what stands in quotes as ByT5 reads it."""

    prompts: Prompts
    glyphs: Prompts


@dataclass(frozen=True)
class GlyphCondition(PromptCondition):
    """Prompts, and what they have in quotes.

    Attributes:
        glyph_embeds: [B, G, D], read byte by byte.
        glyph_mask: [B, G]; a prompt without quotes has no token.
        negative_glyph_embeds: [B, G', D], or None if no guidance needs them.
        negative_glyph_mask: [B, G'], or None.
    """

    glyph_embeds: Tensor | None = None
    glyph_mask: Tensor | None = None
    negative_glyph_embeds: Tensor | None = None
    negative_glyph_mask: Tensor | None = None

    @classmethod
    def of_texts(cls: type[GlyphConditionT], positive: Texts, negative: Texts | None = None) -> GlyphConditionT:
        """The condition of texts and negative texts."""
        made = cls.of(positive.prompts, negative.prompts if negative else None)
        glyphs = {"glyph_embeds": positive.glyphs.embeds, "glyph_mask": positive.glyphs.mask}
        if negative is not None:
            glyphs |= {"negative_glyph_embeds": negative.glyphs.embeds, "negative_glyph_mask": negative.glyphs.mask}
        return replace(made, **glyphs)

    @property
    def texts(self) -> Texts:
        """The prompts."""
        assert self.glyph_embeds is not None
        return Texts(self.positive, Prompts(self.glyph_embeds, mask=self.glyph_mask))

    @property
    def negative_texts(self) -> Texts:
        """The negative prompts.

        Raises:
            InputError: If they were not encoded.
        """
        prompts = self.negative
        assert self.negative_glyph_embeds is not None
        return Texts(prompts, Prompts(self.negative_glyph_embeds, mask=self.negative_glyph_mask))


@dataclass(frozen=True)
class FirstFrameCondition(GlyphCondition):
    """Prompts with the picture that the video starts from.

    Attributes:
        first_frame: Its latents [B, C, 1, h, w].
        image_embeds: Its tokens of the image encoder, [B, L, P].
    """

    first_frame: Tensor | None = None
    image_embeds: Tensor | None = None


def without_padding(embeds: Tensor, mask: Tensor) -> Prompts:
    """B texts [B, L, C], cut behind the last token of the longest one; to one token if there is none."""
    used = mask.any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return Prompts(embeds[:, :length], mask=mask[:, :length])


def collate_texts(conditions: Sequence[GlyphConditionT]) -> GlyphConditionT:
    """Joins conditions whose texts have different lengths: zeros (masked out) behind the shorter ones."""
    names = [f.name for f in fields(GlyphCondition) if "glyph" in f.name]
    given = {name: [t for c in conditions if (t := getattr(c, name)) is not None] for name in names}
    lengths = {
        name: -(-max(t.shape[1] for t in tensors) // GLYPH_MULTIPLE) * GLYPH_MULTIPLE
        for name, tensors in given.items()
        if tensors
    }
    padded = [
        replace(c, **{n: pad_tokens(t, length) for n, length in lengths.items() if (t := getattr(c, n)) is not None})
        for c in conditions
    ]
    return collate_padded(padded, PROMPT_MULTIPLE)
