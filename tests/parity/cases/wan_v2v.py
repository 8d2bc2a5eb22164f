"""Wan video to video: a late start, from a noised video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, WanVideoToVideoPipeline
from torch import Tensor

from flow_factory.models.videos import to_pil_frames
from flow_factory.samples import Media, Video
from tests.parity.case import Case, cfg_settings, video_frames
from tests.parity.media import clip
from tests.parity.parts import seeded
from tests.parity.wan import BLOCKS, LAYERS, parts

FRAMES, STRENGTH = 5, 0.75
CALL: dict[str, Any] = {"max_sequence_length": 10, "strength": STRENGTH}
CLIPS = [clip(0), clip(1, frames=7), clip(2, size=(24, 40))]


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The frames that the adapter takes of each video."""
    videos = [item for media in rows for items in media.values() for item in items if isinstance(item, Video)]
    return {"video": [to_pil_frames(video.frames[:FRAMES]) for video in videos]}


def grid(scheduler: Any) -> tuple[Tensor, Tensor]:
    """What is left of the scheduler's grid."""
    steps = len(scheduler.timesteps)
    start = steps - int(steps * STRENGTH)
    return scheduler.sigmas[start:], scheduler.timesteps[start:]


CASES = [
    Case(
        key="wan2_v2v",
        build=seeded(lambda: WanVideoToVideoPipeline(**parts())),
        settings=cfg_settings(5.0),
        generation={"num_frames": FRAMES, **CALL},
        call=CALL,
        varied={"strength": 1.0},
        media=tuple({"video": (video,)} for video in CLIPS),
        media_call=media_call,
        output=video_frames,
        schedulers={"euler": FlowMatchEulerDiscreteScheduler(shift=3.0)},
        grid=grid,
        grid_steps=(2, 4, 10),
        wrapped=BLOCKS * LAYERS,
    )
]
