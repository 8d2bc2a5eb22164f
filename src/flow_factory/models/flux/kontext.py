"""FLUX.1 Kontext, a picture and an instruction to a picture (`flux1-kontext`): FLUX.1 with a reference in its sequence.

The reference's tokens follow those of the state and have a 1 in the first coordinate of their positions. They are given
anew at every step: no noise is added to them, and what is predicted for them is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.flux.flux1 import Flux1Adapter
from flow_factory.models.flux.packing import pack
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.images import to_pil
from flow_factory.models.references import ReferenceCondition, predict_by_shape
from flow_factory.models.shifted_grid import linear_sigmas
from flow_factory.samples import ComponentTimes, ConditionInputs, I2ISample, LatentState


class FluxKontextAdapter(Flux1Adapter):
    """One reference picture a row; rows whose references have one size share a forward.

    A batch of the pipeline brings all references to the size of the first one. Here each keeps its own, as in a call
    of its own.
    """

    sample_class = I2ISample
    condition_class = ReferenceCondition
    no_media: ClassVar[Mapping[str, None]] = {"image": None}

    def load_pipeline(self) -> Any:
        return self.load_diffusers(FluxKontextPipeline)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        return arguments | {"_auto_resize": arguments.pop("auto_resize")}

    @classmethod
    def size_arguments(cls, height: int, width: int) -> dict[str, Any]:
        # Of height and width the pipeline takes the proportions only.
        return super().size_arguments(height, width) | {"max_area": height * width}

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> ReferenceCondition:
        fields = generation or self.config.train_generation
        texts = super().encode_inputs(inputs, need_negative, fields)
        references = [[self._encode_reference(_only_image(given), fields.auto_resize)] for given in inputs]
        return ReferenceCondition.with_references(texts, references)

    def _encode_reference(self, picture: Tensor, auto_resize: bool) -> Tensor:
        """Latents [C, h, w] of a picture, brought to the size at which the pipeline reads it."""
        pipeline, image = self.pipeline, to_pil(picture)
        multiple = 2 * pipeline.vae_scale_factor
        if min(image.size) < multiple:
            raise InputError(
                f"a reference of {image.height} x {image.width} pixels is smaller than one token ({multiple} pixels) "
                f"of flux1-kontext; give a larger picture as `image`."
            )
        height, width = pipeline.image_processor.get_default_height_width(image)
        if auto_resize:
            proportions = width / height
            known = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
            _, width, height = min((abs(proportions - w / h), w, h) for w, h in known)
        height, width = height // multiple * multiple, width // multiple * multiple
        image = pipeline.image_processor.resize(image, height, width)
        pixels = pipeline.image_processor.preprocess(image, height, width)
        return pipeline._encode_vae_image(image=pixels.to(self.device, pipeline.vae.dtype), generator=None)[0]

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        # Unlike FLUX.1's, this pipeline passes its sigmas to every scheduler.
        return super().grid_arguments(num_steps, state, condition) | {"sigmas": linear_sigmas(num_steps)}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
    ) -> LatentState:
        predict = super().predict_velocity
        return predict_by_shape(state, times, condition, lambda s, t, c: predict(s, t, c, guidance))

    def further_tokens(self, condition: Any) -> tuple[Tensor, Tensor]:
        (references,) = condition.stacked
        batch, _, height, width = references.shape
        ids = self.pipeline._prepare_latent_image_ids(batch, height // 2, width // 2, references.device, torch.float32)
        ids[:, 0] = 1
        return pack(references), ids


def _only_image(given: ConditionInputs) -> Tensor:
    images = given.images("image")
    if len(images) != 1:
        raise InputError(
            f"flux1-kontext edits one picture, but {len(images)} came with the prompt {given.prompt!r}; give one as "
            f"`image`."
        )
    return images[0]
