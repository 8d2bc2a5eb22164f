"""MiniMax-H3 from a text to a video with its sound (`minimax-h3-t2va`)."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3TextEncoderStep

from flow_factory.errors import InputError
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.minimax_h3.base import SAVE_VIDEO, MiniMaxH3Adapter
from flow_factory.models.minimax_h3.conditions import PackedText
from flow_factory.models.minimax_h3.layout import Built, keyframe_layout
from flow_factory.models.modular import run_blocks
from flow_factory.samples import ConditionInputs


class MiniMaxH3TextAdapter(MiniMaxH3Adapter):
    """The workflow `t2va`. The pipeline fails on an empty text, which has no tokens; here it is an error."""

    example_call = ExampleCall(("from diffusers.utils import encode_video",), (), SAVE_VIDEO)

    def encode_row(self, given: ConditionInputs, generation: Any) -> PackedText:
        if not given.prompt:
            raise InputError(f"{self.spec.key} cannot take an empty prompt, which has no tokens; write one.")
        out = run_blocks(self.pipeline, MiniMaxH3TextEncoderStep(), prompt=given.prompt)
        return PackedText(out["prompt_embeds"], out["text_token_tags"])

    def build_layout(self, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
        return keyframe_layout(self.pipeline, text, shape)
