"""LTX-2 (2.0, 2.3, 2.5): text, or text and a first frame, to a video with its sound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.folder import check_frames, component_config
from flow_factory.hparams.models.media import NEGATIVE_PROMPT, PROMPT
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, option

_AUDIO_RATIO = 4
"""Mel frames that share a moment of latents, a constant of the audio VAE's class."""


@dataclass
class LTX2GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for ltx2_t2av.

    Names and defaults are the pipeline's.
    """

    num_frames: PositiveInt = option(121, "Frames of a video: 1 more than a multiple of the VAE's temporal factor, 8.")
    frame_rate: PositiveFloat = option(
        24.0, "Frames per second. The network reads it, and the sound is as long as the frames last."
    )
    motion_speed: PositiveFloat = option(
        1.0, "Speed of what moves: the network reads frame_rate / motion_speed. Frames are shown at frame_rate."
    )
    audio_guidance_scale: NonNegativeFloat | None = option(
        7.0,
        "guidance_scale of the sound; null or 0: guidance_scale. There is guidance by the negative prompt if either is "
        "above 1.",
    )
    stg_scale: NonNegativeFloat = option(
        1.0,
        "Guidance away from a prediction with self-attention skipped in spatio_temporal_guidance_blocks: one forward "
        "more, above 0.",
    )
    audio_stg_scale: NonNegativeFloat | None = option(1.0, "stg_scale of the sound; null or 0: stg_scale.")
    modality_scale: NonNegativeFloat = option(
        3.0,
        "Guidance away from a prediction in which video and sound do not see each other: one forward more, above 1.",
    )
    audio_modality_scale: NonNegativeFloat | None = option(
        3.0, "modality_scale of the sound; null or 0: modality_scale."
    )
    guidance_rescale: Fraction = option(
        0.7, "Share of the guided prediction of clean latents that is rescaled to the deviation of the unguided one."
    )
    audio_guidance_rescale: Fraction | None = option(0.7, "guidance_rescale of the sound; null or 0: guidance_rescale.")
    spatio_temporal_guidance_blocks: list[NonNegativeInt] | None = option(
        help="Blocks that stg_scale perturbs, counted from 0; 28 is what the model card of LTX-2.3 gives.",
        factory=lambda: [28],
    )
    use_cross_timestep: bool = option(
        True,
        "Layers between video and sound read the time of the other one, as LTX-2.3 and 2.5 were trained; false for "
        "LTX-2.0. Matters only where a frame is pinned at time 0.",
    )
    max_sequence_length: PositiveInt = option(1024, "Text tokens that every prompt is cut or padded to.")


@dataclass
class LTX2ImageArguments(LTX2GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for ltx2_i2av."""

    image_crf: Annotated[int, Field(ge=0, le=51)] | None = option(
        None,
        "H.264 quality that the picture is compressed to first, since the model was trained with frames of videos; "
        'null: the checkpoint\'s, 33 or 18. 0 leaves it as it is; other values need the extra "video".',
    )


