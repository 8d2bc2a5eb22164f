"""MiniMax-H3 from a first frame, a last frame or both to a video with its sound (`minimax-h3-fl2va`)."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3ResizeStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3KeyframeVaeEncoderStep,
)

from flow_factory.errors import InputError
from flow_factory.models.audio_video import AUDIO, VIDEO
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.images import to_pil
from flow_factory.models.minimax_h3.base import GIVEN, SAVE_VIDEO, MiniMaxH3Adapter
from flow_factory.models.minimax_h3.conditions import Conditioning, PackedText
from flow_factory.models.minimax_h3.layout import Built, keyframe_layout
from flow_factory.models.modular import run_blocks
from flow_factory.samples import ConditionInputs, I2AVSample


class MiniMaxH3FramesAdapter(MiniMaxH3Adapter):
    """The workflow `fl2va`: at least one of the two frames.

    The first of them is stretched to the size of the video; where there are two, the last is scaled and cropped. The
    text encoder sees both, and their latents (a sample of the posterior by a seed of the pipeline's own) go before the
    generated rows, at the times of the first and last frame.
    """

    sample_class = I2AVSample
    components = (VIDEO, AUDIO, GIVEN)
    example_call = ExampleCall(
        ("from diffusers.utils import encode_video, load_image",),
        ('image=load_image("first.png")', 'last_image=load_image("last.png")'),
        SAVE_VIDEO,
    )

    def encode_row(self, given: ConditionInputs, generation: Any) -> PackedText:
        first, last = given.images("first_frame"), given.images("last_frame")
        if (len(first), len(last)) not in ((1, 0), (0, 1), (1, 1)):
            raise InputError(
                f"{self.spec.key} takes a first_frame, a last_frame or one of each, but {len(first)} and {len(last)} "
                f"came with the prompt {given.prompt!r}."
            )
        height, width = given.size
        out = run_blocks(
            self.pipeline,
            MiniMaxH3ResizeStep(),
            MiniMaxH3FL2VATextEncoderStep(),
            MiniMaxH3KeyframeVaeEncoderStep(),
            prompt=given.prompt,
            image=to_pil(first[0]) if first else None,
            last_image=to_pil(last[0]) if last else None,
            height=height,
            width=width,
        )
        frames = zip(out["keyframe_anchors"], out["condition_latents"], strict=True)
        conditioning = tuple(Conditioning(anchor, latents) for anchor, latents in frames)
        return PackedText(out["prompt_embeds"], out["text_token_tags"], conditioning)

    def build_layout(self, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
        return keyframe_layout(self.pipeline, text, shape)
