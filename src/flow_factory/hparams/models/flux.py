"""FLUX.1 (dev, schnell, Kontext and fine-tuned checkpoints of the same format) and Chroma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import Modality, PipelineIOContract
from flow_factory.hparams.models.folder import packed_size_factor
from flow_factory.hparams.models.media import EDITED_IMAGE, NEGATIVE_PROMPT, PROMPT, TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import JOINT_BLOCK
from flow_factory.hparams.types import NonNegativeFloat, option


@dataclass
class FluxGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for flux1."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = option(
        512, "T5 tokens per prompt; schnell was trained with 256."
    )
    true_cfg_scale: NonNegativeFloat = option(
        1.0,
        "Classifier-free guidance with a second forward for the negative prompt, above 1. guidance_scale is the "
        "network's own input and needs no second forward.",
    )


# Joint blocks: both streams' attention and MLPs. Single-stream blocks: attention, and the MLP whose output projection
# is shared with the attention's. The network's last `proj_out` is no part of a block.
_TARGETS = (*JOINT_BLOCK, "proj_mlp", "single_transformer_blocks.*.proj_out")

_FLUX1_COMPONENTS = (
    "transformer", "vae", "scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"
)  # fmt: skip

FLUX1 = ModelSpec(
    key="flux1",
    adapter="flow_factory.models.flux.flux1.Flux1Adapter",
    pipeline_class="FluxPipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=FluxGenerationArguments,
    guidance="embedded",
    size_factor=packed_size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_FLUX1_COMPONENTS,
)


@dataclass
class KontextGenerationArguments(FluxGenerationArguments):
    """Model-specific fields of `train:` and `eval:` for flux1-kontext."""

    auto_resize: bool = option(
        True,
        "Bring references to the size nearest in proportions of those the model was trained with, about one megapixel; "
        "false: keep theirs, which costs less where they are small.",
    )


FLUX1_KONTEXT = ModelSpec(
    key="flux1-kontext",
    adapter="flow_factory.models.flux.kontext.FluxKontextAdapter",
    pipeline_class="FluxKontextPipeline",
    io=PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT, EDITED_IMAGE), outputs=(Modality.IMAGE,)),
    generation_arguments=KontextGenerationArguments,
    guidance="embedded",
    size_factor=packed_size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_FLUX1_COMPONENTS,
)


@dataclass
class ChromaGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for chroma."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = option(512, "T5 tokens per prompt.")


CHROMA = ModelSpec(
    key="chroma",
    adapter="flow_factory.models.flux.chroma.ChromaAdapter",
    pipeline_class="ChromaPipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=ChromaGenerationArguments,
    size_factor=packed_size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=("transformer", "vae", "scheduler", "text_encoder", "tokenizer"),
)
