"""The embedded world: captions, pictures of them, and the rule that holds combinations out.

The pipeline that ships with the package (`assets/tiny-sd3-shapes`) was trained on nothing but pictures drawn here, so
that a reward can know exactly what a caption asks for, without a network. The grammar has three kinds of captions:

    a red circle on a white background                     one shape, 36 pixels, in the middle
    three blue squares on a black background               two to four shapes, 22 pixels, at fixed places for each count
    the number 42 in green on a gray background            one or two digits, 38 pixels high, in the middle

Everything is 64 x 64 pixels; places move by a few pixels from picture to picture. Needs numpy and PIL only.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

IMAGE_SIZE = 64
"""Height and width of every picture, in pixels."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (245, 245, 245),
    "black": (15, 15, 20),
    "gray": (150, 150, 150),
    "pink": (255, 165, 195),
}
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 45),
    "green": (40, 160, 70),
    "blue": (45, 85, 220),
    "yellow": (240, 205, 45),
    "purple": (125, 30, 185),
    "cyan": (50, 190, 215),
}
PLURALS: dict[str, str] = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "diamond": "diamonds",
    "star": "stars",
    "cross": "crosses",
}
SHAPES: tuple[str, ...] = tuple(PLURALS)
COUNT_WORDS: dict[str, int] = {"a": 1, "two": 2, "three": 3, "four": 4}
MAX_COUNT = max(COUNT_WORDS.values())
MAX_NUMBER = 99

Kind = Literal["single", "count", "number"]
Split = Literal["train", "test"]

# Centres (x, y) in pixels. Counts share slots, so that "four" is not four unrelated things to learn.
SLOTS: dict[int, tuple[tuple[float, float], ...]] = {
    1: ((32, 32),),
    2: ((17, 32), (47, 32)),
    3: ((32, 17), (17, 47), (47, 47)),
    4: ((17, 17), (47, 17), (17, 47), (47, 47)),
}
SINGLE_SIZE = 36
MULTI_SIZE = 22
JITTER = 2.0
"""Every slot moves by up to this many pixels along each axis."""

GLYPH_WIDTH, GLYPH_HEIGHT, GLYPH_GAP = 22, 38, 5
GLYPH_STROKE = 6.0
SUPERSAMPLING = 4
HELD_OUT_MODULUS = 3


@dataclass(frozen=True)
class Scene:
    """What one caption asks for: shapes (`shape`, `count`) or a number (`number`), in a colour, on a background."""

    background: str
    colour: str
    shape: str | None = None
    count: int = 1
    number: int | None = None

    def __post_init__(self) -> None:
        _check_word("background", self.background, tuple(BACKGROUNDS))
        _check_word("colour", self.colour, tuple(COLOURS))
        if (self.shape is None) == (self.number is None):
            raise ValueError(
                f"A scene shows either a shape or a number; got shape={self.shape!r} and "
                f"number={self.number!r}. Set one of them."
            )
        if self.shape is not None:
            _check_word("shape", self.shape, SHAPES)
        if not 1 <= self.count <= MAX_COUNT:
            raise ValueError(f"count={self.count} is outside 1..{MAX_COUNT}, the counts that have a layout.")
        if self.number is not None and not (0 <= self.number <= MAX_NUMBER and self.count == 1):
            raise ValueError(f"number={self.number} with count={self.count}: use 0..{MAX_NUMBER}, and count 1.")

    @property
    def kind(self) -> Kind:
        if self.number is not None:
            return "number"
        return "single" if self.count == 1 else "count"

    @property
    def digits(self) -> tuple[int, ...]:
        """Digits of the number from left to right; empty where the scene shows shapes."""
        return () if self.number is None else tuple(int(character) for character in str(self.number))


