"""Qwen-Image-Edit-Plus, pictures and an instruction to a picture (`qwen-image-edit-plus`).

Each reference is read twice: by the vision-language model together with the prompt (and with the negative prompt), and
by the transformer as latents that follow those of the state. It is brought to another size for each, in its own
proportions; the pipeline holds the two areas as constants of its module, here they are fields. Reference latents are
given anew at every step: no noise is added to them, and what is predicted for them is dropped.

The pipeline takes one prompt a call. Here rows whose references agree in number and size, and whose texts in length,
share a forward. Nothing is padded then, so attention needs no mask; flash attention takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from PIL import Image
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.images import to_pil
from flow_factory.models.qwen_image.parts import UnpaddedCondition, encode_reference, masked, resized
from flow_factory.models.qwen_image.text_to_image import QwenImageAdapter
from flow_factory.models.references import predict_by_shape
from flow_factory.samples import ComponentTimes, ConditionInputs, I2ISample, LatentState

_CONSTANTS = {"condition_image_size": "CONDITION_IMAGE_SIZE", "vae_image_size": "VAE_IMAGE_SIZE"}
_MODULE = "pipeline_qwenimage_edit_plus"


class QwenImageEditPlusAdapter(QwenImageAdapter):
    """One or more references a row, in order; the instruction may speak of Picture 1, Picture 2."""

    sample_class = I2ISample
    condition_class = UnpaddedCondition
    no_media: ClassVar[Mapping[str, None]] = {"images": None}

    def load_pipeline(self) -> Any:
        return self.load_diffusers(QwenImageEditPlusPipeline)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        return {name: value for name, value in arguments.items() if name not in _CONSTANTS}

    @classmethod
    def call_setup(cls, guidance_scale: float, generation: Any, size: tuple[int, int]) -> tuple[str, ...]:
        given, default = asdict(generation), asdict(type(generation)())
        changed = [
            f"{_MODULE}.{c} = {given[field]}" for field, c in _CONSTANTS.items() if given[field] != default[field]
        ]
        return (f"from diffusers.pipelines.qwenimage import {_MODULE}", *changed) if changed else ()

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> Any:
        fields = generation or self.config.train_generation
        return self.collate_conditions([self._encode(given, need_negative, fields) for given in inputs])

    def _encode(self, given: ConditionInputs, need_negative: bool, generation: Any) -> UnpaddedCondition:
        pictures = [to_pil(image) for image in given.images("image")]
        if not pictures:
            raise InputError(
                f"qwen-image-edit-plus edits pictures, but none came with the prompt {given.prompt!r}; give one or "
                f"more as `image`."
            )
        seen = [resized(self.pipeline, p, generation.condition_image_size, "condition_image_size") for p in pictures]
        positive = self._encode_text(given.prompt, seen)
        negative = self._encode_text(given.negative_prompt or "", seen) if need_negative else None
        area = generation.vae_image_size
        references = [encode_reference(self.pipeline, p, area, "vae_image_size", self.device) for p in pictures]
        return UnpaddedCondition.with_references(PromptCondition.of(positive, negative), [references])

    def _encode_text(self, text: str, pictures: list[Image.Image]) -> Prompts:
        return masked(*self.pipeline.encode_prompt(prompt=[text], image=list(pictures), device=self.device))

    def collate_conditions(self, conditions: Sequence[Any]) -> Any:
        return collate_padded(conditions)

    def text_mask(self, prompts: Prompts) -> None:
        return None

    def further_images(self, condition: UnpaddedCondition) -> Sequence[Tensor]:
        return condition.stacked

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
    ) -> LatentState:
        predict = super().predict_velocity
        return predict_by_shape(state, times, condition, lambda s, t, c: predict(s, t, c, guidance))
