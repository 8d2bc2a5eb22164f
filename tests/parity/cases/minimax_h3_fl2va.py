"""MiniMax-H3 from frames: a first one, both, a last one; of other sizes than the video's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flow_factory.models.images import to_pil
from flow_factory.samples import Media
from tests.parity.case import Case
from tests.parity.media import picture
from tests.parity.minimax_h3 import FAMILY, LAYERS, pipeline
from tests.parity.parts import seeded

MEDIA = (
    {"first_frame": (picture(0, (32, 48)),)},
    {"first_frame": (picture(1, (16, 32)),), "last_frame": (picture(2, (40, 24)),)},
    {"last_frame": (picture(3, (24, 40)),)},
)


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The only row's frames."""
    (media,) = rows
    names = {"first_frame": "image", "last_frame": "last_image"}
    return {names[slot]: to_pil(items[0]) for slot, items in media.items()}


CASES = [
    Case(
        key="minimax-h3-fl2va",
        build=seeded(lambda: pipeline("fl2va")),
        media=MEDIA,
        media_call=media_call,
        wrapped=LAYERS,
        **FAMILY,
    )
]
