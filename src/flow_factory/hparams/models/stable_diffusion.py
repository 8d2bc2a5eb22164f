"""Stable Diffusion 1.x, 2.x and XL: U-Nets with epsilon or v prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flow_factory.hparams.models.folder import component_config, vae_factor
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec
from flow_factory.hparams.models.targets import ATTENTION, FEED_FORWARD
from flow_factory.hparams.types import Fraction, option


@dataclass
class StableDiffusionGenerationArguments(GenerationArguments):
    """Model-specific fields of `train:` and `eval:` for sd1-5 and sdxl."""

    guidance_rescale: Fraction = option(
        0.0, "Share of a guided prediction that is rescaled to the unguided one's deviation (arXiv 2305.08891)."
    )


def size_factor(folder: Path | None) -> int:
    """VAE downsampling x that of the U-Net; 64 for Stable Diffusion 1.x and 2.x."""
    blocks = component_config(folder, "unet").get("block_out_channels", [320, 640, 1280, 1280])
    return vae_factor(folder) * 2 ** (len(blocks) - 1)


def xl_size_factor(folder: Path | None) -> int:
    """VAE downsampling x that of the U-Net; 32 for Stable Diffusion XL."""
    blocks = component_config(folder, "unet").get("block_out_channels", [320, 640, 1280])
    return vae_factor(folder) * 2 ** (len(blocks) - 1)


# Self- and cross-attention and the MLP of every transformer block.
_TARGETS = ATTENTION + FEED_FORWARD
_DYNAMICS = ("DDIM-eta", "Flow-SDE", "Dance-SDE", "CPS", "ODE")

SD1_5 = ModelSpec(
    key="sd1-5",
    adapter="flow_factory.models.stable_diffusion.sd1_5.SD1_5Adapter",
    pipeline_class="StableDiffusionPipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=StableDiffusionGenerationArguments,
    size_factor=size_factor,
    resolution_floor=384,
    default_lora_targets=_TARGETS,
    required_components=("unet", "vae", "scheduler", "text_encoder", "tokenizer"),
    trainable_components=("unet",),
    dynamics=_DYNAMICS,
)

SDXL = ModelSpec(
    key="sdxl",
    adapter="flow_factory.models.stable_diffusion.sdxl.SDXLAdapter",
    pipeline_class="StableDiffusionXLPipeline",
    io=TEXT_TO_IMAGE,
    generation_arguments=StableDiffusionGenerationArguments,
    size_factor=xl_size_factor,
    resolution_floor=512,
    default_lora_targets=_TARGETS,
    required_components=("unet", "vae", "scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    trainable_components=("unet",),
    dynamics=_DYNAMICS,
)
