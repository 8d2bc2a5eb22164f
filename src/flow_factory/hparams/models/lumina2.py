"""Lumina-Image 2.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import ATTENTION
from flow_factory.hparams.types import Fraction, option


@dataclass
class Lumina2GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for lumina2."""

    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = option(
        256, "Gemma tokens per prompt, system prompt included."
    )
    system_prompt: str | None = option(None, "Text before every prompt; null: the pipeline's own.")
    cfg_trunc_ratio: Fraction = option(1.0, "Share of the steps, from the first, that are guided.")
    cfg_normalization: bool = option(True, "Give guided predictions the norms they have without guidance.")


SPEC = ModelSpec(
    key="lumina2",
    adapter="flow_factory.models.lumina2.adapter.Lumina2Adapter",
    pipeline_class="Lumina2Pipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=Lumina2GenerationArguments,
    size_factor=16,  # the pipeline does not ask the VAE
    resolution_floor=256,
    # Attention and SwiGLU MLP of the single-stream blocks and of both refiners.
    default_lora_targets=(*ATTENTION, "feed_forward.linear_1", "feed_forward.linear_2", "feed_forward.linear_3"),
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
