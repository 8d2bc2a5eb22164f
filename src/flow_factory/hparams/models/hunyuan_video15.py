"""HunyuanVideo 1.5: text, or text and a first frame, to a video."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.folder import check_frames, component_config, pipeline_config
from flow_factory.hparams.models.media import NEGATIVE_PROMPT, PROMPT
from flow_factory.hparams.models.spec import GenerationArguments, GuidanceKind, ModelSpec
from flow_factory.hparams.models.targets import JOINT_BLOCK
from flow_factory.hparams.types import PositiveInt, option

PROMPT_TOKENS = 1000
"""Tokens of a prompt that the pipelines keep."""

_GUIDER = "ClassifierFreeGuidance"
_MOMENTUM = "adaptive_projected_guidance_momentum"


@dataclass
class HunyuanVideo15GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for hunyuanvideo-1.5 and hunyuanvideo-1.5-i2v."""

    num_frames: PositiveInt = option(121, "Frames of a video: 1 more than a multiple of the VAE's temporal factor, 4.")
    max_sequence_length: Annotated[int, Field(ge=1, le=PROMPT_TOKENS)] = option(
        PROMPT_TOKENS,
        "Longest prompt in tokens; longer ones are cut. Shorter ones are padded to a multiple of 64 only.",
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x patch size; 16 for the published checkpoints."""
    vae, transformer = component_config(folder, "vae"), component_config(folder, "transformer")
    return int(vae.get("spatial_compression_ratio", 16)) * int(transformer.get("patch_size", 1))


def _guider_config(folder: Path) -> dict[str, Any]:
    path = folder / "guider" / "guider_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def guidance_kind(folder: Path | None) -> GuidanceKind:
    """None where the checkpoint's guider is disabled."""
    disabled = folder is not None and _guider_config(folder).get("enabled") is False
    return "none" if disabled else "cfg"


def check_video(fields: HunyuanVideo15GenerationArguments, folder: Path | None) -> None:
    """Raises a FieldError if the VAE cannot make the number of frames, or the guider is not known here."""
    check_frames(fields.num_frames, int(component_config(folder, "vae").get("temporal_compression_ratio", 4)))
    if folder is not None:
        _check_guider(folder)


def _check_guider(folder: Path) -> None:
    entry = pipeline_config(folder, "guider")
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 and entry[1] else None
    if name is None or name == _GUIDER:  # a guider that is absent is a missing component
        return
    momentum = _guider_config(folder).get(_MOMENTUM)
    reason = "combines predictions in a way that is not known here"
    if momentum is not None:
        reason = (
            f"with momentum {momentum} carries state from step to step, so that a step of a rollout could not be "
            f"computed again in training"
        )
    raise FieldError(
        "guidance_scale",
        f"cannot be given to the guider of {folder}: {name} {reason}. Put a {_GUIDER} in its place: "
        f"`pipeline.guider = diffusers.{_GUIDER}()`, then save the pipeline.",
    )


# Attention and MLPs of both streams of the joint blocks, and of the blocks that refine the prompt's tokens.
_TARGETS = JOINT_BLOCK
# Nobody reads the last block's text stream; its keys and values are read by the video's stream of that block.
_DEAD = (
    r"transformer_blocks\.{last}\.attn\.(add_q_proj|to_add_out)",
    r"transformer_blocks\.{last}\.ff_context\..*",
)
_COMPONENTS = (
    "transformer",
    "vae",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "text_encoder_2",
    "tokenizer_2",
    "guider",
)

TEXT_TO_VIDEO = ModelSpec(
    key="hunyuanvideo-1.5",
    adapter="flow_factory.models.hunyuan_video15.text_to_video.HunyuanVideo15TextToVideoAdapter",
    pipeline_class="HunyuanVideo15Pipeline",
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT), outputs=(Modality.VIDEO,)),
    generation_arguments=HunyuanVideo15GenerationArguments,
    guidance=guidance_kind,
    check_fields=check_video,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    dead_modules=_DEAD,
    required_components=_COMPONENTS,
)

IMAGE_TO_VIDEO = ModelSpec(
    key="hunyuanvideo-1.5-i2v",
    adapter="flow_factory.models.hunyuan_video15.image_to_video.HunyuanVideo15ImageToVideoAdapter",
    pipeline_class="HunyuanVideo15ImageToVideoPipeline",
    io=PipelineIOContract(
        inputs=(PROMPT, NEGATIVE_PROMPT, MediaSlot(Modality.IMAGE, "first_frame")), outputs=(Modality.VIDEO,)
    ),
    generation_arguments=HunyuanVideo15GenerationArguments,
    guidance=guidance_kind,
    check_fields=check_video,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    dead_modules=_DEAD,
    required_components=(*_COMPONENTS, "image_encoder", "feature_extractor"),
)
