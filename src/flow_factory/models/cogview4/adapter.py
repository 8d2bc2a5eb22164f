"""CogView4 text to image (`cogview4`).

The network's time is the timestep before the grid is shifted, so it is not 1000 sigma. Texts are padded to multiples
of 16 tokens, which the network reads (there is no mask): a row depends on its own length, and rows of different lengths
are separate forwards.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.cogview4.pipeline_cogview4 import CogView4Pipeline, calculate_shift
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded, pad_texts
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, LatentState


class CogView4Adapter(TextToImageAdapter):
    """Two forwards for guidance; the picture's size is an input of the network (no crop)."""

    def load_pipeline(self) -> CogView4Pipeline:
        return self.load_diffusers(CogView4Pipeline)

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        # One by one: in a batch, all would get the padding of the longest.
        embeds = [
            self.pipeline.encode_prompt(
                text,
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=generation.max_sequence_length,
            )[0][0]
            for text in texts
        ]
        return pad_texts(embeds)

    def collate_conditions(self, conditions: Any) -> PromptCondition:
        return collate_padded(conditions)

    def _shift(self, height: int, width: int) -> float:
        """mu for latents of this size."""
        config = self.pipeline.scheduler.config
        return calculate_shift(
            (height * width) // self.pipeline.transformer.config.patch_size**2,
            config.get("base_image_seq_len", 256),
            config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )

    def grid_arguments(self, num_steps: int, state: LatentState, condition: PromptCondition) -> dict[str, Any]:
        train_steps = self.pipeline.scheduler.config.num_train_timesteps
        timesteps = np.linspace(train_steps, 1.0, num_steps).astype(np.int64).astype(np.float32)
        return {"timesteps": timesteps, "sigmas": timesteps / train_steps, "mu": self._shift(*state.only.shape[-2:])}

    def timestep_for_sigma(self, sigma: Tensor, state: LatentState) -> Tensor:
        """The timestep that the grid of this size shifts to `sigma`."""
        config = self.pipeline.scheduler.config
        shift = config.shift
        if config.use_dynamic_shifting:
            mu = self._shift(*state.only.shape[-2:])
            shift = mu if config.time_shift_type == "linear" else math.exp(mu)
        return config.num_train_timesteps * sigma / (shift - (shift - 1.0) * sigma)

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        latents = self.network_input("transformer", state.only)
        timestep, factor = times.only.timestep, self.pipeline.vae_scale_factor
        size = latents.new_tensor([[latents.shape[-2] * factor, latents.shape[-1] * factor]]).expand(len(latents), 2)

        def network(prompts: Prompts) -> Tensor:
            assert prompts.mask is not None
            embeds, lengths = self.network_input("transformer", prompts.embeds), prompts.mask.sum(dim=1)
            velocity = torch.empty_like(latents, dtype=torch.float32)
            for length in lengths.unique().tolist():
                rows = (lengths == length).nonzero().squeeze(1)
                velocity = velocity.index_copy(
                    0,
                    rows,
                    self.network("transformer")(
                        hidden_states=latents[rows],
                        encoder_hidden_states=embeds[rows, :length],
                        timestep=timestep[rows],
                        original_size=size[rows],
                        target_size=size[rows],
                        crop_coords=torch.zeros_like(size[rows]),
                        return_dict=False,
                    )[0].float(),
                )
            return velocity

        return LatentState.single(guide_apart(guidance, times, condition, network))
