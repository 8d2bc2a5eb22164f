"""SANA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.hparams.models.folder import component_config
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import ATTENTION
from flow_factory.hparams.types import option


@dataclass
class SanaGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for sana."""

    max_sequence_length: Annotated[int, Field(ge=2, le=300)] = option(
        300, "Gemma tokens per prompt, without the instruction."
    )
    enhance_prompts: bool = option(True, "Put the pipeline's instruction (`complex_human_instruction`) before prompts.")


def size_factor(folder: Path | None) -> int:
    """Downsampling of the autoencoder x patch size; the pipeline itself refuses what is no multiple of 32."""
    channels = component_config(folder, "vae").get("encoder_block_out_channels", [1] * 6)
    return max(32, 2 ** (len(channels) - 1) * int(component_config(folder, "transformer").get("patch_size", 1)))


SPEC = ModelSpec(
    key="sana",
    adapter="flow_factory.models.sana.adapter.SanaAdapter",
    pipeline_class="SanaPipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=SanaGenerationArguments,
    size_factor=size_factor,
    resolution_floor=512,
    # Self- and cross-attention. The MLPs are convolutions (1 x 1 and depth-wise), which LoRA does not wrap here.
    default_lora_targets=ATTENTION,
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
