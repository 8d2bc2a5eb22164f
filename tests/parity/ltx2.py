"""Parts of tiny LTX-2 pipelines, and how their latents are laid out."""

from __future__ import annotations

import string
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from flow_factory.samples import LatentState

BLOCKS = 2
LAYERS = 2 * (4 + 4 + 4 + 2)
"""Linear layers of a block, for either stream: to itself, to the text, to the other stream, MLP."""
GATES = 2 * 3
"""One for each attention, in the checkpoints from 2.3 on."""
WIDTH, HEADS, HEAD, AUDIO_HEAD = 16, 2, 12, 8
CHANNELS, AUDIO_CHANNELS, MEL_BINS = 4, 2, 16
TEXT_LAYERS = 2


def tokenizer() -> GemmaTokenizer:
    """One token per letter, and one in front, without which an empty prompt would be no tokens."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    vocab = {token: i for i, token in enumerate((*special, "▁", *string.ascii_lowercase, *string.digits))}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=64, add_bos_token=True)


def text_encoder(vocabulary: int) -> Gemma3ForConditionalGeneration:
    """A language model of two layers, and an eye that nothing looks through."""
    text = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=64,
    )
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            boi_token_index=vocabulary - 3,
            eoi_token_index=vocabulary - 2,
            image_token_index=vocabulary - 1,
        )
    )


def vae(**config: Any) -> AutoencoderKLLTX2Video:
    """Two frames and 8 x 8 pixels a latent."""
    made = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(16,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(True,),
        upsample_factor=(2,),
        decoder_causal=False,
        **config,
    )
    made.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.0, 0.3]))
    made.latents_std.copy_(torch.tensor([1.2, 0.8, 1.0, 1.5]))
    return made


def audio_vae() -> AutoencoderKLLTX2Audio:
    """Four moments and four mel bins a latent. Statistics are kept for each element of a moment."""
    moment = AUDIO_CHANNELS * MEL_BINS // 4
    made = AutoencoderKLLTX2Audio(
        base_channels=moment, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=AUDIO_CHANNELS, mel_bins=MEL_BINS
    )
    made.latents_mean.copy_(torch.linspace(-0.3, 0.3, moment))
    made.latents_std.copy_(torch.linspace(0.8, 1.2, moment))
    return made


def vocoder() -> LTX2Vocoder:
    """Four samples a mel frame; stereo."""
    return LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )


def connectors(**config: Any) -> LTX2TextConnectors:
    """Those of 2.0, which share a projection."""
    stream = {
        "num_attention_heads": HEADS,
        "attention_head_dim": WIDTH // HEADS,
        "num_layers": 1,
        "num_learnable_registers": 4,
    }
    streams: dict[str, Any] = {f"{name}_connector_{k}": v for name in ("video", "audio") for k, v in stream.items()}
    return LTX2TextConnectors(caption_channels=WIDTH, text_proj_in_factor=TEXT_LAYERS + 1, **{**streams, **config})


def transformer(**config: Any) -> LTX2VideoTransformer3DModel:
    """Two blocks, as in 2.0."""
    return LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD,
        cross_attention_dim=HEADS * HEAD,
        vae_scale_factors=(2, 8, 8),
        audio_in_channels=AUDIO_CHANNELS * MEL_BINS // 4,
        audio_out_channels=AUDIO_CHANNELS * MEL_BINS // 4,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=AUDIO_HEAD,
        audio_cross_attention_dim=HEADS * AUDIO_HEAD,
        num_layers=BLOCKS,
        caption_channels=WIDTH,
        **config,
    )


def parts() -> dict[str, Any]:
    """What the pipelines need, as the 2.0 checkpoint has it."""
    letters = tokenizer()
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=16,
        max_image_seq_len=128,
        shift_terminal=0.1,
    )
    return {
        "scheduler": scheduler,
        "vae": vae(),
        "audio_vae": audio_vae(),
        "text_encoder": text_encoder(len(letters)),
        "tokenizer": letters,
        "connectors": connectors(),
        "transformer": transformer(),
        "vocoder": vocoder(),
    }


def later_parts() -> dict[str, Any]:
    """As the checkpoints from 2.3 on: gates, times of prompts, a projection for each stream, perturbable attention."""
    gated: dict[str, Any] = {
        f"{stream}{part}": True for stream in ("", "audio_") for part in ("gated_attn", "cross_attn_mod")
    }
    network = transformer(rope_type="split", use_prompt_embeddings=False, perturbed_attn=True, **gated)
    connected = connectors(
        rope_type="split",
        per_modality_projections=True,
        proj_bias=True,
        video_gated_attn=True,
        audio_gated_attn=True,
        video_hidden_dim=HEADS * HEAD,
        audio_hidden_dim=HEADS * AUDIO_HEAD,
        video_connector_attention_head_dim=HEAD,
        audio_connector_attention_head_dim=AUDIO_HEAD,
    )
    return {**parts(), "connectors": connected, "transformer": network}


def layout(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    """Latents as the VAEs have them, written out here once more."""
    video, audio = pipeline.vae, pipeline.audio_vae
    scale, shift = (x[:, None, None, None] for x in (video.latents_std, video.latents_mean))
    # A moment is channels, then mel bins.
    deviation, mean = (x.view(AUDIO_CHANNELS, 1, -1) for x in (audio.latents_std, audio.latents_mean))
    return {
        "video": state["video"] * scale / video.config.scaling_factor + shift,
        "audio": state["audio"] * deviation + mean,
    }
