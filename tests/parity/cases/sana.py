"""SANA: a deterministic autoencoder, DPM-Solver++ on flow sigmas, an instruction before prompts."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model

from tests.parity.case import Case, Setting
from tests.parity.parts import qwen_text_config, qwen_tokenizer, seeded


def build() -> SanaPipeline:
    """Two blocks; an autoencoder that halves the sides twice."""
    tokenizer = qwen_tokenizer()
    blocks: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            "block_out_channels": (8, 8, 16),
            "layers_per_block": (1, 1, 1),
            "qkv_multiscales": ((), (), (5,)),
        }.items()
    }
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        patch_size=1,
        timestep_scale=0.5,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(**qwen_text_config(16, len(tokenizer)), head_dim=8, sliding_window=64)),
        vae=AutoencoderDC(latent_channels=4, attention_head_dim=4, scaling_factor=0.5, **blocks),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
        ),
    )


PLAIN: dict[str, Any] = {"use_resolution_binning": False, "complex_human_instruction": None}
UNGUIDED = frozenset({"negative_prompt"})
CASES = [
    Case(
        key="sana",
        build=seeded(build),
        settings=(
            Setting("unguided", 1.0, {}, {"guidance_scale": 1.0}, UNGUIDED),
            Setting("guided", 4.5, {}, {"guidance_scale": 4.5}),
        ),
        generation={"max_sequence_length": 12, "enhance_prompts": False},
        call={"max_sequence_length": 12, **PLAIN},
        schedulers={"euler": FlowMatchEulerDiscreteScheduler(shift=3.0)},
        size=(32, 64),
        wrapped=2 * 8,
        autoencode=lambda pipeline, pixels: _autoencode(pipeline, pixels),
        deterministic_encoders=frozenset({"latent"}),
    ),
    Case(
        key="sana",
        variant="instructed",
        build=seeded(build),
        settings=(Setting("guided", 4.5, {}, {"guidance_scale": 4.5}),),
        generation={"max_sequence_length": 12},
        call={"max_sequence_length": 12, "use_resolution_binning": False},
        size=(32, 64),
        wrapped=2 * 8,
        autoencode=lambda pipeline, pixels: _autoencode(pipeline, pixels),
        deterministic_encoders=frozenset({"latent"}),
    ),
]


def _autoencode(pipeline: SanaPipeline, pixels: Tensor) -> Tensor:
    return pipeline.vae.decode(pipeline.vae.encode(pixels).latent).sample
