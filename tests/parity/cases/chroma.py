"""Chroma: FLUX.1's blocks with a text mask and real guidance."""

from __future__ import annotations

from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from tests.models.tiny_pipelines import t5_tokenizer
from tests.parity.case import Case, cfg_settings, packed_layout
from tests.parity.parts import autoencoder, seeded, t5_encoder


def build() -> ChromaPipeline:
    """Two joint and two single-stream blocks."""
    tokens = t5_tokenizer()
    transformer = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=t5_encoder(24, len(tokens)),
        tokenizer=tokens,
        transformer=transformer,
    )


CASES = [
    Case(
        key="chroma",
        build=seeded(build),
        settings=cfg_settings(3.0),
        generation={"max_sequence_length": 12},
        call={"max_sequence_length": 12},
        layout=packed_layout,
        wrapped=2 * (8 + 4) + 2 * (3 + 2),
        uncovered=(r"distilled_guidance_layer\..*",),
    )
]
