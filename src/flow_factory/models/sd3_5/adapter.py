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

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.sd3_5.conditions import SD3Condition
from flow_factory.samples import ComponentTimes, LatentState, T2ISample


class SD3_5Adapter(BaseAdapter[SD3Condition]):
    """Text to image; latents [B, C, H / f, W / f] with the VAE's factor f; guidance batched in one forward."""

    sample_class = T2ISample
    condition_class = SD3Condition

    def load_pipeline(self) -> StableDiffusion3Pipeline:
        return self.load_diffusers(StableDiffusion3Pipeline)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> SD3Condition:
        negatives = [text or "" for text in negative_prompts] if negative_prompts else [""] * len(prompts)
        embeds, negative_embeds, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=negatives,
            do_classifier_free_guidance=need_negative,
            device=self.device,
            max_sequence_length=(generation or self.config.train_generation).max_sequence_length,
        )
        return SD3Condition(embeds, pooled, negative_embeds, negative_pooled)

    def prepare_latents(
        self, condition: SD3Condition, generators: Sequence[torch.Generator], height: int, width: int
    ) -> LatentState:
        channels = self.pipeline.transformer.config.in_channels
        latents = self.pipeline.prepare_latents(
            len(generators), channels, height, width, torch.float32, self.device, list(generators)
        )
        return LatentState.single(latents)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: SD3Condition) -> dict[str, Any]:
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
        self, state: LatentState, times: ComponentTimes, condition: SD3Condition, guidance: GuidanceSpec
    ) -> LatentState:
        latents, timestep = state.only, times.only.timestep
        if not guidance.active(times):
            return LatentState.single(
                self._transformer(latents, timestep, condition.prompt_embeds, condition.pooled_prompt_embeds)
            )
        embeds, pooled = condition.guided
        both = self._transformer(torch.cat([latents, latents]), torch.cat([timestep, timestep]), embeds, pooled)
        negative, positive = both.chunk(2)
        return LatentState.single(guidance.combine(positive, negative, times))

    def _transformer(self, latents: Tensor, timestep: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        cast = self.network_input
        return self.network("transformer")(
            hidden_states=cast("transformer", latents),
            timestep=timestep,
            encoder_hidden_states=cast("transformer", embeds),
            pooled_projections=cast("transformer", pooled),
            return_dict=False,
        )[0]

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        vae = self.pipeline.vae
        latents = (state.only.to(vae.dtype) / vae.config.scaling_factor) + vae.config.shift_factor
        decoded = vae.decode(latents, return_dict=False)[0]
        pixels = self.pipeline.image_processor.postprocess(decoded, output_type="pt")
        # The rounding of the pipeline's own PIL output, so that a reward sees what a user would save.
        return list((pixels.float() * 255).round().to(torch.uint8).cpu().unbind())

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of uint8 images [C, H, W]: the posterior's mean, or a sample, row i from `generators[i]`."""
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(torch.stack(list(media)).float() / 255)
        posterior = vae.encode(pixels.to(self.device, vae.dtype)).latent_dist
        latents = posterior.mode() if generators is None else posterior.sample(generator=list(generators))
        return LatentState.single((latents.float() - vae.config.shift_factor) * vae.config.scaling_factor)
