"""MiniMax-H3: text, first and last frames, or references to a video with its sound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract, SoundFormat
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.folder import component_config
from flow_factory.hparams.models.media import PROMPT
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.types import PositiveInt, option

FPS = 24
SHORTEST_SECONDS, LONGEST_SECONDS = 5, 15
"""Between these lie the videos that the pipelines make."""
SOUND_LATENTS_PER_SECOND = 40


@dataclass
class MiniMaxH3GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for all keys of the family."""

    num_frames: PositiveInt = option(
        124,
        "Frames of a video, at 24 a second: 5 more than a multiple of 17, for between 5 and 15 seconds (124 to 345).",
    )


def check_frames(fields: MiniMaxH3GenerationArguments, folder: Path | None) -> None:
    """Raises a FieldError unless the VAE can make the frames, and the pipelines make videos of that length.

    The VAE encodes chunks of 17 frames into 5 latent ones each, of which the last 3 are dropped: 17 n + 5 frames in
    5 n + 2 latent ones.
    """
    vae = component_config(folder, "vae")
    chunk = int(vae.get("clip_length", 17))
    rest = math.ceil(chunk / math.prod(vae.get("temporal_downsample_factors", [1, 2, 2, 1, 1, 1])))
    fitting = [n for n in range(SHORTEST_SECONDS * FPS, LONGEST_SECONDS * FPS + 1) if n % chunk == rest]
    if fields.num_frames not in fitting:
        near = sorted(fitting, key=lambda n: abs(n - fields.num_frames))[:2]
        raise FieldError(
            "num_frames",
            f"is {fields.num_frames}, but the VAE makes {rest} more than a multiple of {chunk} frames, and the "
            f"pipeline videos of {SHORTEST_SECONDS} to {LONGEST_SECONDS} seconds at {FPS} frames a second; use "
            f"{' or '.join(map(str, sorted(near)))}.",
        )


def sound_format(fields: MiniMaxH3GenerationArguments, folder: Path | None) -> SoundFormat:
    """Stereo, rounded to whole latents of the sound's VAE: it may be half of one longer or shorter than the frames."""
    vae = component_config(folder, "audio_vae")
    latents = round(fields.num_frames / FPS * SOUND_LATENTS_PER_SECOND)
    hop = math.prod(vae.get("encoder_rates", [2, 4, 4, 5, 5]))
    return SoundFormat(int(vae.get("sampling_rate", 32000)), 2, latents * hop, FPS)


def size_factor(folder: Path | None, network: str = "transformer") -> int:
    """VAE downsampling x patch size; 32 for the published checkpoint."""
    spatial = math.prod(component_config(folder, "vae").get("spatial_downsample_factors", [2, 2, 2, 2, 1, 1]))
    return spatial * int(component_config(folder, network).get("patch_size", [1, 2, 2])[2])


# Every linear layer of the blocks, of those too that refine texts: self-attention and MLP.
_TARGETS = (
    "transformer_blocks.*.attn.*",
    "transformer_blocks.*.ff.*",
    "token_refiner.refiner_blocks.*.attn.*",
    "token_refiner.refiner_blocks.*.ff.*",
)
_PARTS = ("vae", "audio_vae", "scheduler", "audio_scheduler", "text_encoder", "tokenizer", "processor")
_OUTPUTS = (Modality.VIDEO, Modality.AUDIO)

_FAMILY: dict[str, Any] = {
    "pipeline_class": "MiniMaxH3ModularPipeline",
    "generation_arguments": MiniMaxH3GenerationArguments,
    "guidance": "none",
    "check_fields": check_frames,
    "sound": sound_format,
    "resolution_floor": 256,
    "default_lora_targets": _TARGETS,
    "max_batch": 1,
    "uncounted_steps": 1,
}

TEXT = ModelSpec(
    key="minimax-h3-t2va",
    adapter="flow_factory.models.minimax_h3.text.MiniMaxH3TextAdapter",
    workflow="t2va",
    io=PipelineIOContract(inputs=(PROMPT,), outputs=_OUTPUTS),
    size_factor=size_factor,
    required_components=("transformer", *_PARTS),
    **_FAMILY,
)

FRAMES = ModelSpec(
    key="minimax-h3-fl2va",
    adapter="flow_factory.models.minimax_h3.frames.MiniMaxH3FramesAdapter",
    workflow="fl2va",
    io=PipelineIOContract(
        inputs=(
            PROMPT,
            MediaSlot(Modality.IMAGE, "first_frame", required=False),
            MediaSlot(Modality.IMAGE, "last_frame", required=False),
        ),
        outputs=_OUTPUTS,
        one_of=("first_frame", "last_frame"),
    ),
    size_factor=size_factor,
    required_components=("transformer", *_PARTS),
    **_FAMILY,
)

REFERENCES = ModelSpec(
    key="minimax-h3-ref2va",
    adapter="flow_factory.models.minimax_h3.references.MiniMaxH3ReferencesAdapter",
    workflow="ref2va",
    io=PipelineIOContract(
        inputs=(
            PROMPT,
            MediaSlot(Modality.IMAGE, "image", required=False, max_items=9),
            MediaSlot(Modality.VIDEO, "video", required=False, max_items=3),
            MediaSlot(Modality.AUDIO, "soundtrack", required=False, max_items=3),
            MediaSlot(Modality.AUDIO, "audio", required=False, max_items=3),
        ),
        outputs=_OUTPUTS,
        one_of=("image", "video"),
    ),
    size_factor=partial(size_factor, network="transformer_ref"),
    required_components=("transformer_ref", *_PARTS),
    trainable_components=("transformer_ref",),
    **_FAMILY,
)
