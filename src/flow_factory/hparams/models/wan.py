"""Wan 2.1 and 2.2: text, pictures or a video to a video."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.folder import check_frames, component_config, pipeline_config
from flow_factory.hparams.models.media import NEGATIVE_PROMPT, PROMPT
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.types import NonNegativeFloat, PositiveInt, option

UMT5_TOKENS = 512
"""Text tokens that the checkpoints were trained with."""


@dataclass
class WanVideoArguments(GenerationArguments):
    """What all pipelines of the family take."""

    num_frames: PositiveInt = option(81, "Frames of a video: 1 more than a multiple of the VAE's temporal factor, 4.")
    max_sequence_length: Annotated[int, Field(ge=1, le=UMT5_TOKENS)] = option(
        UMT5_TOKENS, "Text tokens that every prompt is cut or padded to."
    )


@dataclass
class WanGenerationArguments(WanVideoArguments):
    """Model-specific fields of `train:` and `eval:` for wan2_t2v and wan2_i2v."""

    guidance_scale_2: NonNegativeFloat | None = option(
        None,
        "Guidance scale of the second expert, for low noise, of checkpoints with two (Wan 2.2 A14B); null: "
        "guidance_scale. Whether there is guidance at all is decided by guidance_scale.",
    )


@dataclass
class WanVideoToVideoArguments(WanVideoArguments):
    """Model-specific fields of `train:` and `eval:` for wan2_v2v."""

    num_frames: PositiveInt = option(
        81, "Frames of a video, the first ones of the input's: 1 more than a multiple of the VAE's temporal factor, 4."
    )
    strength: Annotated[float, Field(gt=0, le=1)] = option(
        0.8,
        "Share of the steps that is taken, from the noised input video on: a rollout has int(num_inference_steps x "
        "strength) steps. 1 starts from noise.",
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x patch size, and 16, which the pipelines insist on; 32 for the 5B checkpoint, else 16."""
    patch = component_config(folder, "transformer").get("patch_size", [1, 2, 2])
    spatial = int(component_config(folder, "vae").get("scale_factor_spatial", 8))
    return math.lcm(16, spatial * patch[1], spatial * patch[2])


def check_wan_frames(fields: WanVideoArguments, folder: Path | None) -> None:
    """Raises a FieldError if the VAE cannot make the number of frames."""
    check_frames(fields.num_frames, int(component_config(folder, "vae").get("scale_factor_temporal", 4)))


def check_experts(fields: WanGenerationArguments, folder: Path | None) -> None:
    """Raises a FieldError if fields do not fit the checkpoint: frames, and the second expert's scale."""
    check_wan_frames(fields, folder)
    if fields.guidance_scale_2 is not None and folder is not None and pipeline_config(folder, "boundary_ratio") is None:
        raise FieldError("guidance_scale_2", f"belongs to the second expert, but {folder} has one; remove it.")


def check_image_to_video(fields: WanGenerationArguments, folder: Path | None) -> None:
    """Also the number of text tokens, by which networks with an image encoder find the image's tokens."""
    check_experts(fields, folder)
    reads_image = component_config(folder, "transformer").get("image_dim") is not None
    if reads_image and fields.max_sequence_length != UMT5_TOKENS:
        raise FieldError(
            "max_sequence_length",
            f"is {fields.max_sequence_length}, but {folder} takes all but the last {UMT5_TOKENS} tokens for the "
            f"image's; use {UMT5_TOKENS}.",
        )


# Every linear layer of the blocks: self-attention, cross-attention (also to the image's tokens, in some) and the MLP.
_TARGETS = ("blocks.*.attn1.*", "blocks.*.attn2.*", "blocks.*.ffn.*")
_COMPONENTS = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")


def components(folder: Path) -> tuple[str, ...]:
    """Also the second expert and the image encoder, of checkpoints that need them."""
    two = pipeline_config(folder, "boundary_ratio") is not None
    image = component_config(folder, "transformer").get("image_dim") is not None
    return _COMPONENTS + ("transformer_2",) * two + ("image_encoder", "image_processor") * image


TEXT_TO_VIDEO = ModelSpec(
    key="wan2_t2v",
    adapter="flow_factory.models.wan.text_to_video.WanTextToVideoAdapter",
    pipeline_class="WanPipeline",
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT), outputs=(Modality.VIDEO,)),
    generation_arguments=WanGenerationArguments,
    check_fields=check_experts,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=components,
    trainable_components=("transformer", "transformer_2"),
)

IMAGE_TO_VIDEO = ModelSpec(
    key="wan2_i2v",
    adapter="flow_factory.models.wan.image_to_video.WanImageToVideoAdapter",
    pipeline_class="WanImageToVideoPipeline",
    other_classes=("WanPipeline",),  # the 5B checkpoint serves both
    io=PipelineIOContract(
        inputs=(
            PROMPT,
            NEGATIVE_PROMPT,
            MediaSlot(Modality.IMAGE, "first_frame"),
            MediaSlot(Modality.IMAGE, "last_frame", required=False),
        ),
        outputs=(Modality.VIDEO,),
    ),
    generation_arguments=WanGenerationArguments,
    check_fields=check_image_to_video,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=components,
    trainable_components=("transformer", "transformer_2"),
)

VIDEO_TO_VIDEO = ModelSpec(
    key="wan2_v2v",
    adapter="flow_factory.models.wan.video_to_video.WanVideoToVideoAdapter",
    pipeline_class="WanVideoToVideoPipeline",
    other_classes=("WanPipeline",),  # there are no checkpoints of its own
    io=PipelineIOContract(
        inputs=(PROMPT, NEGATIVE_PROMPT, MediaSlot(Modality.VIDEO, "video")), outputs=(Modality.VIDEO,)
    ),
    generation_arguments=WanVideoToVideoArguments,
    check_fields=check_wan_frames,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_COMPONENTS,
    share_field="strength",
    no_stored_media=(
        "the video that one starts from is no input of the network, so it would learn videos from texts alone; that is "
        "wan2_t2v, whose LoRA fits here too"
    ),
)
