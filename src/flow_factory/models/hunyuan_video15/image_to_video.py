"""HunyuanVideo 1.5 from a first frame to a video (`hunyuanvideo-1.5-i2v`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video import (
    HunyuanVideo15ImageToVideoPipeline,
)
from torch import Tensor
from torch.nn.functional import pad

from flow_factory.errors import InputError
from flow_factory.models.hunyuan_video15.base import HunyuanVideo15Adapter
from flow_factory.models.hunyuan_video15.conditions import FirstFrameCondition
from flow_factory.models.images import to_pil
from flow_factory.samples import ComponentTimes, ConditionInputs, I2VSample, LatentState


class HunyuanVideo15ImageToVideoAdapter(HunyuanVideo15Adapter):
    """The picture's latents and a mask of its frame go behind the state's channels; its tokens go to the texts'.

    The pipeline takes the size of the video from the picture: the nearest in its proportions of those that have the
    checkpoint's area. Here the size is a field, and the picture is cropped to it by the same helper; `call_setup` tells
    the pipeline the size.

    A MeanFlow network ("Mean Flows for One-step Generative Modeling", Geng et al., arXiv 2505.13447; `use_meanflow`)
    predicts the mean velocity over a step, so it reads where the step ends; in losses on freely drawn times that is
    where it starts, and the mean is the velocity itself.
    """

    sample_class = I2VSample
    condition_class = FirstFrameCondition

    def load_pipeline(self) -> HunyuanVideo15ImageToVideoPipeline:
        return self.load_sliced(HunyuanVideo15ImageToVideoPipeline)

    @classmethod
    def call_setup(cls, guidance_scale: float, generation: Any, size: tuple[int, int]) -> tuple[str, ...]:
        return (
            *super().call_setup(guidance_scale, generation, size),
            f"pipeline.video_processor.calculate_default_height_width = lambda **_: {tuple(size)!r}",
        )

    @classmethod
    def size_arguments(cls, height: int, width: int) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> FirstFrameCondition:
        texts = super().encode_inputs(inputs, need_negative, generation)
        latents, embeds = zip(*(self._encode_first_frame(given) for given in inputs), strict=True)
        return FirstFrameCondition(**texts.tensors(), first_frame=torch.cat(latents), image_embeds=torch.cat(embeds))

    def _encode_first_frame(self, given: ConditionInputs) -> tuple[Tensor, Tensor]:
        """`first_frame` [1, C, 1, h, w] and `image_embeds` [1, L, P] of a row."""
        images = given.images("first_frame")
        if len(images) != 1:
            raise InputError(
                f"{self.spec.key} takes one first_frame, but {len(images)} came with the prompt {given.prompt!r}."
            )
        pipeline = self.pipeline
        height, width = given.size
        picture = pipeline.video_processor.resize(to_pil(images[0]), height=height, width=width, resize_mode="crop")
        latents = pipeline._get_image_latents(
            vae=pipeline.vae,
            image_processor=pipeline.video_processor,
            image=picture,
            height=height,
            width=width,
            device=self.device,
        )
        embeds = pipeline.encode_image(picture, batch_size=1, device=self.device, dtype=pipeline.image_encoder.dtype)
        return latents.float(), embeds

    def network_state(self, state: LatentState, condition: Any) -> LatentState:
        latents = state.only
        later = latents.shape[2] - 1
        first = pad(condition.first_frame, (0, 0, 0, 0, 0, later))
        mask = pad(torch.ones_like(latents[:, :1, :1]), (0, 0, 0, 0, 0, later))
        return LatentState.single(torch.cat([latents, first, mask], dim=1))

    def network_extras(self, times: ComponentTimes, condition: Any) -> dict[str, Tensor]:
        extras = {"image_embeds": self.embeds_input(condition.image_embeds)}
        if self.pipeline.transformer.config.use_meanflow:
            end = 1000.0 * times.only.sigma_next
            extras["timestep_r"] = self.network_input("transformer", end)
        return extras
