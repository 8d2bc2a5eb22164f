"""Parts of tiny MiniMax-H3 pipelines, and their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor

from flow_factory.samples import LatentState
from tests.parity.case import Setting, video_with_sound
from tests.parity.parts import media_tokens, qwen_processor, qwen_text_config, qwen_tokenizer

BLOCKS, REFINER_BLOCKS = 2, 1
LAYERS = (BLOCKS + REFINER_BLOCKS) * (4 + 2)
"""Linear layers of blocks of either kind: self-attention, and an MLP whose gate is fused with its input."""
HOP = 8
SAMPLE_RATE = 40 * HOP
"""The sound has 40 latents a second."""
WIDTH, CHANNELS, AUDIO_CHANNELS = 16, 4, 4

# The pipeline reads the 50th layer of its text encoder, behind which there must be another: seconds for each plan.
setattr(MiniMaxH3ModularPipeline, "text_encoder_layer", property(lambda self: 1))  # noqa: B010


def vae() -> AutoencoderKLMiniMaxH3:
    """17 frames in 5 latent ones, as the checkpoint has it; 8 x 8 pixels a latent."""
    return AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(4, 4, 4),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2),
        temporal_downsample_factors=(1, 2, 2),
        norm_num_groups=2,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=16,
        decoder_num_register_tokens=1,
        latents_mean=(0.1, -0.2, 0.0, 0.3),
        latents_std=(1.2, 0.8, 1.0, 1.5),
    )


def audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    """8 samples a latent."""
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        encoder_rates=(2, 4),
        latent_dim=8,
        latent_channels=AUDIO_CHANNELS,
        num_attention_heads=1,
        decoder_dim=8,
        decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        sampling_rate=SAMPLE_RATE,
        latents_mean=[0.1, -0.1, 0.0, 0.2],
        latents_std=[0.9, 1.1, 1.0, 1.3],
    )


def transformer() -> MiniMaxH3Transformer3DModel:
    """Two blocks, and one that refines texts."""
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=BLOCKS,
        num_refiner_layers=REFINER_BLOCKS,
        ffn_dim=32,
        in_channels=CHANNELS,
        audio_in_channels=AUDIO_CHANNELS,
        text_dim=WIDTH,
        freq_dim=32,
        time_embed_hidden_dim=24,
        time_embed_dim=24,
        rope_freq_dim=2,
    )


def text_encoder(tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    """Two layers, of which the first is read."""
    text = {
        **qwen_text_config(WIDTH, len(tokenizer)),
        "intermediate_size": 16,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **media_tokens(tokenizer))
    return Qwen3VLForConditionalGeneration(config)


def pipeline(workflow: str) -> MiniMaxH3ModularPipeline:
    """The pipeline of one workflow."""
    tokenizer = qwen_tokenizer()
    sizes = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    processor = qwen_processor(Qwen3VLProcessor, tokenizer, (64, 32 * 32), **sizes)
    processor.video_processor = Qwen3VLVideoProcessor(
        size={"shortest_edge": 128, "longest_edge": 2048}, cap_pixels_per_frame=False, **sizes
    )
    made = MiniMaxH3ModularPipeline(blocks=MiniMaxH3Blocks().get_workflow(workflow))
    network = "transformer_ref" if workflow == "ref2va" else "transformer"
    made.update_components(
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=processor,
        vae=vae(),
        audio_vae=audio_vae(),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **{network: transformer()},
    )
    if workflow == "ref2va":
        # Sizes of references, of which the checkpoint's are 768 and 2048 pixels.
        made.update_components(canvas_short_edge=16, canvas_max_pixels=16 * 32, reference_image_short_edge=16)
    return made


def call(made: Any, *, prompt: list[str], generator: list[Any], output_type: str, **arguments: Any) -> Any:
    """One row, which is all that a call takes; it always decodes, and latents are left in its state."""
    (text,), (own,) = prompt, generator
    state = made(prompt=text, generator=own, output_type="pil", **arguments)
    if output_type == "latent":
        return SimpleNamespace(frames=state.get("latents"), audio=state.get("audio_latents")[None])
    return SimpleNamespace(frames=state.get("videos"), audio=state.get("audio"))


def autoencode(made: Any, pixels: Tensor) -> Tensor:
    """The video VAE alone, which reads pixels normalised as ImageNet's are."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in (made.pixel_mean, made.pixel_std))
    decoded = made.vae.decode(made.vae.encode((pixels - mean) / std).latent_dist.mode()).sample
    return (decoded * std + mean).clamp(0, 1)  # as the pipeline does, before it makes bytes


def autoencode_sound(made: Any, waveforms: Tensor) -> Tensor:
    """The audio VAE alone, a channel at a time."""
    channels = [
        made.audio_vae.decode(made.audio_vae.encode(x).latent_dist.mode()).sample for x in waveforms.split(1, 1)
    ]
    return torch.cat(channels, dim=1)


def layout(made: Any, state: LatentState) -> dict[str, Tensor]:
    """As the pipeline's decoders take them."""
    return {name: state[name] for name in ("video", "audio")}


FAMILY: dict[str, Any] = {
    "settings": (Setting("distilled", 1.0, inert=frozenset({"negative_prompt"})),),
    "generation": {"num_frames": 124},
    "call": {"num_frames": 124},
    "size": (16, 32),
    "grid_steps": (2, 4, 10),
    "takes_negative": False,
    "alone": True,
    "invoke": call,
    "layout": layout,
    "output": video_with_sound,
    "autoencode": autoencode,
    "autoencode_sound": autoencode_sound,
    "deterministic_encoders": frozenset({"audio"}),
    "euler": lambda scheduler: scheduler,  # its steps are Euler's
    "uncovered": (r".*\.adaln_proj\.linear",),
}
"""Fields of cases that all keys have in common."""
