"""FLUX.1 text to image (`flux1`).

The state is the unpacked latents [B, C, H / f, W / f], whose shape tells the picture's size; the network sees them
packed, 2 x 2 latents a token. The guidance scale is an input of the network, so a guided prediction is one forward;
`true_cfg_scale` above 1 adds the second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.flux.packing import pack, unpack
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.images import decode_images, encode_images
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.samples import ComponentTimes, LatentState


class Flux1Adapter(BaseAdapter[PromptCondition]):
    """Text to image with embedded guidance; T5 tokens are padded to one length, which the network reads unmasked."""

    condition_class = PromptCondition

    def load_pipeline(self) -> FluxPipeline:
        return self.load_diffusers(FluxPipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        return GuidanceSpec(scale=fields.true_cfg_scale, embedded=guidance_scale)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        length = (generation or self.config.train_generation).max_sequence_length
        negatives = negative_texts(negative_prompts, len(prompts)) if need_negative else None
        return PromptCondition.of(
            self._encode(list(prompts), length), None if negatives is None else self._encode(negatives, length)
        )

    def _encode(self, texts: list[str], length: int) -> Prompts:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts, prompt_2=None, device=self.device, max_sequence_length=length
        )
        return Prompts(embeds, pooled)

    def prepare_latents(
        self, condition: PromptCondition, generators: Sequence[torch.Generator], height: int, width: int
    ) -> LatentState:
        channels = self.pipeline.transformer.config.in_channels // 4
        packed, _ = self.pipeline.prepare_latents(
            len(generators), channels, height, width, torch.float32, self.device, list(generators)
        )
        factor = self.pipeline.vae_scale_factor
        return LatentState.single(unpack(packed, height // factor, width // factor))

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        scheduler = self.pipeline.scheduler
        height, width = state.only.shape[-2:]
        arguments: dict[str, Any] = {"mu": token_shift(scheduler, (height // 2) * (width // 2))}
        if not scheduler.config.get("use_flow_sigmas", False):
            arguments["sigmas"] = linear_sigmas(num_steps)
        return arguments

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        latents, timestep = state.only, times.only.timestep
        batch, (height, width) = len(latents), latents.shape[-2:]
        embedded = None
        if self.pipeline.transformer.config.guidance_embeds:
            assert guidance.embedded is not None
            embedded = torch.full((batch,), guidance.embedded, device=latents.device)
        image_ids = self.pipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, latents.device, torch.float32
        )
        tokens = self.network_input("transformer", pack(latents))

        def network(prompts: Prompts) -> Tensor:
            assert prompts.pooled is not None
            return self.network("transformer")(
                hidden_states=tokens,
                timestep=timestep / 1000,
                guidance=embedded,
                pooled_projections=self.network_input("transformer", prompts.pooled),
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                txt_ids=image_ids.new_zeros(prompts.embeds.shape[1], 3),
                img_ids=image_ids,
                return_dict=False,
            )[0]

        return LatentState.single(unpack(guide_apart(guidance, times, condition, network), height, width))

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return decode_images(self.pipeline, state.only)

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        return LatentState.single(encode_images(self.pipeline, media, generators, self.device))
