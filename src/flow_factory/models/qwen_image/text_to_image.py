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

from flow_factory.models.comfyui import LORA_KEYS, DiffusersNames
from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded
from flow_factory.models.flux.packing import PackedLatentsAdapter, pack, unpack
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.images import to_bytes, to_pixels
from flow_factory.models.qwen_image.parts import decode_frame, encode_frame, masked, true_cfg_arguments
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.samples import ComponentTimes, LatentState

_BUCKET = 64  # tokens


class QwenImageAdapter(PackedLatentsAdapter):
    """Text to image; `guidance_scale` is what the pipeline calls `true_cfg_scale`."""

    comfyui = DiffusersNames(LORA_KEYS)

    def load_pipeline(self) -> QwenImagePipeline:
        return self.load_diffusers(QwenImagePipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        return GuidanceSpec(scale=guidance_scale, keep_token_norm=True)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        return true_cfg_arguments(super().call_arguments(guidance_scale, generation))

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        embeds, mask = self.pipeline.encode_prompt(
            prompt=texts, device=self.device, max_sequence_length=generation.max_sequence_length
        )
        return masked(embeds, mask)

    def collate_conditions(self, conditions: Sequence[PromptCondition]) -> PromptCondition:
        return collate_padded(conditions, _BUCKET)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        mu = token_shift(self.pipeline.scheduler, (height // 2) * (width // 2))
        return {"sigmas": linear_sigmas(num_steps), "mu": mu}

    def further_images(self, condition: Any) -> Sequence[Tensor]:
        """Latents [B, C, h, w] of the condition, each with a size of its own, that follow the state's."""
        return ()

    def text_mask(self, prompts: Prompts) -> Tensor | None:
        """Which tokens of the texts are read; None: all."""
        return prompts.mask

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        images = (state.only, *self.further_images(condition))
        sizes = [(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in images]
        tokens = self.network_input("transformer", torch.cat([pack(image) for image in images], dim=1))
        count = sizes[0][1] * sizes[0][2]

        def network(prompts: Prompts) -> Tensor:
            predicted = self.network("transformer")(
                hidden_states=tokens,
                timestep=times.only.timestep / 1000,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                encoder_hidden_states_mask=self.text_mask(prompts),
                img_shapes=[sizes] * len(tokens),
                return_dict=False,
            )[0]
            return predicted[:, :count]

        return LatentState.single(unpack(guide_apart(guidance, times, condition, network), *state.only.shape[-2:]))

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return to_bytes(self.pipeline, decode_frame(self.pipeline.vae, state.only))

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        pixels = to_pixels(self.pipeline, media, self.device)
        return LatentState.single(encode_frame(self.pipeline.vae, pixels, generators))
