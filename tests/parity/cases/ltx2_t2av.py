"""LTX-2 text to video with sound: three kinds of guidance, each with weights for either."""

from __future__ import annotations

from typing import Any

from diffusers import LTX2Pipeline

from tests.parity.case import Case, Setting, video_with_sound
from tests.parity.ltx2 import BLOCKS, GATES, LAYERS, later_parts, layout, parts
from tests.parity.parts import seeded

OFF: dict[str, Any] = {
    "audio_guidance_scale": None,
    "stg_scale": 0.0,
    "audio_stg_scale": None,
    "modality_scale": 1.0,
    "audio_modality_scale": None,
    "spatio_temporal_guidance_blocks": [1],
}
# 8 moments of sound, at 16 frames a second too. With 5, the last bits of a gate's sigmoid depend on where in a batch a
# row lies (5 x 2 heads do not fill a vector), so that a first ratio is not exactly 1.
FIELDS: dict[str, Any] = {"num_frames": 5, "frame_rate": 15.0, "max_sequence_length": 16, **OFF}
BLIND = frozenset({"spatio_temporal_guidance_blocks"})
"""What matters with perturbed attention alone."""
RESCALES = frozenset({"guidance_rescale", "audio_guidance_rescale"})


def setting(name: str, scale: float, inert: frozenset[str] = frozenset(), **fields: Any) -> Setting:
    """Fields have the names of the pipeline's arguments."""
    return Setting(name, scale, fields, {"guidance_scale": scale, **fields}, inert)


UNGUIDED = setting("unguided", 1.0, RESCALES | BLIND | {"negative_prompt"})
GUIDED = setting("guided", 3.0, BLIND, audio_guidance_scale=5.0, audio_guidance_rescale=0.5)
ALL = setting(
    "all", 3.0, stg_scale=1.5, audio_stg_scale=1.0, modality_scale=2.0, audio_modality_scale=3.0, guidance_rescale=0.4
)
INPUTS = {"frame_rate": 16.0, "motion_speed": 0.5, "audio_guidance_scale": 9.0}
MODALITY = {"modality_scale": 4.0, "audio_modality_scale": 5.0}
RESCALED = {"guidance_rescale": 0.1, "audio_guidance_rescale": 0.2}
STG = {"stg_scale": 2.0, "audio_stg_scale": 2.5, "spatio_temporal_guidance_blocks": [0]}

CASES = [
    Case(
        key="ltx2_t2av",
        variant="2.0",
        build=seeded(lambda: LTX2Pipeline(**parts())),
        settings=(UNGUIDED, GUIDED),
        generation=FIELDS,
        call=FIELDS,
        varied={**INPUTS, **MODALITY, **RESCALED},
        size=(32, 64),
        layout=layout,
        output=video_with_sound,
        wrapped=BLOCKS * LAYERS,
    ),
    Case(
        key="ltx2_t2av",
        variant="2.3",
        build=seeded(lambda: LTX2Pipeline(**later_parts())),
        settings=(ALL, GUIDED),
        generation=FIELDS,
        call=FIELDS,
        varied={"frame_rate": 16.0, **STG},  # the others as above
        size=(32, 64),
        layout=layout,
        output=video_with_sound,
        wrapped=BLOCKS * (LAYERS + GATES),
    ),
]
