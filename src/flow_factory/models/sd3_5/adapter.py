"""Stable Diffusion 3 and 3.5 (`sd3-5`): the model of how an adapter is written.

Everything here is peculiar to SD3; the pipeline's own helpers do the work wherever it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
    calculate_shift,
)
from torch import Tensor

from flow_factory.models.comfyui import LORA_KEYS, DiffusersNames
from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.guidance import GuidanceSpec, guide_together
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, LatentState


class SD3_5Adapter(TextToImageAdapter):
    """Text to image; latents [B, C, H / f, W / f] with the VAE's factor f; guidance batched in one forward."""

    comfyui = DiffusersNames(LORA_KEYS)

    def load_pipeline(self) -> StableDiffusion3Pipeline:
        return self.load_diffusers(StableDiffusion3Pipeline)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        embeds, negative_embeds, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=negative_texts(negative_prompts, len(prompts)),
            do_classifier_free_guidance=need_negative,
            device=self.device,
            max_sequence_length=(generation or self.config.train_generation).max_sequence_length,
        )
        negative = Prompts(negative_embeds, negative_pooled) if need_negative else None
        return PromptCondition.of(Prompts(embeds, pooled), negative)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        scheduler = self.pipeline.scheduler.config
        if not scheduler.get("use_dynamic_shifting", None):
            return {}
        height, width = state.only.shape[-2:]
        patch = self.pipeline.transformer.config.patch_size
        mu = calculate_shift(
            (height // patch) * (width // patch),
            scheduler.get("base_image_seq_len", 256),
            scheduler.get("max_image_seq_len", 4096),
            scheduler.get("base_shift", 0.5),
            scheduler.get("max_shift", 1.16),
        )
        return {"mu": mu}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        return LatentState.single(
            guide_together(guidance, times, condition, state.only, times.only.timestep, self._transformer)
        )

    def _transformer(self, latents: Tensor, timestep: Tensor, prompts: Prompts) -> Tensor:
        assert prompts.pooled is not None
        cast = self.network_input
        return self.network("transformer")(
            hidden_states=cast("transformer", latents),
            timestep=timestep,
            encoder_hidden_states=cast("transformer", prompts.embeds),
            pooled_projections=cast("transformer", prompts.pooled),
            return_dict=False,
        )[0]