def _check_word(what: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ValueError(f"{what} {word!r} is not in this world. Use one of: {', '.join(known)}.")


# --- captions ---

_SHAPES_CAPTION = re.compile(r"(\w+) (\w+) (\w+) on a (\w+) background")
_NUMBER_CAPTION = re.compile(r"the number (\d+) in (\w+) on a (\w+) background")


def format_caption(scene: Scene) -> str:
    """The one caption of a scene, such as "two red stars on a gray background"."""
    if scene.number is not None:
        return f"the number {scene.number} in {scene.colour} on a {scene.background} background"
    assert scene.shape is not None
    noun = scene.shape if scene.count == 1 else PLURALS[scene.shape]
    word = next(word for word, count in COUNT_WORDS.items() if count == scene.count)
    return f"{word} {scene.colour} {noun} on a {scene.background} background"


def parse_caption(caption: str) -> Scene:
    """Inverse of :func:`format_caption`; case and surrounding space do not matter.

    Raises:
        ValueError: the caption is outside the grammar. The message says what was expected in its place.
    """
    text = " ".join(caption.lower().rstrip(". \n").split())
    if match := _NUMBER_CAPTION.fullmatch(text):
        digits, colour, background = match.groups()
        if len(digits) > 2 or (len(digits) == 2 and digits[0] == "0"):
            raise ValueError(f"Number {digits!r} in {caption!r}: write 0..{MAX_NUMBER} without leading zeros.")
        return Scene(background=background, colour=colour, number=int(digits))
    if match := _SHAPES_CAPTION.fullmatch(text):
        word, colour, noun, background = match.groups()
        _check_word("count", word, tuple(COUNT_WORDS))
        count = COUNT_WORDS[word]
        nouns = {(name if count == 1 else plural): name for name, plural in PLURALS.items()}
        _check_word("shape", noun, tuple(nouns))
        return Scene(background=background, colour=colour, shape=nouns[noun], count=count)
    raise ValueError(
        f"{caption!r} is not a caption of the shapes world. Write 'a red circle on a white background', "
        "'three blue squares on a black background' or 'the number 42 in green on a gray background'."
    )


# --- pictures ---

_POLYGONS: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1), (1, 1), (-1, 1)),
    "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
    "star": tuple(
        (radius * math.sin(math.pi * step / 5), 0.08 - radius * math.cos(math.pi * step / 5))
        for step, radius in enumerate((1.08, 0.46) * 5)
    ),
    "cross": tuple(
        (sign_x * x, sign_y * y)
        for sign_x, sign_y, corner in ((1, -1, 0), (1, 1, 1), (-1, 1, 0), (-1, -1, 1))
        for x, y in (((0.36, 1), (0.36, 0.36), (1, 0.36)) if corner == 0 else ((1, 0.36), (0.36, 0.36), (0.36, 1)))
    ),
}


def _arc(cx: float, cy: float, rx: float, ry: float, start: float, stop: float) -> list[tuple[float, float]]:
    """Points of an ellipse's arc; angles in degrees, clockwise on the screen from three o'clock."""
    steps = max(2, round(abs(stop - start) / 12))
    angles = [math.radians(start + (stop - start) * i / steps) for i in range(steps + 1)]
    return [(cx + rx * math.cos(a), cy + ry * math.sin(a)) for a in angles]


# Strokes of the ten digits in a box of width 1 and height 1; the pen's width is added around them.
_STROKES: tuple[tuple[list[tuple[float, float]], ...], ...] = (
    (_arc(0.5, 0.5, 0.5, 0.5, 0, 360),),
    ([(0.12, 0.22), (0.55, 0.0), (0.55, 1.0)], [(0.15, 1.0), (0.95, 1.0)]),
    ([*_arc(0.5, 0.29, 0.48, 0.29, 190, 380), (0.0, 1.0), (1.0, 1.0)],),
    (_arc(0.45, 0.26, 0.48, 0.26, 200, 450), _arc(0.45, 0.74, 0.55, 0.26, 270, 520)),
    ([(0.75, 1.0), (0.75, 0.0), (0.0, 0.68), (1.0, 0.68)],),
    ([(0.92, 0.0), (0.1, 0.0), (0.06, 0.46), *_arc(0.45, 0.69, 0.55, 0.31, 225, 510)],),
    (_arc(0.5, 0.69, 0.5, 0.31, 0, 360), [(0.78, 0.0), (0.3, 0.3), (0.02, 0.64)]),
    ([(0.0, 0.0), (1.0, 0.0), (0.35, 1.0)],),
    (_arc(0.5, 0.25, 0.42, 0.25, 0, 360), _arc(0.5, 0.74, 0.5, 0.26, 0, 360)),
    (_arc(0.5, 0.31, 0.5, 0.31, 0, 360), [(0.22, 1.0), (0.7, 0.7), (0.98, 0.36)]),
)


@functools.cache
def shape_stencil(shape: str, size: int) -> Image.Image:
    """Mask of a shape at `SUPERSAMPLING` times its size in pixels: mode L, 255 inside, one pixel of margin."""
    scale = SUPERSAMPLING
    side = (size + 2) * scale
    stencil = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(stencil)
    half, centre = size * scale / 2, side / 2
    if shape == "circle":
        draw.ellipse((centre - half, centre - half, centre + half - 1, centre + half - 1), fill=255)
    else:
        draw.polygon([(centre + half * x, centre + half * y) for x, y in _POLYGONS[shape]], fill=255)
    return stencil


