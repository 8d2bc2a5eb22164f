"""MiniMax-H3 from references: pictures, videos with and without their sounds, sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)

from flow_factory.models.images import to_pil
from flow_factory.samples import Media
from tests.parity.case import Case
from tests.parity.media import clip, picture, tone
from tests.parity.minimax_h3 import FAMILY, LAYERS, SAMPLE_RATE, pipeline
from tests.parity.parts import seeded

MEDIA: tuple[Media, ...] = (
    {"image": (picture(0, (32, 48)), picture(1, (24, 16)))},
    {
        "image": (picture(2),),
        "video": (clip(3, frames=16, size=(16, 32), fps=24.0), clip(4, frames=8, size=(24, 24), fps=12.0)),
        "soundtrack": (tone(5, 0.5, SAMPLE_RATE), tone(6, 0.6, SAMPLE_RATE)),
        "audio": (tone(7, 0.4, SAMPLE_RATE),),
    },
    {"video": (clip(8, frames=24, fps=24.0),)},
)


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The only row's references: pictures, videos with the sounds that they have, sounds."""
    (media,) = rows
    tracks: dict[int, Any] = dict(enumerate(media.get("soundtrack", ())))
    references: list[Any] = [MiniMaxH3ImageReference(to_pil(item)) for item in media.get("image", ())]
    for number, video in enumerate(media.get("video", ())):
        sound = {} if number not in tracks else {"audio": tracks[number].waveform, "sample_rate": SAMPLE_RATE}
        references.append(MiniMaxH3VideoReference(video.frames, video.fps, **sound))
    references += [MiniMaxH3AudioReference(item.waveform) for item in media.get("audio", ())]
    return {"references": references}


CASES = [
    Case(
        key="minimax-h3-ref2va",
        build=seeded(lambda: pipeline("ref2va")),
        media=MEDIA,
        media_call=media_call,
        components=("transformer_ref",),
        wrapped=LAYERS,
        **FAMILY,
    )
]
