"""Parts of tiny Wan pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from tests.models.tiny_pipelines import t5_tokenizer

BLOCKS = 2
LAYERS = 4 + 4 + 2
"""Linear layers of a block: self-attention, cross-attention, MLP."""
CHANNELS = 4


def scheduler() -> UniPCMultistepScheduler:
    """As the checkpoints have it."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def vae(residual: bool = False) -> AutoencoderKLWan:
    """Four frames and 8 x 8 pixels a latent; that of the 5B checkpoint (residual) has 16 x 16."""
    patches: dict[str, Any] = {}
    if residual:
        patches = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8}
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.2, 0.8, 1.0, 1.5],
        scale_factor_spatial=16 if residual else 8,
        **patches,
    )


def transformer(**config: Any) -> WanTransformer3DModel:
    """Two blocks."""
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=BLOCKS,
        rope_max_seq_len=32,
        **{"in_channels": CHANNELS, "out_channels": CHANNELS, **config},
    )


def parts(residual: bool = False, **network: Any) -> dict[str, Any]:
    """What all pipelines of the family need."""
    tokenizer = t5_tokenizer()
    text = UMT5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(text),
        "vae": vae(residual),
        "scheduler": scheduler(),
        "transformer": transformer(**network),
    }


def load_comfyui(pipeline: Any, files: Mapping[str, Path]) -> None:
    """Loads the LoRAs of two experts in ComfyUI's names."""
    for model, file in files.items():
        second = {"load_into_transformer_2": True} if model == "low_noise" else {}
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, **second)


def load_both(pipeline: Any, file: Path) -> None:
    """Loads a LoRA of two experts."""
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    pipeline.transformer_2.load_lora_adapter(str(file.parent), weight_name=file.name, prefix="transformer_2")