def _compression(folder: Path | None) -> tuple[int, int]:
    """Pixels and frames that share their latents; of the published checkpoints 32 and 8."""
    config = component_config(folder, "vae")
    halvings = config.get("spatio_temporal_scaling", [True] * 4)
    if isinstance(halvings, bool):
        halvings = [halvings] * (len(config.get("layers_per_block", [1] * 5)) - 1)
    space = config.get("spatial_compression_ratio") or config.get("patch_size", 4) * 2 ** sum(halvings)
    time = config.get("temporal_compression_ratio") or config.get("patch_size_t", 1) * 2 ** sum(halvings)
    return (space, time) if config else (32, 8)


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x patch size, and 32, which the pipelines insist on."""
    space, _ = _compression(folder)
    return math.lcm(32, space * component_config(folder, "transformer").get("patch_size", 1))


def check_ltx2(fields: LTX2GenerationArguments, folder: Path | None) -> None:
    """Raises a FieldError if fields do not fit each other, or the checkpoint."""
    check_frames(fields.num_frames, _compression(folder)[1])
    _check_sound(fields, folder)
    _check_registers(fields, folder)
    if max(fields.stg_scale, fields.audio_stg_scale or 0.0) > 0:
        _check_blocks(fields, folder)


def _check_sound(fields: LTX2GenerationArguments, folder: Path | None) -> None:
    config = component_config(folder, "audio_vae")
    per_second = config.get("sample_rate", 16000) / config.get("mel_hop_length", 160) / _AUDIO_RATIO
    if round(fields.num_frames / fields.frame_rate * per_second) < 1:
        raise FieldError(
            "frame_rate",
            f"is {fields.frame_rate:g}, at which {fields.num_frames} frames are too short for any sound: latents of "
            f"the sound come {per_second:g} times a second. Lower it, or raise num_frames.",
        )


def _check_registers(fields: LTX2GenerationArguments, folder: Path | None) -> None:
    """Padding is filled with learned registers, all of them again and again."""
    config = component_config(folder, "connectors")
    for stream in ("video", "audio"):
        registers = config.get(f"{stream}_connector_num_learnable_registers", 128)
        if registers and fields.max_sequence_length % registers:
            raise FieldError(
                "max_sequence_length",
                f"is {fields.max_sequence_length}, but must be a multiple of the {registers} registers that the "
                f"checkpoint fills padding with.",
            )


def _check_blocks(fields: LTX2GenerationArguments, folder: Path | None) -> None:
    blocks = fields.spatio_temporal_guidance_blocks
    if not blocks:
        raise FieldError(
            "spatio_temporal_guidance_blocks", "is empty, but stg_scale needs a block; name one, or set stg_scale to 0."
        )
    if folder is None:
        return
    config = component_config(folder, "transformer")
    count = config.get("num_layers", 48)
    if max(blocks) >= count:
        raise FieldError(
            "spatio_temporal_guidance_blocks", f"has {max(blocks)}, but {folder} has the blocks 0 to {count - 1}."
        )
    if not config.get("perturbed_attn", False):
        raise FieldError(
            "stg_scale",
            f"has no effect on {folder}, whose transformer cannot be perturbed (perturbed_attn is false, as in "
            f"LTX-2.0); set stg_scale to 0 and audio_stg_scale to null.",
        )


# Every linear layer of the blocks: attention of either stream to itself, to the text and to the other, gates, and MLPs.
_TARGETS = ("transformer_blocks.*attn*", "transformer_blocks.*ff.*")

_COMPONENTS = (
    "transformer", "vae", "audio_vae", "vocoder", "scheduler", "text_encoder", "tokenizer", "connectors"
)  # fmt: skip
_OUTPUTS = (Modality.VIDEO, Modality.AUDIO)
_NO_STORED_MEDIA = "its audio VAE reads mel spectrograms, and diffusers has nothing that makes them of a sound"

TEXT_TO_AUDIO_VIDEO = ModelSpec(
    key="ltx2_t2av",
    adapter="flow_factory.models.ltx2.text_to_audio_video.LTX2Adapter",
    pipeline_class="LTX2Pipeline",
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT), outputs=_OUTPUTS),
    generation_arguments=LTX2GenerationArguments,
    check_fields=check_ltx2,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_COMPONENTS,
    no_stored_media=_NO_STORED_MEDIA,
)

IMAGE_TO_AUDIO_VIDEO = ModelSpec(
    key="ltx2_i2av",
    adapter="flow_factory.models.ltx2.image_to_audio_video.LTX2ImageAdapter",
    pipeline_class="LTX2ImageToVideoPipeline",
    other_classes=("LTX2Pipeline",),  # one checkpoint serves both
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT, MediaSlot(Modality.IMAGE, "image")), outputs=_OUTPUTS),
    generation_arguments=LTX2ImageArguments,
    check_fields=check_ltx2,
    size_factor=size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_COMPONENTS,
    no_stored_media=_NO_STORED_MEDIA,
)
