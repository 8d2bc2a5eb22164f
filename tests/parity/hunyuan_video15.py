"""Parts of tiny HunyuanVideo 1.5 pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.loaders.single_file_utils import convert_hunyuan_video_transformer_to_diffusers
from diffusers.models.transformers import transformer_hunyuan_video15
from torch import Tensor
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, T5Config, T5EncoderModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

from tests.parity.case import Setting
from tests.parity.parts import add_to_weights, qwen_text_config, qwen_tokenizer

# 8 projections and 4 MLP layers a block, less the last block's text stream: 2 projections and its MLP. The block that
# refines the prompt's tokens has 4 projections and 2 MLP layers.
WRAPPED = 2 * 12 - 4 + 6
IMAGE_WIDTH = 12
LENGTH = 24
"""`max_sequence_length` of the cases."""


class NarrowProjection(transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection):
    """The projection of quoted texts with 32 hidden units.

    The network's code has 2048 of them, which no configuration changes: 19 in 20 of a tiny network's parameters, and
    most of its time. Both sides of every comparison are loaded with this one.
    """

    def __init__(self, in_features: int, hidden_size: int, out_features: int) -> None:
        super().__init__(in_features, 32, out_features)


transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection = NarrowProjection


def tokenizer() -> Any:
    """One token per byte. The template has as many tokens in front of the prompt as the pipeline cuts off."""
    made = qwen_tokenizer(padding_side="right")
    made.chat_template = (
        "{{ '<|im_start|>' * 108 }}{% for message in messages if message['role'] == 'user' %}"
        "{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    return made


def text_encoder(vocabulary: int) -> Qwen2_5_VLTextModel:
    """Three layers, so that the third-last hidden state is not the embedding."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    own = {"num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 1, "rope_parameters": rope}
    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**{**qwen_text_config(16, vocabulary), **own}))


def parts(guider: dict[str, Any] | None = None, **transformer: Any) -> dict[str, Any]:
    """What both pipelines need."""
    prompts, glyphs = tokenizer(), ByT5Tokenizer()
    return {
        "tokenizer": prompts,
        "text_encoder": text_encoder(len(prompts)),
        "tokenizer_2": glyphs,
        "text_encoder_2": T5EncoderModel(
            T5Config(vocab_size=len(glyphs), d_model=20, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(4, 4, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            scaling_factor=1.3,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": ClassifierFreeGuidance(**(guider or {"guidance_scale": 6.0})),
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=20,
            image_embed_dim=IMAGE_WIDTH,
            rope_axes_dim=(4, 6, 6),
            target_size=39,
            **transformer,
        ),
    }


def prepare(pipeline: Any, setting: Setting) -> None:
    """The guider of a setting, and the length of prompts.

    Tokens that nothing reads are left out, too, since they take most of the time: they only fill up texts to 256 bytes,
    and stand for a picture where there is none. One test of this model's own has them.
    """
    pipeline.vae.enable_slicing()  # it fails on a batch
    pipeline.guider = type(pipeline.guider).from_config(pipeline.guider.config, guidance_scale=setting.scale)
    pipeline.tokenizer_max_length = LENGTH
    pipeline.tokenizer_2_max_length = 20
    pipeline.vision_num_semantic_tokens = 1


def autoencode(pipeline: Any, pixels: Tensor) -> Tensor:
    """The VAE alone, row by row."""
    pipeline.vae.enable_slicing()
    return pipeline.vae.decode(pipeline.vae.encode(pixels).latent_dist.mode()).sample


def from_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diffusers' converter of HunyuanVideo's checkpoints, whose blocks are those of 1.5, from ComfyUI's names.

    The published names have an underscore where ComfyUI has a point; it reads a LoRA under both.
    """
    published = [
        ("_attn.qkv.", "_attn_qkv."),
        ("_attn.proj.", "_attn_proj."),
        ("mlp.0.", "mlp.fc1."),
        ("mlp.2.", "mlp.fc2."),
    ]
    renamed: dict[str, Tensor] = {}
    for name, value in weights.items():
        for ours, theirs in published:
            name = name.replace(ours, theirs)
        renamed[name] = value
    return convert_hunyuan_video_transformer_to_diffusers(renamed)


load_comfyui = add_to_weights(from_checkpoint)


def load_lora(pipeline: Any, file: Path) -> None:
    """These pipelines have no `load_lora_weights`; their network has a method of its own."""
    pipeline.transformer.load_lora_adapter(str(file.parent), weight_name=file.name, prefix="transformer")
