"""CogView4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.hparams.models.folder import component_config, vae_factor
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import ATTENTION, FEED_FORWARD
from flow_factory.hparams.types import option


@dataclass
class CogView4GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for cogview4."""

    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = option(
        1024, "Longest prompt in tokens; longer ones are cut. Shorter ones are padded to a multiple of 16 only."
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x patch size; the pipeline itself refuses what is no multiple of 16."""
    patch = int(component_config(folder, "transformer").get("patch_size", 2))
    return max(16, vae_factor(folder) * patch)


SPEC = ModelSpec(
    key="cogview4",
    adapter="flow_factory.models.cogview4.adapter.CogView4Adapter",
    pipeline_class="CogView4Pipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=CogView4GenerationArguments,
    size_factor=size_factor,
    resolution_floor=512,
    # Attention and MLP, whose weights text and image share.
    default_lora_targets=ATTENTION + FEED_FORWARD,
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
