"""Qwen-Image, Qwen-Image-Edit-Plus and Qwen-Image 2.1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams.models.folder import component_config
from flow_factory.hparams.models.media import NEGATIVE_PROMPT, PROMPT, REFERENCES, TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import ADDED_ATTENTION, ATTENTION
from flow_factory.hparams.types import option

ReferenceArea = Annotated[int, Field(ge=32 * 32)]
"""Pixels that references are brought to; both sides become multiples of 32."""


@dataclass
class QwenImageGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for qwen-image."""

    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = option(
        512, "Longest prompt in tokens; longer ones are cut. Shorter ones are padded to a multiple of 64 only."
    )


@dataclass
class QwenImageEditPlusGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for qwen-image-edit-plus."""

    condition_image_size: ReferenceArea = option(
        384 * 384, "Pixels of a reference as the vision-language model reads it, in the reference's own proportions."
    )
    vae_image_size: ReferenceArea = option(
        1024 * 1024,
        "Pixels of a reference as the transformer reads it, in the reference's own proportions. Each one costs as many "
        "tokens as a picture of this size.",
    )


@dataclass
class QwenImage21GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for qwen-image-2.1."""

    output_resolution: Annotated[int, Field(ge=32)] = option(
        1024,
        "References are brought to the square of it in pixels, in their own proportions. (The size of the output is "
        "resolution.)",
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x 2 for packing; 16 for the published checkpoints."""
    return 2 * 2 ** len(component_config(folder, "vae").get("temperal_downsample", [False, True, True]))


# Attention and MLPs of both streams of the joint blocks.
_TARGETS = (
    *ATTENTION,
    *ADDED_ATTENTION,
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
# Nobody reads the last block's text stream; its keys and values are read by the image stream of that block.
_DEAD = (
    r"transformer_blocks\.{last}\.attn\.(add_q_proj|to_add_out)",
    r"transformer_blocks\.{last}\.txt_mlp\..*",
)

QWEN_IMAGE = ModelSpec(
    key="qwen-image",
    adapter="flow_factory.models.qwen_image.text_to_image.QwenImageAdapter",
    pipeline_class="QwenImagePipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=QwenImageGenerationArguments,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    dead_modules=_DEAD,
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)

QWEN_IMAGE_EDIT_PLUS = ModelSpec(
    key="qwen-image-edit-plus",
    adapter="flow_factory.models.qwen_image.edit_plus.QwenImageEditPlusAdapter",
    pipeline_class="QwenImageEditPlusPipeline",
    io=PipelineIOContract(
        inputs=(PROMPT, NEGATIVE_PROMPT, MediaSlot(Modality.IMAGE, "image", max_items=None)),
        outputs=(Modality.IMAGE,),
    ),
    generation_arguments=QwenImageEditPlusGenerationArguments,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    dead_modules=_DEAD,
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer", "processor"),
)

QWEN_IMAGE_2_1 = ModelSpec(
    key="qwen-image-2.1",
    adapter="flow_factory.models.qwen_image.qwen_image_21.QwenImage21Adapter",
    pipeline_class="QwenImage21Pipeline",
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT, REFERENCES), outputs=(Modality.IMAGE,)),
    generation_arguments=QwenImage21GenerationArguments,
    size_factor=32,  # the VAE's 16, and 2 x 2 latents to a slot of the sequence
    resolution_floor=256,
    # Attention and SwiGLU MLP of the single-stream blocks.
    default_lora_targets=(*ATTENTION, "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
    required_components=("transformer", "vae", "scheduler", "text_encoder", "processor"),
)
