"""Wan from given frames: an image encoder, a pinned first frame, two experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import WanImageToVideoPipeline
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from flow_factory.hparams.models.wan import UMT5_TOKENS
from flow_factory.samples import Media
from tests.parity.case import Case, Setting, cfg_settings, video_frames
from tests.parity.media import picture, pictures
from tests.parity.parts import seeded
from tests.parity.wan import BLOCKS, CHANNELS, LAYERS, load_both, load_comfyui, parts, transformer

FIELDS: dict[str, Any] = {"num_frames": 5, "max_sequence_length": 10}
WITH_IMAGE = {**FIELDS, "max_sequence_length": UMT5_TOKENS}
FIRST = tuple({"first_frame": (picture(i, size),)} for i, size in enumerate([(32, 48), (24, 40), (48, 64)]))
BOTH = tuple({**first, "last_frame": (picture(10 + i),)} for i, first in enumerate(FIRST))
# Behind the state's channels: four of the mask, and the latents of the given frames.
BEHIND = {"in_channels": 2 * CHANNELS + 4}
PATCHES = 4 * 4 + 1


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The only row's frames."""
    (media,) = rows
    return dict(zip(("image", "last_image"), pictures(media), strict=False))


def image_parts(**network: Any) -> dict[str, Any]:
    """With an image encoder, whose second-to-last hidden state is read."""
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=16,
    )
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    reads_image = {"image_dim": 16, "added_kv_proj_dim": 24}
    return {
        **parts(**BEHIND, **reads_image, **network),
        "image_encoder": CLIPVisionModel(config),
        "image_processor": processor,
    }


CASES = [
    Case(
        key="wan2_i2v",
        variant="2.1",
        build=seeded(lambda: WanImageToVideoPipeline(**image_parts())),
        settings=cfg_settings(5.0),
        generation=WITH_IMAGE,
        call=WITH_IMAGE,
        media=FIRST,
        media_call=media_call,
        alone=True,
        output=video_frames,
        wrapped=BLOCKS * (LAYERS + 2),
        uncovered=(r"condition_embedder\.image_embedder\..*",),
    ),
    Case(
        key="wan2_i2v",
        variant="flf2v",
        build=seeded(lambda: WanImageToVideoPipeline(**image_parts(pos_embed_seq_len=2 * PATCHES))),
        settings=cfg_settings(5.0),
        generation=WITH_IMAGE,
        call=WITH_IMAGE,
        media=BOTH,
        media_call=media_call,
        alone=True,
        output=video_frames,
        wrapped=BLOCKS * (LAYERS + 2),
        uncovered=(r"condition_embedder\.image_embedder\..*",),
    ),
    Case(
        key="wan2_i2v",
        variant="5b",
        build=seeded(lambda: WanImageToVideoPipeline(**parts(residual=True), expand_timesteps=True)),
        settings=cfg_settings(5.0),
        generation=FIELDS,
        call=FIELDS,
        size=(32, 64),
        media=FIRST,
        media_call=media_call,
        alone=True,
        output=video_frames,
        wrapped=BLOCKS * LAYERS,
    ),
    Case(
        key="wan2_i2v",
        variant="a14b",
        build=seeded(
            lambda: WanImageToVideoPipeline(**parts(**BEHIND), transformer_2=transformer(**BEHIND), boundary_ratio=0.8)
        ),
        settings=(
            Setting("unguided", 1.0, {}, {"guidance_scale": 1.0}, frozenset({"negative_prompt", "guidance_scale_2"})),
            Setting("guided", 4.0, {"guidance_scale_2": 3.0}, {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
        ),
        generation=FIELDS,
        call=FIELDS,
        varied={"guidance_scale_2": 6.0},
        # The last frame is optional; row 1, whose inputs are perturbed, has one.
        media=(FIRST[0], BOTH[1], FIRST[2]),
        media_call=media_call,
        alone=True,
        output=video_frames,
        load_lora=load_both,
        load_comfyui=load_comfyui,
        wrapped=2 * BLOCKS * LAYERS,
        components=("transformer", "transformer_2"),
    ),
]
