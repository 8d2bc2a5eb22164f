"""FLUX.1 Kontext: a reference in the sequence, of a size of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import FluxKontextPipeline

from flow_factory.samples import Media
from tests.parity.case import Case, packed_layout
from tests.parity.cases.flux1 import SETTINGS, flux1_parts, unipc
from tests.parity.media import picture, pictures
from tests.parity.parts import seeded


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """One picture a row."""
    return {"image": [image for media in rows for image in pictures(media)]}


CASES = [
    Case(
        key="flux1-kontext",
        build=seeded(lambda: FluxKontextPipeline(**flux1_parts(guidance_embeds=True))),
        settings=SETTINGS,
        generation={"max_sequence_length": 10, "auto_resize": False},
        call={"max_sequence_length": 10, "_auto_resize": False},
        # 33 is no multiple of the network's 4 pixels; rows 0 and 2 go through the network together.
        media=tuple({"image": (picture(i, size),)} for i, size in enumerate([(24, 33), (32, 16), (27, 32)])),
        media_call=media_call,
        alone=True,
        layout=packed_layout,
        schedulers={"unipc": unipc()},
        wrapped=2 * (8 + 4) + 2 * (3 + 2),
    )
]
