"""HunyuanVideo 1.5 text to video (`hunyuanvideo-1.5`)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams.models.folder import component_config
from flow_factory.models.hunyuan_video15.base import HunyuanVideo15Adapter
from flow_factory.samples import ComponentTimes, LatentState


class HunyuanVideo15TextToVideoAdapter(HunyuanVideo15Adapter):
    """The channels of a first frame and of its mask are zeros, and there are no image tokens."""

    def load_pipeline(self) -> HunyuanVideo15Pipeline:
        if component_config(self.checkpoint, "transformer").get("use_meanflow"):
            raise InputError(
                f"the network of {self.checkpoint} reads the time at which a step ends (use_meanflow), which the "
                f"pipeline from text to video does not pass on; use a checkpoint without it."
            )
        return self.load_sliced(HunyuanVideo15Pipeline)

    def network_state(self, state: LatentState, condition: Any) -> LatentState:
        latents = state.only
        behind = self.pipeline.prepare_cond_latents_and_mask(latents, latents.dtype, latents.device)
        return LatentState.single(torch.cat([latents, *behind], dim=1))

    def network_extras(self, times: ComponentTimes, condition: Any) -> dict[str, Tensor]:
        width = self.pipeline.transformer.config.image_embed_dim
        return {"image_embeds": self.embeds_input(torch.zeros(condition.batch_size, 0, width, device=self.device))}
