"""FLUX.1 text to image (`flux1`).

The network sees latents packed, 2 x 2 a token, and the state is unpacked (see `packing.py`). The guidance scale is an
input of the network, so a guided prediction is one forward; `true_cfg_scale` above 1 adds the second one.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor

from flow_factory.models.comfyui import LORA_KEYS, DiffusersNames
from flow_factory.models.conditions import PromptCondition, Prompts
from flow_factory.models.flux.packing import PackedLatentsAdapter, pack, unpack
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.shifted_grid import flow_sigmas, token_shift
from flow_factory.samples import ComponentTimes, LatentState


class Flux1Adapter(PackedLatentsAdapter):
    """Text to image with embedded guidance; T5 tokens are padded to one length, which the network reads unmasked."""

    comfyui = DiffusersNames(LORA_KEYS)

    def load_pipeline(self) -> Any:
        return self.load_diffusers(FluxPipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        return GuidanceSpec(scale=fields.true_cfg_scale, embedded=guidance_scale)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        # Without a negative prompt the pipeline leaves true CFG out; the adapter takes the empty one.
        return arguments | ({"negative_prompt": ""} if generation.true_cfg_scale > 1.0 else {})

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts, prompt_2=None, device=self.device, max_sequence_length=generation.max_sequence_length
        )
        return Prompts(embeds, pooled)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        scheduler = self.pipeline.scheduler
        height, width = state.only.shape[-2:]
        mu = token_shift(scheduler, (height // 2) * (width // 2))
        return {"mu": mu, **flow_sigmas(scheduler, num_steps)}

    def further_tokens(self, condition: Any) -> tuple[Tensor, Tensor] | None:
        """Tokens [B, N, 4 C] of the condition that follow the state's, and their positions [N, 3]; None: none."""
        return None

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        latents, timestep = state.only, times.only.timestep
        batch, (height, width) = len(latents), latents.shape[-2:]
        embedded = None
        if self.pipeline.transformer.config.guidance_embeds:
            assert guidance.embedded is not None
            embedded = torch.full((batch,), guidance.embedded, device=latents.device)
        tokens = pack(latents)
        count = tokens.shape[1]
        image_ids = self.pipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, latents.device, torch.float32
        )
        further = self.further_tokens(condition)
        if further is not None:
            tokens = torch.cat([tokens, further[0].to(tokens.dtype)], dim=1)
            image_ids = torch.cat([image_ids, further[1]])
        tokens = self.network_input("transformer", tokens)

        def network(prompts: Prompts) -> Tensor:
            assert prompts.pooled is not None
            predicted = self.network("transformer")(
                hidden_states=tokens,
                timestep=timestep / 1000,
                guidance=embedded,
                pooled_projections=self.network_input("transformer", prompts.pooled),
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                txt_ids=image_ids.new_zeros(prompts.embeds.shape[1], 3),
                img_ids=image_ids,
                return_dict=False,
            )[0]
            return predicted[:, :count]

        return LatentState.single(unpack(guide_apart(guidance, times, condition, network), height, width))