@functools.cache
def digit_stencil(digit: int) -> Image.Image:
    """Mask of a digit at `SUPERSAMPLING` times `GLYPH_WIDTH` x `GLYPH_HEIGHT` pixels: mode L, 255 inside."""
    scale, pen = SUPERSAMPLING, GLYPH_STROKE * SUPERSAMPLING
    stencil = Image.new("L", (GLYPH_WIDTH * scale, GLYPH_HEIGHT * scale), 0)
    draw = ImageDraw.Draw(stencil)
    width, height = stencil.width - pen, stencil.height - pen
    for stroke in _STROKES[digit]:
        points = [(pen / 2 + width * x, pen / 2 + height * y) for x, y in stroke]
        draw.line(points, fill=255, width=round(pen))
        for x, y in points:  # round joints and ends
            draw.ellipse((x - pen / 2, y - pen / 2, x + pen / 2, y + pen / 2), fill=255)
    return stencil


def place_stencils(scene: Scene, rng: np.random.Generator) -> list[tuple[Image.Image, float, float]]:
    """Stencils of a scene and the centres, in pixels (x, y), where this draw puts them."""
    if scene.shape is not None:
        stencil = shape_stencil(scene.shape, SINGLE_SIZE if scene.count == 1 else MULTI_SIZE)
        moves = rng.uniform(-JITTER, JITTER, size=(scene.count, 2))
        return [(stencil, x + dx, y + dy) for (x, y), (dx, dy) in zip(SLOTS[scene.count], moves, strict=True)]
    dx, dy = rng.uniform(-JITTER, JITTER, size=2)
    centre = IMAGE_SIZE / 2
    return [(digit_stencil(d), x + dx, centre + dy) for d, x in zip(scene.digits, digit_centres(scene), strict=True)]


def digit_centres(scene: Scene) -> list[float]:
    """Horizontal centres, in pixels, of a number's digits before they move."""
    pitch = GLYPH_WIDTH + GLYPH_GAP
    start = IMAGE_SIZE / 2 - pitch * (len(scene.digits) - 1) / 2
    return [start + pitch * i for i in range(len(scene.digits))]


def render(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draw a scene: RGB, 64 x 64 pixels, antialiased; `rng` moves things by up to `JITTER` pixels.

    The same scene and generator state give the same pixels.
    """
    scale = SUPERSAMPLING
    canvas = Image.new("RGB", (IMAGE_SIZE * scale, IMAGE_SIZE * scale), BACKGROUNDS[scene.background])
    for stencil, x, y in place_stencils(scene, rng):
        corner = (round(x * scale - stencil.width / 2), round(y * scale - stencil.height / 2))
        canvas.paste(COLOURS[scene.colour], corner, stencil)
    return canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)


# --- scenes and the split ---


def scenes(kind: Kind) -> Iterator[Scene]:
    """Every scene of a kind, in a fixed order: 144 single, 432 count, 2400 number."""
    grounds = itertools.product(BACKGROUNDS, COLOURS)
    if kind == "number":
        for background, colour in grounds:
            for number in range(MAX_NUMBER + 1):
                yield Scene(background=background, colour=colour, number=number)
        return
    counts = (1,) if kind == "single" else tuple(range(2, MAX_COUNT + 1))
    for (background, colour), count, shape in itertools.product(grounds, counts, SHAPES):
        yield Scene(background=background, colour=colour, shape=shape, count=count)


def split_of(scene: Scene) -> Split:
    """Which prompts a combination belongs to: a Latin-square rule, one in three is held out.

    Indices of the attributes are added up and taken modulo 3, so every attribute, and every pair of attributes, occurs
    in the training prompts and in the held-out ones, while no combination occurs in both.
    """
    subject = scene.number if scene.number is not None else SHAPES.index(scene.shape or "") + scene.count
    total = subject + tuple(COLOURS).index(scene.colour) + tuple(BACKGROUNDS).index(scene.background)
    return "test" if total % HELD_OUT_MODULUS == HELD_OUT_MODULUS - 1 else "train"


def sample_scene(rng: np.random.Generator, kind: Kind, split: Split | None = None) -> Scene:
    """Draw a scene of a kind at random, from one side of the split or (None) from both.

    Numbers have one digit with probability 1/4, so that both lengths are common; otherwise all are equally likely.
    """
    while True:
        background = tuple(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
        colour = tuple(COLOURS)[rng.integers(len(COLOURS))]
        if kind == "number":
            number = int(rng.integers(10) if rng.random() < 0.25 else rng.integers(10, MAX_NUMBER + 1))
            scene = Scene(background=background, colour=colour, number=number)
        else:
            count = 1 if kind == "single" else int(rng.integers(2, MAX_COUNT + 1))
            scene = Scene(background=background, colour=colour, shape=SHAPES[rng.integers(len(SHAPES))], count=count)
        if split is None or split_of(scene) == split:
            return scene
