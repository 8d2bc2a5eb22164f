"""A style that the embedded pipeline does not know: shapes drawn as outlines, and a measure of how hollow they are.

The pipeline was trained on filled shapes only. Stored pictures in another style are therefore something to learn, and
whether they were learned can be read off the pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from flow_factory.errors import InputError
from flow_factory.rewards.abc import PointwiseRewardModel
from flow_factory.rewards.shapes_world import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_SIZE,
    SINGLE_SIZE,
    SUPERSAMPLING,
    Scene,
    parse_caption,
    place_stencils,
    shape_stencil,
)

if TYPE_CHECKING:
    from flow_factory.samples import BaseSample, ImageSample

LINE_WIDTH = 3.0
"""Width of the outline, in pixels."""
_CORE = 2  # half side, in pixels, of the square in the middle that an outlined shape leaves empty however it moves
_INSIDE = 0.9  # of the blurred mask: 1.2816 standard deviations inside the edge of a half plane
_DEVIATIONS = 1.2816


@functools.cache
def outline_stencil(shape: str, size: int) -> Image.Image:
    """Mask of a shape's outline, like `shape_stencil`: what lies within `LINE_WIDTH` pixels inside its edge."""
    stencil = shape_stencil(shape, size)
    blurred = stencil.filter(ImageFilter.GaussianBlur(LINE_WIDTH * SUPERSAMPLING / _DEVIATIONS))
    inside = blurred.point([255 if value > 255 * _INSIDE else 0 for value in range(256)])
    return ImageChops.subtract(stencil, inside)


def render_outlined(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draws a single shape as an outline: RGB, 64 x 64 pixels, antialiased, placed as `shapes_world.render` places it.

    Raises:
        ValueError: If the scene is not one shape; smaller ones and digits are hardly wider than two lines.
    """
    if scene.kind != "single" or scene.shape is None:
        raise ValueError(f"only single shapes are outlined, not a {scene.kind} scene.")
    scale = SUPERSAMPLING
    canvas = Image.new("RGB", (IMAGE_SIZE * scale, IMAGE_SIZE * scale), BACKGROUNDS[scene.background])
    outline = outline_stencil(scene.shape, SINGLE_SIZE)
    for _, x, y in place_stencils(scene, rng):
        corner = (round(x * scale - outline.width / 2), round(y * scale - outline.height / 2))
        canvas.paste(COLOURS[scene.colour], corner, outline)
    return canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)


def hollowness(image: Image.Image, scene: Scene) -> float:
    """How empty the middle of a single shape is: 0 for the shape's colour, 1 for the background's.

    The mean over the middle 4 x 4 pixels of the position between the two colours, limited to [0, 1]. Filled shapes
    have 0, outlined ones nearly 1.

    Args:
        image: RGB, 64 x 64 pixels.
        scene: What it shows.

    Raises:
        ValueError: If the scene is not one shape, or the picture has another size.
    """
    if scene.kind != "single":
        raise ValueError(f"hollowness is defined for single shapes, not for a {scene.kind} scene.")
    if image.size != (IMAGE_SIZE, IMAGE_SIZE):
        raise ValueError(f"the picture has {image.size} pixels; the shapes world has {(IMAGE_SIZE, IMAGE_SIZE)}.")
    middle = slice(IMAGE_SIZE // 2 - _CORE, IMAGE_SIZE // 2 + _CORE)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)[middle, middle]
    colour = np.array(COLOURS[scene.colour], dtype=np.float64)
    axis = np.array(BACKGROUNDS[scene.background], dtype=np.float64) - colour
    return float(np.clip((pixels - colour) @ axis / (axis @ axis), 0.0, 1.0).mean())


class Hollowness(PointwiseRewardModel):
    """How much a single shape looks like an outline, in [0, 1]; for prompts such as those of `builtin/singles`.

    Raises:
        InputError: by `score`, if a prompt does not ask for a single shape.
    """

    required_fields = ("image",)

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One number per sample."""
        values: list[float | None] = []
        for sample in samples:
            try:
                values.append(hollowness(cast("ImageSample", sample).pil, parse_caption(sample.prompt)))
            except ValueError as error:
                raise InputError(f"reward {self.name!r} (hollowness) cannot judge a prompt: {error}") from error
        return values
