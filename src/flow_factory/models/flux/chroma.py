"""Chroma text to image (`chroma`): FLUX.1's blocks without guidance embedding, with real guidance and a text mask."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.chroma.pipeline_chroma import ChromaPipeline
from torch import Tensor

from flow_factory.models.comfyui import LORA_KEYS, DiffusersNames
from flow_factory.models.conditions import PromptCondition, Prompts
from flow_factory.models.flux.packing import PackedLatentsAdapter, pack, unpack
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.samples import ComponentTimes, LatentState


class ChromaAdapter(PackedLatentsAdapter):
    """T5 tokens padded to one length; of the padding, the network reads the first token only."""

    comfyui = DiffusersNames(LORA_KEYS, unread=("distilled_guidance_layer.",))

    def load_pipeline(self) -> ChromaPipeline:
        return self.load_diffusers(ChromaPipeline)

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        embeds, _, mask, *_ = self.pipeline.encode_prompt(
            prompt=texts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=generation.max_sequence_length,
        )
        return Prompts(embeds, mask=mask)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        mu = token_shift(self.pipeline.scheduler, (height // 2) * (width // 2))
        return {"sigmas": linear_sigmas(num_steps), "mu": mu}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        batch, _, height, width = state.only.shape
        image_ids = self.pipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, state.only.device, torch.float32
        )
        tokens = self.network_input("transformer", pack(state.only))

        def network(prompts: Prompts) -> Tensor:
            mask = self.pipeline._prepare_attention_mask(
                batch_size=batch, sequence_length=tokens.shape[1], dtype=tokens.dtype, attention_mask=prompts.mask
            )
            return self.network("transformer")(
                hidden_states=tokens,
                timestep=times.only.timestep / 1000,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                txt_ids=image_ids.new_zeros(prompts.embeds.shape[1], 3),
                img_ids=image_ids,
                attention_mask=mask,
                return_dict=False,
            )[0]

        return LatentState.single(unpack(guide_apart(guidance, times, condition, network), height, width))
