"""Qwen-Image text to image (`qwen-image`).

Prompts go through the pipeline's own template into a language model; their lengths differ and padding is masked. A
guided prediction is two forwards, and each token of it keeps the norm it has without guidance. The state is the
unpacked latents [B, C, H / f, W / f].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded
from flow_factory.models.flux.packing import PackedLatentsAdapter, pack, unpack
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.images import posterior_latents, to_bytes, to_pixels
from flow_factory.models.latent_statistics import destandardise, standardise
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.samples import ComponentTimes, LatentState

_BUCKET = 64  # tokens


class QwenImageAdapter(PackedLatentsAdapter):
    """Text to image; `guidance_scale` is what the pipeline calls `true_cfg_scale`."""

    def load_pipeline(self) -> QwenImagePipeline:
        return self.load_diffusers(QwenImagePipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        return GuidanceSpec(scale=guidance_scale, keep_token_norm=True)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
        # Without a negative prompt the pipeline leaves guidance out; the adapter takes the empty one.
        return arguments | ({"negative_prompt": ""} if guidance_scale > 1.0 else {})

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        embeds, mask = self.pipeline.encode_prompt(
            prompt=texts, device=self.device, max_sequence_length=generation.max_sequence_length
        )
        if mask is None:  # the pipeline's way to say that nothing is padded
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        return Prompts(embeds, mask=mask)

    def collate_conditions(self, conditions: Sequence[PromptCondition]) -> PromptCondition:
        return collate_padded(conditions, _BUCKET)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        mu = token_shift(self.pipeline.scheduler, (height // 2) * (width // 2))
        return {"sigmas": linear_sigmas(num_steps), "mu": mu}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        height, width = state.only.shape[-2:]
        tokens = self.network_input("transformer", pack(state.only))

        def network(prompts: Prompts) -> Tensor:
            return self.network("transformer")(
                hidden_states=tokens,
                timestep=times.only.timestep / 1000,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                encoder_hidden_states_mask=prompts.mask,
                img_shapes=[[(1, height // 2, width // 2)]] * len(tokens),
                return_dict=False,
            )[0]

        return LatentState.single(unpack(guide_apart(guidance, times, condition, network), height, width))

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        vae = self.pipeline.vae
        frames = vae.decode(destandardise(vae, state.only.unsqueeze(2)), return_dict=False)[0]
        return to_bytes(self.pipeline, frames[:, :, 0])

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        vae = self.pipeline.vae
        frames = to_pixels(self.pipeline, media, self.device).unsqueeze(2)
        latents = posterior_latents(vae.encode(frames).latent_dist, generators)
        return LatentState.single(standardise(vae, latents).squeeze(2))
