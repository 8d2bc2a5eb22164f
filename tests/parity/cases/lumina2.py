"""Lumina-Image 2.0: reversed time and sign, guidance with norms kept and truncated, its quirk in the shift."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model

from tests.parity.case import Case, Setting
from tests.parity.parts import add_to_weights, autoencoder, qwen_text_config, qwen_tokenizer, seeded


def build() -> Lumina2Pipeline:
    """Two blocks, and one in each refiner; the pipeline takes 8 x downsampling for granted."""
    tokenizer = qwen_tokenizer()
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )
    return Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder(blocks=4),
        text_encoder=Gemma2Model(Gemma2Config(**qwen_text_config(16, len(tokenizer)), head_dim=8, sliding_window=64)),
        tokenizer=tokenizer,
    )


def from_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diffusers' converter, which splits q, k and v at the published widths only, and at the tiny network's here."""
    qkv = {name: weights.pop(name) for name in list(weights) if ".attention.qkv." in name}
    converted = convert_lumina2_to_diffusers(weights)
    for name, weight in qkv.items():
        parts = zip("qkv", weight.split([32, 16, 16]), strict=True)
        converted |= {name.replace("attention.qkv", f"attn.to_{part}"): value for part, value in parts}
    return converted


CASES = [
    Case(
        key="lumina2",
        build=seeded(build),
        settings=(
            Setting("unguided", 1.0, {}, {"guidance_scale": 1.0}, frozenset({"negative_prompt"})),
            Setting("guided", 4.0, {}, {"guidance_scale": 4.0}),
            Setting(
                "truncated",
                4.0,
                {"cfg_trunc_ratio": 0.5, "cfg_normalization": False},
                {"guidance_scale": 4.0, "cfg_trunc_ratio": 0.5, "cfg_normalization": False},
            ),
        ),
        generation={"max_sequence_length": 40, "system_prompt": "draw"},
        call={"max_sequence_length": 40, "system_prompt": "draw"},
        size=(96, 64),
        load_comfyui=add_to_weights(from_checkpoint),
        wrapped=(2 + 1 + 1) * 7,
    )
]
