"""Z-Image text to image (`z-image`).

The network runs in reversed time (0 is noise) and predicts data - noise; prompts go through the tokenizer's chat
template, and the network takes a list of texts of different lengths. Guidance counts from 0: w adds w (positive -
negative) to the positive prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline, get_default_z_image_sigmas
from torch import Tensor

from flow_factory.models.comfyui import Blocks, CheckpointNames, Fusion, checkpoint_keys
from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded, pad_texts
from flow_factory.models.guidance import GuidanceSpec, guide_together
from flow_factory.models.shifted_grid import token_shift
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, LatentState


class ZImageAdapter(TextToImageAdapter):
    """Text to image; latents [B, C, H / f, W / f]; guidance batched in one forward."""

    comfyui = CheckpointNames(
        checkpoint_keys("convert_z_image_transformer_checkpoint_to_diffusers"),
        tuple(
            Blocks(
                blocks,
                blocks,
                {"attention.to_out.0": "attention.out"}
                | {f"feed_forward.w{i}": f"feed_forward.w{i}" for i in (1, 2, 3)},
                {"attention.qkv": Fusion(("attention.to_q", "attention.to_k", "attention.to_v"))},
            )
            for blocks in ("noise_refiner", "context_refiner", "layers")
        ),
    )

    def load_pipeline(self) -> ZImagePipeline:
        return self.load_diffusers(ZImagePipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        # The pipeline turns guidance off where 1 - sigma exceeds the truncation.
        window = (1.0 - fields.cfg_truncation, 1.0) if fields.cfg_truncation < 1.0 else None
        return GuidanceSpec(scale=1.0 + guidance_scale, sigma_window=window, norm_limit=fields.cfg_normalization)

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        # The pipeline writes its chat template into the list it is given: this one is a copy.
        embeds, _ = self.pipeline.encode_prompt(
            prompt=texts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=generation.max_sequence_length,
        )
        return pad_texts(embeds)

    def collate_conditions(self, conditions: Sequence[PromptCondition]) -> PromptCondition:
        return collate_padded(conditions)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        mu = token_shift(self.pipeline.scheduler, (height // 2) * (width // 2))
        return {"sigmas": get_default_z_image_sigmas(num_steps), "mu": mu}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        timestep = (1000 - times.only.timestep) / 1000
        return LatentState.single(guide_together(guidance, times, condition, state.only, timestep, self._transformer))

    def _transformer(self, latents: Tensor, timestep: Tensor, prompts: Prompts) -> Tensor:
        assert prompts.mask is not None
        embeds = self.network_input("transformer", prompts.embeds)
        texts = [row[:length] for row, length in zip(embeds, prompts.mask.sum(dim=1).tolist(), strict=True)]
        frames = self.network_input("transformer", latents).unsqueeze(2)
        output = self.network("transformer")(list(frames), timestep, texts, return_dict=False)[0]
        return -torch.stack([row.float() for row in output]).squeeze(2)
