"""Stable Diffusion 1.x and 2.x (`sd1-5`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.stable_diffusion.base import StableDiffusionAdapter


class SD1_5Adapter(StableDiffusionAdapter):
    """One CLIP encoder."""

    def load_pipeline(self) -> StableDiffusionPipeline:
        pipeline = self.load_diffusers(StableDiffusionPipeline)
        pipeline.safety_checker = None  # it blackens pictures after they are decoded; training decodes without it
        return pipeline

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        embeds, negative = self.pipeline.encode_prompt(
            list(prompts),
            self.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=need_negative,
            negative_prompt=negative_texts(negative_prompts, len(prompts)),
        )
        return PromptCondition.of(Prompts(embeds), Prompts(negative) if need_negative else None)

    def added_conditions(self, latents: Tensor, prompts: Prompts) -> None:
        return None
