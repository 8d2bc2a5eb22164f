"""Qwen-Image-Edit-Plus: references read by the vision-language model and by the transformer, each of its own size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from transformers import Qwen2VLProcessor

from flow_factory.samples import Media
from tests.parity.case import Case, cfg_settings, packed_layout
from tests.parity.cases.qwen_image import WRAPPED, autoencode, parts
from tests.parity.media import picture, pictures
from tests.parity.parts import qwen_processor, seeded

AREAS = {"condition_image_size": 40 * 40, "vae_image_size": 48 * 48}  # the pipeline's own would take minutes


def build(**transformer: Any) -> QwenImageEditPlusPipeline:
    """Qwen-Image's parts and a processor that sees 1 to 4 tokens in a picture."""
    shared = parts(**transformer)
    processor = qwen_processor(Qwen2VLProcessor, shared["tokenizer"], (28 * 28, 56 * 56))
    return QwenImageEditPlusPipeline(**shared, processor=processor)


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The pictures of the one row."""
    (media,) = rows
    return {"image": pictures(media)}


@contextmanager
def calling() -> Iterator[None]:
    """The module's constants, as the case's fields have them."""
    module = pipeline_qwenimage_edit_plus
    former = {name.upper(): getattr(module, name.upper()) for name in AREAS}
    try:
        for name, area in AREAS.items():
            setattr(module, name.upper(), area)
        yield
    finally:
        for name, area in former.items():
            setattr(module, name, area)


def case(variant: str, sizes: Sequence[Sequence[tuple[int, int]]], **transformer: Any) -> Case:
    """A case with references of these sizes in each row."""
    return Case(
        key="qwen-image-edit-plus",
        variant=variant,
        build=seeded(lambda: build(**transformer)),
        settings=cfg_settings(4.0, argument="true_cfg_scale"),
        generation=AREAS,
        media=tuple(
            {"image": tuple(picture(10 * row + number, size) for number, size in enumerate(given))}
            for row, given in enumerate(sizes)
        ),
        media_call=media_call,
        calling=calling,
        alone=True,
        layout=packed_layout,
        autoencode=autoencode,
        wrapped=WRAPPED,
        uncovered=(r".*\.(img|txt)_mod\.1",),
    )


CASES = [
    # References of rows 0 and 2 become equal in size: where texts have one length too, they share a forward.
    case("one", [[(24, 33)], [(40, 20)], [(48, 66)]]),
    # Of checkpoints since 2511: references are modulated as data, at time 0.
    case("two", [[(24, 33), (40, 20)], [(40, 20), (24, 33)], [(24, 33), (40, 20)]], zero_cond_t=True),
]
