"""FLUX.2 and FLUX.2 klein."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flow_factory.contracts import Modality, PipelineIOContract
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.folder import component_config, packed_size_factor, pipeline_config
from flow_factory.hparams.models.media import PROMPT, REFERENCES
from flow_factory.hparams.models.spec import GenerationArguments, GuidanceKind, ModelSpec
from flow_factory.hparams.models.targets import ADDED_ATTENTION, ATTENTION
from flow_factory.hparams.types import NonNegativeInt, option

_LAYERS_HELP = (
    "Layers of the text encoder whose outputs are joined, 0 being its embedding; as many as the transformer's width "
    "asks for."
)
_LENGTH_HELP = "Tokens per prompt, the pipeline's own instruction included; shorter prompts are padded to it."
_Layers = Annotated[list[NonNegativeInt], Field(min_length=1)]


@dataclass
class Flux2GenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for flux2."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = option(512, _LENGTH_HELP)
    text_encoder_out_layers: _Layers = option(help=_LAYERS_HELP, factory=lambda: [10, 20, 30])


@dataclass
class Flux2KleinGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for flux2-klein."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = option(512, _LENGTH_HELP)
    text_encoder_out_layers: _Layers = option(help=_LAYERS_HELP, factory=lambda: [9, 18, 27])


def check_layers(fields: Flux2GenerationArguments | Flux2KleinGenerationArguments, folder: Path | None) -> None:
    """Raises a FieldError unless the text encoder has the layers, and they make the width that the network reads."""
    text = component_config(folder, "text_encoder")
    text = text.get("text_config", text)
    width = component_config(folder, "transformer").get("joint_attention_dim")
    if not text or width is None:
        return
    layers, depth, own = fields.text_encoder_out_layers, text["num_hidden_layers"], text["hidden_size"]
    if max(layers) > depth:
        raise FieldError("text_encoder_out_layers", f"is {layers}, but the text encoder has {depth} layers.")
    if len(layers) * own != width:
        raise FieldError(
            "text_encoder_out_layers",
            f"is {layers}: {len(layers)} x {own} channels, but the transformer reads {width}; name {width // own}.",
        )


_IO = PipelineIOContract(inputs=(PROMPT, REFERENCES), outputs=(Modality.IMAGE,))
_COMPONENTS = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")

# Joint blocks: both streams' attention and MLPs. Single-stream blocks have one projection in, for queries, keys, values
# and the MLP, and one out; the latter's name ends as the joint blocks' list of output layers does, hence the pattern.
_TARGETS = (
    *ATTENTION,
    *ADDED_ATTENTION,
    "ff.linear_in",
    "ff.linear_out",
    "ff_context.linear_in",
    "ff_context.linear_out",
    "to_qkv_mlp_proj",
    "single_transformer_blocks.*.attn.to_out",
)

FLUX2 = ModelSpec(
    key="flux2",
    adapter="flow_factory.models.flux.flux2.Flux2Adapter",
    pipeline_class="Flux2Pipeline",
    io=_IO,
    generation_arguments=Flux2GenerationArguments,
    guidance="embedded",
    size_factor=packed_size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_COMPONENTS,
    check_fields=check_layers,
)


def klein_guidance(folder: Path | None) -> GuidanceKind:
    """None for a step-distilled checkpoint."""
    distilled = folder is not None and pipeline_config(folder, "is_distilled")
    return "none" if distilled else "cfg"


FLUX2_KLEIN = ModelSpec(
    key="flux2-klein",
    adapter="flow_factory.models.flux.flux2_klein.Flux2KleinAdapter",
    pipeline_class="Flux2KleinPipeline",
    io=_IO,
    generation_arguments=Flux2KleinGenerationArguments,
    guidance=klein_guidance,
    size_factor=packed_size_factor,
    resolution_floor=256,
    default_lora_targets=_TARGETS,
    required_components=_COMPONENTS,
    check_fields=check_layers,
)
