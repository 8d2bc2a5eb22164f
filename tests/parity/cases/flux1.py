"""FLUX.1: packed latents, guidance as an input, true CFG when asked; with (dev) and without (schnell) an embedding."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
)

from tests.models.tiny_pipelines import clip_tokenizer, t5_tokenizer
from tests.parity.case import Case, Setting, packed_layout
from tests.parity.parts import autoencoder, clip_text_model, seeded, t5_encoder

SETTINGS = (
    Setting("embedded", 2.0, {}, {"guidance_scale": 2.0}, frozenset({"negative_prompt"})),
    Setting("true CFG", 2.0, {"true_cfg_scale": 3.0}, {"guidance_scale": 2.0, "true_cfg_scale": 3.0}),
)


def unipc() -> UniPCMultistepScheduler:
    """A scheduler that can make its own sigmas."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, use_dynamic_shifting=True)


def flux1_parts(guidance_embeds: bool, scheduler: Any = None) -> dict[str, Any]:
    """Two joint and two single-stream blocks, and what a pipeline of the family needs beside them."""
    clip_tokens, t5_tokens = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return {
        "scheduler": scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": autoencoder(),
        "text_encoder": clip_text_model(16, len(clip_tokens)),
        "tokenizer": clip_tokens,
        "text_encoder_2": t5_encoder(24, len(t5_tokens)),
        "tokenizer_2": t5_tokens,
        "transformer": transformer,
    }


CASES = [
    Case(
        key="flux1",
        variant="dev",
        build=seeded(lambda: FluxPipeline(**flux1_parts(guidance_embeds=True))),
        settings=SETTINGS,
        generation={"max_sequence_length": 10},
        call={"max_sequence_length": 10},
        layout=packed_layout,
        schedulers={"unipc": unipc()},
        wrapped=2 * (8 + 4) + 2 * (3 + 2),
    ),
    Case(
        key="flux1",
        variant="schnell",
        build=seeded(lambda: FluxPipeline(**flux1_parts(False, FlowMatchEulerDiscreteScheduler(shift=1.0)))),
        settings=(
            Setting("unguided", 0.0, {}, {"guidance_scale": 0.0}, frozenset({"negative_prompt", "embedded guidance"})),
            Setting(
                "true CFG",
                0.0,
                {"true_cfg_scale": 3.0},
                {"guidance_scale": 0.0, "true_cfg_scale": 3.0},
                frozenset({"embedded guidance"}),
            ),
        ),
        generation={"max_sequence_length": 10},
        call={"max_sequence_length": 10},
        layout=packed_layout,
        wrapped=2 * (8 + 4) + 2 * (3 + 2),
    ),
]
