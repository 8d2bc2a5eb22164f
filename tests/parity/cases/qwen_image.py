"""Qwen-Image: a language model's embeddings with masks, and guidance that keeps each token's norm."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.parity.case import Case, cfg_settings, packed_layout
from tests.parity.parts import media_tokens, qwen_text_config, qwen_tokenizer, seeded


def vision_language_model(width: int, tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL in small."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**qwen_text_config(width, len(tokenizer)), "rope_parameters": rope},
            vision_config={**vision, "fullatt_block_indexes": [0], "window_size": 28},
            **media_tokens(tokenizer),
        )
    )


def qwen_vae() -> AutoencoderKLQwenImage:
    """A VAE for single frames that halves the sides."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.2, 0.8, 1.0, 1.5],
    )


def parts(**transformer: Any) -> dict[str, Any]:
    """A network of two joint blocks, and what all pipelines of the family need beside it."""
    tokenizer = qwen_tokenizer()
    network = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        **transformer,
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True, shift_terminal=0.02),
        "vae": qwen_vae(),
        "text_encoder": vision_language_model(16, tokenizer),
        "tokenizer": tokenizer,
        "transformer": network,
    }


def autoencode(pipeline: QwenImagePipeline, pixels: Tensor) -> Tensor:
    """The VAE with a frame axis."""
    latents = pipeline.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
    return pipeline.vae.decode(latents).sample[:, :, 0]


# 8 projections and 4 MLP layers a block, less the last block's text stream: 2 projections and its MLP.
WRAPPED = 2 * 12 - 4

CASES = [
    Case(
        key="qwen-image",
        build=seeded(lambda: QwenImagePipeline(**parts())),
        settings=cfg_settings(4.0, argument="true_cfg_scale"),
        layout=packed_layout,
        autoencode=autoencode,
        wrapped=WRAPPED,
        uncovered=(r".*\.(img|txt)_mod\.1",),
    )
]
