"""Lumina-Image 2.0: reversed time and sign, guidance with norms kept and truncated, its quirk in the shift."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from transformers import Gemma2Config, Gemma2Model

from tests.parity.case import Case, Setting
from tests.parity.parts import autoencoder, qwen_text_config, qwen_tokenizer, seeded


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
        wrapped=(2 + 1 + 1) * 7,
    )
]
