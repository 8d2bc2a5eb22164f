"""LTX-2 from a first frame, to video with sound: a pinned frame, with a time of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import LTX2ImageToVideoPipeline

from flow_factory.samples import Media
from tests.parity.case import Case, video_with_sound
from tests.parity.cases.ltx2_t2av import BLIND, FIELDS, GUIDED, RESCALES, setting
from tests.parity.ltx2 import BLOCKS, GATES, LAYERS, later_parts, layout
from tests.parity.media import picture, pictures
from tests.parity.parts import seeded

SIZE = (32, 64)
PICTURES = [picture(i, size) for i, size in enumerate([(32, 48), SIZE, (40, 24)])]


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The only row's picture: the pipeline does not compress a list of them."""
    (media,) = rows
    return {"image": pictures(media)[0]}


CASES = [
    Case(
        key="ltx2_i2av",
        build=seeded(lambda: LTX2ImageToVideoPipeline(**later_parts())),
        settings=(
            setting("unguided, compressed", 1.0, RESCALES | BLIND | {"negative_prompt"}, image_crf=33),
            setting("guided", 3.0, BLIND, image_crf=0, **GUIDED.generation),
        ),
        generation=FIELDS,
        call=FIELDS,
        varied={"frame_rate": 16.0, "image_crf": 45, "use_cross_timestep": False},
        size=SIZE,
        grid_steps=(2, 4, 10),  # of one step the terminal shift makes no number, and the pipeline fails
        media=tuple({"image": (image,)} for image in PICTURES),
        media_call=media_call,
        alone=True,
        layout=layout,
        output=video_with_sound,
        wrapped=BLOCKS * (LAYERS + GATES),
    )
]
