"""SANA text to image (`sana`): a 32 x autoencoder without a posterior, Gemma with an instruction, linear attention.

The checkpoints come with DPM-Solver++ on flow sigmas. Pictures have the size that was asked for: the pipeline's binning
of resolutions (`use_resolution_binning`) is off.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.sana.pipeline_sana import SanaPipeline
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.guidance import GuidanceSpec, guide_together
from flow_factory.models.images import to_pixels
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, LatentState

_INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


class SanaAdapter(TextToImageAdapter):
    """Guidance batched in one forward; half of the network's output is a variance that nobody reads, in some."""

    def load_pipeline(self) -> SanaPipeline:
        return self.load_diffusers(SanaPipeline)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        if not arguments.pop("enhance_prompts"):  # the pipeline's own instruction is its default
            arguments["complex_human_instruction"] = None
        return {**arguments, "use_resolution_binning": False}

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        fields = generation or self.config.train_generation
        embeds, mask, negative, negative_mask = self.pipeline.encode_prompt(
            list(prompts),
            need_negative,
            negative_prompt=negative_texts(negative_prompts, len(prompts)),
            device=self.device,
            max_sequence_length=fields.max_sequence_length,
            complex_human_instruction=_INSTRUCTION if fields.enhance_prompts else None,
        )
        return PromptCondition.of(
            Prompts(embeds, mask=mask), Prompts(negative, mask=negative_mask) if need_negative else None
        )

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        config = self.pipeline.transformer.config
        timestep = times.only.timestep * config.timestep_scale
        velocity = guide_together(guidance, times, condition, state.only, timestep, self._transformer)
        if config.out_channels // 2 == config.in_channels:
            velocity = velocity.chunk(2, dim=1)[0]
        return LatentState.single(velocity)

    def _transformer(self, latents: Tensor, timestep: Tensor, prompts: Prompts) -> Tensor:
        return self.network("transformer")(
            self.network_input("transformer", latents),
            encoder_hidden_states=self.network_input("transformer", prompts.embeds),
            encoder_attention_mask=prompts.mask,
            timestep=timestep,
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of uint8 images [C, H, W]; the autoencoder is deterministic, so generators change nothing."""
        vae = self.pipeline.vae
        latents = vae.encode(to_pixels(self.pipeline, media, self.device)).latent
        return LatentState.single(latents.float() * vae.config.scaling_factor)
