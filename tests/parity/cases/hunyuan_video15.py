"""HunyuanVideo 1.5 text to video: two text encoders, and guidance by a component."""

from __future__ import annotations

from diffusers import HunyuanVideo15Pipeline

from tests.parity.case import Case, Setting, video_frames
from tests.parity.hunyuan_video15 import LENGTH, WRAPPED, autoencode, load_comfyui, load_lora, parts, prepare
from tests.parity.parts import seeded

CASES = [
    Case(
        key="hunyuanvideo-1.5",
        build=seeded(lambda: HunyuanVideo15Pipeline(**parts())),
        settings=(
            Setting("unguided", 1.0, inert=frozenset({"negative_prompt"})),
            Setting("guided", 6.0),
        ),
        generation={"num_frames": 5, "max_sequence_length": LENGTH},
        call={"num_frames": 5},
        prepare=prepare,
        varied={"max_sequence_length": 4},
        prompts=("red dot", 'blue "bar"', "star"),
        negatives=(None, "blur", 'no "text"'),
        output=video_frames,
        autoencode=autoencode,
        load_lora=load_lora,
        load_comfyui=load_comfyui,
        wrapped=WRAPPED,
    ),
]
