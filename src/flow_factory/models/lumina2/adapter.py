"""Lumina-Image 2.0 text to image (`lumina2`).

The network runs in reversed time (0 is noise) and predicts data - noise. Guidance keeps the norm of every row of
latents, and stops at a share of the steps. The pipeline computes the shift of its grid from the number of latent
channels where others take the number of tokens; so does this adapter, since the grid has to be the pipeline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline
from torch import Tensor

from flow_factory.models.comfyui import Blocks, CheckpointNames, Fusion, checkpoint_keys
from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, LatentState


class Lumina2Adapter(TextToImageAdapter):
    """Two forwards for guidance; prompts have a system prompt in front, negative prompts do not."""

    comfyui = CheckpointNames(
        checkpoint_keys("convert_lumina2_to_diffusers"),
        tuple(
            Blocks(
                blocks,
                blocks,
                {"attn.to_out.0": "attention.out"}
                | {f"feed_forward.linear_{i}": f"feed_forward.w{i}" for i in (1, 2, 3)},
                {"attention.qkv": Fusion(("attn.to_q", "attn.to_k", "attn.to_v"), even=False)},  # fewer keys and values
            )
            for blocks in ("noise_refiner", "context_refiner", "layers")
        ),
    )

    def load_pipeline(self) -> Lumina2Pipeline:
        return self.load_diffusers(Lumina2Pipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        return GuidanceSpec(
            scale=guidance_scale,
            keep_token_norm=fields.cfg_normalization,
            step_window=(0.0, fields.cfg_trunc_ratio) if fields.cfg_trunc_ratio < 1.0 else None,
        )

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
            system_prompt=fields.system_prompt,
            max_sequence_length=fields.max_sequence_length,
        )
        return PromptCondition.of(
            Prompts(embeds, mask=mask), Prompts(negative, mask=negative_mask) if need_negative else None
        )

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        return {"sigmas": linear_sigmas(num_steps), "mu": token_shift(self.pipeline.scheduler, state.only.shape[1])}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        latents = self.network_input("transformer", state.only)
        timestep = 1 - times.only.timestep / self.pipeline.scheduler.config.num_train_timesteps

        def network(prompts: Prompts) -> Tensor:
            return self.network("transformer")(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                encoder_attention_mask=prompts.mask,
                return_dict=False,
            )[0]

        return LatentState.single(-guide_apart(guidance, times, condition, network))
