"""Stable Diffusion XL (`sdxl`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.stable_diffusion.base import StableDiffusionAdapter


class SDXLAdapter(StableDiffusionAdapter):
    """Two CLIP encoders, and the picture's size as an input of the network (no crop)."""

    def load_pipeline(self) -> StableDiffusionXLPipeline:
        return self.load_diffusers(StableDiffusionXLPipeline)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        embeds, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            device=self.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=need_negative,
            negative_prompt=negative_texts(negative_prompts, len(prompts)),
        )
        if not need_negative:
            return PromptCondition.of(Prompts(embeds, pooled))
        if self.pipeline.config.force_zeros_for_empty_prompt:
            # The pipeline takes zeros where no negative prompt is given at all, which is not the empty prompt.
            absent = [text is None for text in negative_prompts or [None] * len(prompts)]
            rows = torch.tensor(absent, device=self.device)
            negative = negative.masked_fill(rows.view(-1, 1, 1), 0.0)
            negative_pooled = negative_pooled.masked_fill(rows.view(-1, 1), 0.0)
        return PromptCondition.of(Prompts(embeds, pooled), Prompts(negative, negative_pooled))

    def added_conditions(self, latents: Tensor, prompts: Prompts) -> dict[str, Tensor]:
        assert prompts.pooled is not None
        factor = self.pipeline.vae_scale_factor
        size = (latents.shape[-2] * factor, latents.shape[-1] * factor)
        time_ids = self.pipeline._get_add_time_ids(
            size, (0, 0), size, dtype=prompts.embeds.dtype, text_encoder_projection_dim=prompts.pooled.shape[-1]
        )
        return {
            "text_embeds": self.network_input("unet", prompts.pooled),
            "time_ids": time_ids.to(latents.device).repeat(len(latents), 1),
        }
