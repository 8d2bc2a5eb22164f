"""HunyuanVideo 1.5 from a first frame: its latents, a mask and an image encoder's tokens; MeanFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import HunyuanVideo15ImageToVideoPipeline
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from flow_factory.samples import Media
from tests.parity.case import Case, Setting, video_frames
from tests.parity.hunyuan_video15 import (
    IMAGE_WIDTH,
    LENGTH,
    WRAPPED,
    autoencode,
    load_comfyui,
    load_lora,
    parts,
    prepare,
)
from tests.parity.media import picture, pictures
from tests.parity.parts import seeded

# The pipeline takes the size from the picture; for the network's `target_size` of 39, all of these lead to (32, 48).
FIRST = tuple({"first_frame": (picture(i, size),)} for i, size in enumerate([(32, 48), (24, 40), (62, 100)]))


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The only row's picture."""
    (media,) = rows
    return {"image": pictures(media)[0]}


def image_parts(guider: dict[str, Any] | None = None, **transformer: Any) -> dict[str, Any]:
    """With an image encoder of four tokens."""
    config = SiglipVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return {
        **parts(guider, **transformer),
        "image_encoder": SiglipVisionModel(config),
        "feature_extractor": SiglipImageProcessor(size={"height": 16, "width": 16}),
    }


def case(variant: str, settings: tuple[Setting, Setting], **made: Any) -> Case:
    """A case; `made` as in `image_parts`."""
    return Case(
        key="hunyuanvideo-1.5-i2v",
        variant=variant,
        build=seeded(lambda: HunyuanVideo15ImageToVideoPipeline(**image_parts(**made))),
        settings=settings,
        generation={"num_frames": 5, "max_sequence_length": LENGTH},
        call={"num_frames": 5},
        prepare=prepare,
        prompts=("red dot", 'blue "bar"', "star"),
        negatives=(None, "blur", 'no "text"'),
        media=FIRST,
        media_call=media_call,
        alone=True,
        output=video_frames,
        autoencode=autoencode,
        load_lora=load_lora,
        load_comfyui=load_comfyui,
        wrapped=WRAPPED,
    )


INERT = frozenset({"negative_prompt"})

CASES = [
    case("", (Setting("unguided", 1.0, inert=INERT), Setting("guided", 6.0))),
    # A guider with everything it has: of four steps it guides the second and the third.
    case(
        "meanflow",
        (Setting("unguided", 0.0, inert=INERT), Setting("guided", 2.0)),
        use_meanflow=True,
        guider={"use_original_formulation": True, "guidance_rescale": 0.6, "start": 0.3, "stop": 0.8},
    ),
]
