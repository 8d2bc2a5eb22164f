"""Qwen-Image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.hparams.models.folder import component_config
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.types import option


@dataclass
class QwenImageGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for qwen-image."""

    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = option(
        512, "Longest prompt in tokens; longer ones are cut. Shorter ones are padded to a multiple of 64 only."
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x 2 for packing; 16 for the published checkpoints."""
    return 2 * 2 ** len(component_config(folder, "vae").get("temperal_downsample", [False, True, True]))


QWEN_IMAGE = ModelSpec(
    key="qwen-image",
    adapter="flow_factory.models.qwen_image.text_to_image.QwenImageAdapter",
    pipeline_class="QwenImagePipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=QwenImageGenerationArguments,
    size_factor=size_factor,
    resolution_floor=256,
    # Attention and MLPs of both streams of the joint blocks.
    default_lora_targets=(
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    ),
    # Nobody reads the last block's text stream; its keys and values are read by the image stream of that block.
    dead_modules=(
        r"transformer_blocks\.{last}\.attn\.(add_q_proj|to_add_out)",
        r"transformer_blocks\.{last}\.txt_mlp\..*",
    ),
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
