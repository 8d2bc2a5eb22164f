"""What text-to-image adapters share: spatial latents, an image VAE with one scale, prompts encoded text by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.images import decode_images, encode_images
from flow_factory.samples import LatentState, T2ISample


class TextToImageAdapter(BaseAdapter[PromptCondition]):
    """A state of latents [B, C, H / f, W / f], whose shape tells the picture's size; uint8 pictures [C, H, W] out.

    A subclass gives `load_pipeline`, `predict_velocity`, and `encode_texts` or the whole of `encode_prompt`.
    """

    sample_class = T2ISample
    condition_class = PromptCondition

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        """Encodes B texts; `texts` may be written to. `generation` holds the model-specific fields."""
        raise NotImplementedError(f"{type(self).__name__} has neither encode_texts nor encode_prompt.")

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        fields = generation or self.config.train_generation
        positive = self.encode_texts(list(prompts), fields)
        negatives = negative_texts(negative_prompts, len(prompts)) if need_negative else None
        negative = None if negatives is None else self.encode_texts(negatives, fields)
        return self.collate_conditions([PromptCondition.of(positive, negative)])

    @property
    def latent_channels(self) -> int:
        """C of the state."""
        return self.pipeline.transformer.config.in_channels

    def prepare_latents(
        self,
        condition: PromptCondition,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        return LatentState.single(
            self.pipeline.prepare_latents(
                len(generators), self.latent_channels, height, width, torch.float32, self.device, list(generators)
            )
        )

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return decode_images(self.pipeline, state.only)

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of uint8 images [C, H, W]: the posterior's mode, or a sample, row i from `generators[i]`."""
        return LatentState.single(encode_images(self.pipeline, media, generators, self.device))
