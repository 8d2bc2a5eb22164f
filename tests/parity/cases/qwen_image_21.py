"""Qwen-Image 2.1: one sequence of text, references and picture, whose layout differs from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from flow_factory.models.images import to_pil
from flow_factory.samples import LatentState, Media
from tests.parity.case import Case, cfg_settings
from tests.parity.media import picture, pictures
from tests.parity.parts import media_tokens, qwen_processor, qwen_text_config, qwen_tokenizer, seeded

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def vision_language_model(width: int, tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    """Qwen3-VL in small."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**qwen_text_config(width, len(tokenizer)), "head_dim": 8, "rope_parameters": rope},
            vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **media_tokens(tokenizer),
        )
    )


def vae() -> AutoencoderKLQwenImage21:
    """Sixteen pixels to a latent, which the pipeline takes for granted; pictures have transparency."""
    return AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.2, 0.8, 1.0, 1.5],
    )


def build() -> QwenImage21Pipeline:
    """Two blocks."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=vision_language_model(16, tokenizer),
        processor=qwen_processor(Qwen3VLProcessor, tokenizer, (32 * 32, 128 * 128), patch_size=16),
        transformer=transformer,
    )


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The pictures of the one row, if it has any."""
    (media,) = rows
    return {"image": pictures(media)} if media else {}


def layout(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    """A token for each latent."""
    return {"latent": torch.einsum("bchw->bhwc", state.only).flatten(1, 2)}


def on_white(levels: Tensor) -> Tensor:
    """Levels 0 to 255 of red, green, blue and alpha, [..., 4, H, W], composited: [..., 3, H, W]."""
    colour, alpha = levels.double().split([3, 1], dim=-3)
    return 255 + (colour - 255) * alpha / 255


def output(out: Any) -> Any:
    """Latents as they are; pictures as one sees them on white."""
    if isinstance(out.images, Tensor):
        return out.images
    levels = [torch.from_numpy(np.array(image)).movedim(-1, 0) for image in out.images]
    return [to_pil(on_white(image).round().to(torch.uint8)) for image in levels]


def autoencode(pipeline: Any, pixels: Tensor) -> Tensor:
    """The VAE with a frame axis and alpha, and what one sees on white of its 8-bit picture."""
    opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1).unsqueeze(2)
    decoded = pipeline.vae.decode(pipeline.vae.encode(opaque).latent_dist.mode()).sample[:, :, 0]
    return (on_white(((decoded + 1) * 127.5).round()) / 127.5 - 1).float()


def case(variant: str, sizes: Sequence[Sequence[tuple[int, int]]]) -> Case:
    """A case with references of these sizes in each row."""
    return Case(
        key="qwen-image-2.1",
        variant=variant,
        build=seeded(build),
        settings=cfg_settings(3.0, argument="true_cfg_scale"),
        generation={"output_resolution": 48},
        call={"output_resolution": 48, "use_kv_cache": False},
        size=(64, 96),
        media=tuple(
            {"image": tuple(picture(10 * row + number, size) for number, size in enumerate(given))} if given else {}
            for row, given in enumerate(sizes)
        ),
        media_call=media_call,
        output=output,
        alone=True,
        layout=layout,
        autoencode=autoencode,
        # Attention's 4 and the gated MLP's 3.
        wrapped=2 * 7,
    )


CASES = [
    case("text", [[], [], []]),
    case("references", [[(24, 33)], [(40, 20), (24, 33)], []]),
]
