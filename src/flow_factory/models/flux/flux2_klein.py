"""FLUX.2 klein, text and any number of references to a picture (`flux2-klein`): base and step-distilled checkpoints.

A base checkpoint is guided by a second forward with the empty prompt. A distilled one (`is_distilled` in its
model_index.json) has no guidance; its pipeline ignores a scale, and here it is an error.
"""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline

from flow_factory.errors import InputError
from flow_factory.models.flux.flux2 import Flux2FamilyAdapter
from flow_factory.models.guidance import GuidanceSpec


class Flux2KleinAdapter(Flux2FamilyAdapter):
    """FLUX.2 with a smaller text encoder and without guidance as an input."""

    def load_pipeline(self) -> Any:
        return self.load_diffusers(Flux2KleinPipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        if guidance_scale > 1.0 and self.pipeline.config.is_distilled:
            raise InputError(
                f"guidance_scale is {guidance_scale:g}, but {self.config.model_args.model_name_or_path} is a "
                f"step-distilled FLUX.2 klein, which has no guidance; use 1."
            )
        return GuidanceSpec(scale=guidance_scale)
