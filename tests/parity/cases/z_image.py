"""Z-Image: reversed time and sign, guidance counted from 0, its truncation and normalisation."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from transformers import Qwen3Config, Qwen3Model

from tests.parity.case import Case, Setting
from tests.parity.parts import add_to_weights, autoencoder, qwen_text_config, qwen_tokenizer, seeded


def build() -> ZImagePipeline:
    """Two blocks, and one in each refiner."""
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(),
        text_encoder=Qwen3Model(Qwen3Config(**qwen_text_config(16, len(tokenizer)), head_dim=8)),
        tokenizer=tokenizer,
        transformer=transformer,
    )


CASES = [
    Case(
        key="z-image",
        build=seeded(build),
        settings=(
            Setting("unguided", 0.0, {}, {"guidance_scale": 0.0}, frozenset({"negative_prompt"})),
            Setting("guided", 2.0, {}, {"guidance_scale": 2.0}),
            Setting(
                "normalised and truncated",
                2.0,
                {"cfg_normalization": 1.0, "cfg_truncation": 0.3},
                {"guidance_scale": 2.0, "cfg_normalization": 1.0, "cfg_truncation": 0.3},
            ),
        ),
        generation={"max_sequence_length": 96},
        call={"max_sequence_length": 96},
        schedulers={"dynamic shift": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)},
        wrapped=(2 + 1 + 1) * 7,
        load_comfyui=add_to_weights(convert_z_image_transformer_checkpoint_to_diffusers),
        uncovered=(r".*\.adaLN_modulation\.\d",),
    )
]
