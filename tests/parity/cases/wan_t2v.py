"""Wan text to video: one network, a time for each token, two experts."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from tests.parity.case import Case, Setting, cfg_settings, video_frames
from tests.parity.parts import seeded
from tests.parity.wan import BLOCKS, LAYERS, load_both, load_comfyui, parts, transformer

FIELDS: dict[str, Any] = {"num_frames": 5, "max_sequence_length": 10}

CASES = [
    Case(
        key="wan2_t2v",
        variant="2.1",
        build=seeded(lambda: WanPipeline(**parts())),
        settings=cfg_settings(5.0),
        generation=FIELDS,
        call=FIELDS,
        output=video_frames,
        schedulers={"euler": FlowMatchEulerDiscreteScheduler(shift=3.0)},
        wrapped=BLOCKS * LAYERS,
    ),
    Case(
        key="wan2_t2v",
        variant="5b",
        build=seeded(lambda: WanPipeline(**parts(residual=True), expand_timesteps=True)),
        settings=cfg_settings(5.0),
        generation=FIELDS,
        call=FIELDS,
        output=video_frames,
        size=(32, 64),
        wrapped=BLOCKS * LAYERS,
    ),
    Case(
        key="wan2_t2v",
        variant="a14b",
        build=seeded(lambda: WanPipeline(**parts(), transformer_2=transformer(), boundary_ratio=0.8)),
        settings=(
            Setting("unguided", 1.0, {}, {"guidance_scale": 1.0}, frozenset({"negative_prompt", "guidance_scale_2"})),
            Setting("once", 4.0, {"guidance_scale_2": 1.0}, {"guidance_scale": 4.0, "guidance_scale_2": 1.0}),
            Setting("guided", 4.0, {"guidance_scale_2": 3.0}, {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
        ),
        generation=FIELDS,
        call=FIELDS,
        varied={"guidance_scale_2": 6.0},
        output=video_frames,
        load_lora=load_both,
        load_comfyui=load_comfyui,
        wrapped=2 * BLOCKS * LAYERS,
        components=("transformer", "transformer_2"),
    ),
]
