"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams.models.folder import component_config, vae_factor
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import JOINT_BLOCK
from flow_factory.hparams.types import option


@dataclass
class SD3_5GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for sd3-5."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = option(
        256, "T5 tokens per prompt. Small models without a real T5 run much faster with a small number."
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x transformer patch size; 16 for the published checkpoints."""
    return vae_factor(folder) * int(component_config(folder, "transformer").get("patch_size", 2))


def resolution_floor(folder: Path | None) -> int:
    """A quarter of the native side length (sample_size latents); 256 for the published checkpoints."""
    return int(component_config(folder, "transformer").get("sample_size", 128)) * vae_factor(folder) // 4


SPEC = ModelSpec(
    key="sd3-5",
    adapter="flow_factory.models.sd3_5.adapter.SD3_5Adapter",
    pipeline_class="StableDiffusion3Pipeline",
    io=PipelineIOContract(
        inputs=(
            MediaSlot(Modality.TEXT, "prompt"),
            MediaSlot(Modality.TEXT, "negative_prompt", required=False),
        ),
        outputs=(Modality.IMAGE,),
    ),
    generation_arguments=SD3_5GenerationArguments,
    guidance="cfg",
    size_factor=size_factor,
    resolution_floor=resolution_floor,
    # The eight attention projections of the joint blocks; as suffixes they also cover the second attention (attn2) of
    # SD3.5-M's dual-attention blocks.
    default_lora_targets=JOINT_BLOCK,
    # The last block has no context output: its text queries attend for nobody. (Its text keys and values are read.)
    dead_modules=(r"transformer_blocks\.{last}\.attn\.add_q_proj",),
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
    trainable_components=("transformer",),
)
