"""Qwen-Image 2.1, text and pictures to a picture (`qwen-image-2.1`): text, references and picture in one sequence.

A vision-language model reads the prompt and its references as one text, in which every reference has slots, a slot for
2 x 2 latents. The transformer puts the reference's latents into them and the picture's behind the text. It attends
forwards only, within each picture in both directions; text and references are modulated as at time 0, so they are not
noised. What is predicted for them is dropped.

Positions are counted along the sequence and the network takes one layout for all rows. Padding would therefore move the
picture, as it does in a batch of the pipeline, where a row depends on the longest prompt. Here rows whose prompts have
equal lengths and whose references have equal sizes share a forward, without padding: a row is as in a call of its own.

The pipeline keeps the keys and values of text and references from step to step. Here they are computed anew, since what
is sampled has to be replayed with gradients by the same products; `call_arguments` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import QwenImage21Pipeline
from PIL import Image
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.comfyui import LORA_KEYS, DiffusersNames
from flow_factory.models.conditions import PromptCondition, Prompts, collate_padded
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.images import to_bytes, to_pil, to_pixels
from flow_factory.models.qwen_image.parts import (
    UnpaddedCondition,
    decode_frame,
    encode_frame,
    encode_reference,
    resized,
    true_cfg_arguments,
)
from flow_factory.models.references import predict_by_shape
from flow_factory.models.shifted_grid import linear_sigmas, token_shift
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, ConditionInputs, I2ISample, LatentState

_TEXT, _SLOT = 1, 2  # in masks, of which 0 is padding
_TOKENS_PER_SLOT = 4


class QwenImage21Adapter(TextToImageAdapter):
    """Any number of references a row, in order; `guidance_scale` is what the pipeline calls `true_cfg_scale`."""

    sample_class = I2ISample
    condition_class = UnpaddedCondition
    comfyui = DiffusersNames(LORA_KEYS)

    def load_pipeline(self) -> QwenImage21Pipeline:
        return self.load_diffusers(QwenImage21Pipeline)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        return true_cfg_arguments(arguments) | {"use_kv_cache": False}

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> UnpaddedCondition:
        fields = generation or self.config.train_generation
        return self.collate_conditions([self._encode(given, need_negative, fields) for given in inputs])

    def _encode(self, given: ConditionInputs, need_negative: bool, generation: Any) -> UnpaddedCondition:
        area = generation.output_resolution**2
        pictures = [to_pil(image).convert("RGBA") for image in given.images("image")]
        seen = [resized(self.pipeline, p, area, "output_resolution squared") for p in pictures]
        references = [
            encode_reference(self.pipeline, p, area, "output_resolution squared", self.device) for p in pictures
        ]
        positive = self._encode_text(given.prompt, seen)
        negative = self._encode_text(given.negative_prompt or "", seen) if need_negative else None
        _check_slots(positive, references, generation.output_resolution)
        return UnpaddedCondition.with_references(PromptCondition.of(positive, negative), [references])

    def _encode_text(self, text: str, pictures: list[Image.Image]) -> Prompts:
        # One text is never padded, so there is no mask.
        embeds, _, slots = self.pipeline.encode_prompt([text], image=list(pictures) or None, device=self.device)
        return Prompts(embeds, mask=torch.where(slots, _SLOT, _TEXT))

    def collate_conditions(self, conditions: Sequence[Any]) -> Any:
        return collate_padded(conditions)

    def prepare_latents(
        self,
        condition: Any,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        pipeline, count = self.pipeline, len(generators)
        packed, _ = pipeline.prepare_latents(
            None, count, self.latent_channels, height, width, torch.float32, self.device, list(generators)
        )
        return LatentState.single(pipeline._unpack_latents(packed, height, width, pipeline.vae_scale_factor).squeeze(2))

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        sigmas = self.pipeline.config.sample_sigmas
        if sigmas is not None and len(sigmas) != num_steps:
            raise InputError(
                f"this checkpoint samples in {len(sigmas)} steps of its own (`sample_sigmas` in model_index.json), but "
                f"num_inference_steps is {num_steps}; set it to {len(sigmas)}."
            )
        mu = token_shift(self.pipeline.scheduler, height * width)
        return {"sigmas": linear_sigmas(num_steps) if sigmas is None else list(sigmas), "mu": mu}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
    ) -> LatentState:
        return predict_by_shape(state, times, condition, lambda s, t, c: self._predict(s, t, c, guidance))

    def _predict(
        self, state: LatentState, times: ComponentTimes, condition: UnpaddedCondition, guidance: GuidanceSpec
    ) -> LatentState:
        """The velocity of rows that agree in their layout."""
        images = (*condition.stacked, state.only)
        shapes = [(1, *image.shape[-2:]) for image in images]
        tokens = torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1)
        tokens = self.network_input("transformer", tokens)
        batch, _, height, width = state.only.shape

        def network(prompts: Prompts) -> Tensor:
            assert prompts.mask is not None
            slots = prompts.mask == _SLOT
            target = slots.new_ones(batch, height * width // _TOKENS_PER_SLOT)
            predicted = self.network("transformer")(
                hidden_states=tokens,
                timestep=times.only.timestep / 1000,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                img_shapes=[shapes] * batch,
                img_mask=torch.cat([slots, target], dim=1),
                return_dict=False,
            )[0]
            return predicted[:, -height * width :]

        velocity = guide_apart(guidance, times, condition, network)
        return LatentState.single(velocity.transpose(1, 2).unflatten(2, (height, width)))

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        """uint8 [3, H, W]: what the pipeline gives with transparency, over white."""
        return [over_white(picture) for picture in to_bytes(self.pipeline, decode_frame(self.pipeline.vae, state.only))]

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        pixels = to_pixels(self.pipeline, media, self.device)
        opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
        return LatentState.single(encode_frame(self.pipeline.vae, opaque, generators))


def over_white(picture: Tensor) -> Tensor:
    """uint8 [3, H, W] of a picture with transparency, uint8 [4, H, W], as a viewer shows it on white."""
    alpha = picture[3:].float() / 255
    return (picture[:3].float() * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def _check_slots(text: Prompts, references: Sequence[Tensor], side: int) -> None:
    assert text.mask is not None
    slots = int((text.mask == _SLOT).sum())
    latents = sum(reference.shape[-2] * reference.shape[-1] for reference in references)
    if slots * _TOKENS_PER_SLOT != latents:
        raise InputError(
            f"the vision-language model has {slots} slots for references of {latents} latents, and should have "
            f"{latents // _TOKENS_PER_SLOT}: its processor resized what output_resolution {side} gave. Choose an "
            f"output_resolution whose square lies between the processor's smallest and largest number of pixels."
        )
