"""Z-Image and Z-Image-Turbo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from flow_factory.hparams.models.folder import packed_size_factor
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.types import Fraction, NonNegativeFloat, option


@dataclass
class ZImageGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for z-image."""

    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = option(
        512, "Longest prompt in tokens, chat template included; longer ones are cut."
    )
    cfg_normalization: NonNegativeFloat = option(
        0.0, "A guided prediction's norm is at most this times the norm without guidance; 0: no limit."
    )
    cfg_truncation: Fraction = option(1.0, "Guide only while 1 - sigma is at most this; 1: always.")


SPEC = ModelSpec(
    key="z-image",
    adapter="flow_factory.models.z_image.adapter.ZImageAdapter",
    pipeline_class="ZImagePipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=ZImageGenerationArguments,
    size_factor=packed_size_factor,
    resolution_floor=256,
    # Attention and SwiGLU MLP of the single-stream blocks and of both refiners.
    default_lora_targets=("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"),
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
