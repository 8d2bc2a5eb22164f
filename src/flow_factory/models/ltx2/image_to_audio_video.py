"""LTX-2 from a first frame, to video with sound (`ltx2_i2av`).

The first latent frame is the picture's, at time 0, and pinned: it takes no part in noise, log-probabilities or losses.
The sound has no pinned part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_image2video import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from diffusers.utils.import_utils import is_av_available
from PIL import Image
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.audio_video import VIDEO
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.images import posterior_latents, to_pil
from flow_factory.models.ltx2.conditions import LTX2Condition
from flow_factory.models.ltx2.text_to_audio_video import SAVE_VIDEO, LTX2Adapter
from flow_factory.samples import ConditionInputs, I2AVSample, LatentState


@dataclass(frozen=True)
class LTX2ImageCondition(LTX2Condition):
    """Prompts with a first frame.

    Attributes:
        first_frame: Its latents, [B, C, 1, h, w].
    """

    first_frame: Tensor | None = None


class LTX2ImageAdapter(LTX2Adapter):
    """One picture a row, brought to the quality of a video's frame, and to the video's size.

    The pipeline can bring one picture to that quality, and fails on a list of them; here every row's is.
    """

    sample_class = I2AVSample
    condition_class = LTX2ImageCondition
    example_call = ExampleCall(
        ("from diffusers.utils import encode_video, load_image",), ('image=load_image("input.png")',), SAVE_VIDEO
    )

    def load_pipeline(self) -> Any:
        generations = (self.config.train_generation, self.config.eval_generation)
        if not is_av_available() and any(fields.image_crf != 0 for fields in generations):
            raise InputError(
                f"model type {self.spec.key!r} compresses pictures as frames of a video, with PyAV: "
                f'pip install "flow-factory[video]", or set image_crf to 0 in train: and eval:.'
            )
        return self.load_diffusers(LTX2ImageToVideoPipeline)

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> LTX2ImageCondition:
        fields = generation or self.config.train_generation
        texts = super().encode_inputs(inputs, need_negative, fields)
        frames = [self._encode_frame(given, fields.image_crf) for given in inputs]
        return LTX2ImageCondition(**texts.tensors(), first_frame=torch.cat(frames))

    def _encode_frame(self, given: ConditionInputs, quality: int | None) -> Tensor:
        """Latents [1, C, 1, h, w] of a row's picture.

        The pipeline normalises them without the VAE's scaling factor, which is 1 in the checkpoints.
        """
        pipeline, vae = self.pipeline, self.pipeline.vae
        height, width = given.size
        picture = _only_picture(self.spec.key, given)
        if min(picture.size) < 2:
            raise InputError(
                f"the picture of the prompt {given.prompt!r} is {picture.height} x {picture.width} pixels; "
                f"{self.spec.key} needs at least 2 x 2. Give another `image`."
            )
        picture = self._compressed(picture, quality)
        pixels = pipeline.video_processor.preprocess(picture, height=height, width=width)
        posterior = vae.encode(pixels.to(self.device, vae.dtype).unsqueeze(2)).latent_dist
        return pipeline._normalize_latents(posterior_latents(posterior, None), vae.latents_mean, vae.latents_std)

    def _compressed(self, picture: Image.Image, quality: int | None) -> Image.Image:
        crf = resolve_default_image_crf(self.pipeline.text_encoder) if quality is None else quality
        if crf == 0:
            return picture
        return Image.fromarray(apply_image_conditioning_crf(np.array(picture), crf))

    def prepare_latents(
        self,
        condition: Any,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        noise = super().prepare_latents(condition, generators, height, width, generation)
        mask = torch.ones_like(noise[VIDEO][:, :1], dtype=torch.bool)
        mask[:, :, 0] = False
        state = LatentState(noise.components, {VIDEO: mask})
        return state if condition is None else self.network_state(state, condition)

    def network_state(self, state: LatentState, condition: Any) -> LatentState:
        frames = torch.where(state.masks[VIDEO], state[VIDEO], condition.first_frame)
        return LatentState({**state.components, VIDEO: frames}, state.masks)


def _only_picture(key: str, given: ConditionInputs) -> Image.Image:
    """Raises an InputError unless a row has one picture."""
    pictures = given.images("image")
    if len(pictures) != 1:
        raise InputError(
            f"{key} starts from one picture, but {len(pictures)} came with the prompt {given.prompt!r} as `image`."
        )
    return to_pil(pictures[0])
