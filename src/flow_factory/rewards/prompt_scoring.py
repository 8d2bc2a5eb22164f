"""Score a picture of the shapes world against a scene, from its pixels alone.

The order is that of a careful eye: what colour is the ground (the border says), what stands out from it, in how many
pieces of the right size, in which colour, and of which form. Forms are compared with the world's own stencils at their
true size by plain soft IoU (no contrast between templates, which a policy learns to exploit with shapes that are unlike
everything).
`graded` is the product of the parts and so is low as soon as one of them is wrong, yet moves with every improvement;
`strict` asks that every attribute be right. Needs numpy and PIL only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image

from .shapes_world import (
    BACKGROUNDS,
    COLOURS,
    GLYPH_HEIGHT,
    GLYPH_WIDTH,
    IMAGE_SIZE,
    MULTI_SIZE,
    SHAPES,
    SINGLE_SIZE,
    SUPERSAMPLING,
    Scene,
    digit_centres,
    digit_stencil,
    shape_stencil,
)

BORDER = 3
"""Width of the frame that shows the ground, in pixels: nothing that is drawn reaches it."""
NEAR, FAR = 20.0, 110.0
"""Euclidean RGB distances at which a colour counts fully and not at all."""
FOREGROUND_DISTANCE = 45.0
"""A picture has a foreground only where its colour is this far from the ground (the palettes are 90 apart or more)."""
STRICT_IOU = 0.8
STRICT_COLOUR = 0.5
STRICT_CLUTTER = 0.12
SEARCH = 4
"""A number may stand this many pixels off its place along each axis."""


@dataclass(frozen=True)
class Score:
    """Parts in [0, 1]; `shape` is 1 for numbers and `number` is 1 for shapes. `strict` is 0 or 1.

    `count` falls with missing, superfluous or wrongly sized pieces, and with clutter: foreground that belongs to none.
    """

    background: float
    colour: float
    shape: float
    count: float
    number: float
    graded: float
    strict: float


def score(image: Image.Image | np.ndarray, scene: Scene) -> Score:
    """Compare a picture with a scene.

    Args:
        image: PIL image, or uint8 array (64, 64, 3). Other sizes are resampled to 64 x 64 first.
        scene: what the caption asked for.

    Raises:
        ValueError: an array of another type or shape.
    """
    pixels = _as_pixels(image)
    ground, background, ground_ok = _background(pixels, scene.background)
    alpha, paint = _foreground(pixels, ground)
    colour, colour_ok = _colour(pixels, alpha, paint, scene.colour)
    shape = number = 1.0
    if scene.number is not None:
        number, count, form_ok = _number(alpha, scene)
    else:
        shape, count, form_ok = _shapes(alpha, scene)
    graded = background * colour * shape * count * number
    strict = float(ground_ok and colour_ok and form_ok)
    return Score(background, colour, shape, count, number, graded, strict)


def _as_pixels(image: Image.Image | np.ndarray) -> np.ndarray:
    """float32 (64, 64, 3) in 0..255."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(
                f"An image array must be uint8 (height, width, 3); got {image.dtype} {image.shape}. "
                "Convert floats with (255 * x).round().astype('uint8')."
            )
        picture = Image.fromarray(image)
    else:
        picture = image.convert("RGB")
    if picture.size != (IMAGE_SIZE, IMAGE_SIZE):
        picture = picture.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)
    return np.asarray(picture, dtype=np.float32)


def _closeness(distance: np.ndarray) -> np.ndarray:
    """1 up to NEAR, 0 from FAR, linear between."""
    return np.clip((FAR - distance) / (FAR - NEAR), 0.0, 1.0)


def _nearest(colour: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    names = list(palette)
    distances = np.linalg.norm(np.array([palette[name] for name in names], np.float32) - colour, axis=1)
    return names[int(distances.argmin())]


@functools.cache
def _border_mask() -> np.ndarray:
    mask = np.ones((IMAGE_SIZE, IMAGE_SIZE), bool)
    mask[BORDER:-BORDER, BORDER:-BORDER] = False
    return mask


def _background(pixels: np.ndarray, wanted: str) -> tuple[np.ndarray, float, bool]:
    """Colour of the ground (3,), its part of the score, and whether it is right.

    Every border pixel counts by its own distance from the wanted colour: stripes and gradients lose.
    """
    border = pixels[_border_mask()]
    ground = np.median(border, axis=0)
    part = float(_closeness(np.linalg.norm(border - np.array(BACKGROUNDS[wanted], np.float32), axis=1)).mean())
    return ground, part, _nearest(ground, BACKGROUNDS) == wanted and part >= STRICT_COLOUR


def _foreground(pixels: np.ndarray, ground: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coverage in [0, 1] (64, 64) of what stands out from the ground, and its typical colour (3,).

    Coverage is the distance from the ground in units of the paint's distance, so that an antialiased edge counts by its
    share, and paint of a second colour counts as foreground too.
    """
    away = pixels - ground
    distance = np.linalg.norm(away, axis=2)
    standing = distance > FOREGROUND_DISTANCE
    if not standing.any():
        return np.zeros_like(distance), ground
    # The core of the foreground, without antialiased edges, carries the paint's colour.
    core = standing & (distance >= np.quantile(distance[standing], 0.4))
    paint = np.median(pixels[core], axis=0)
    reach = max(float(np.linalg.norm(paint - ground)), FOREGROUND_DISTANCE)
    coverage = np.clip(distance / reach, 0.0, 1.0)
    coverage[coverage < 0.15] = 0.0  # texture of the ground
    return coverage, paint


def _colour(pixels: np.ndarray, alpha: np.ndarray, paint: np.ndarray, wanted: str) -> tuple[float, bool]:
    """How much of the paint has the wanted colour; every pixel of the foreground inside its soft edge counts."""
    inside = ~_grown(alpha <= 0.5, 1)
    if inside.sum() < 8:
        return 0.0, False
    distances = np.linalg.norm(pixels[inside] - np.array(COLOURS[wanted], np.float32), axis=1)
    part = float(_closeness(distances).mean())
    return part, _nearest(paint, COLOURS) == wanted and part >= STRICT_COLOUR


# --- forms ---


def _ramp(iou: np.ndarray | float) -> np.ndarray:
    """Soft IoU to a score: steep near the top, so that a circle for a square (IoU 0.79) earns a third."""
    return np.clip((np.asarray(iou) - 0.4) / 0.55, 0.0, 1.0) ** 3


def _soft_iou(product: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Intersection over union of coverages: a.b / (a.a + b.b - a.b), 1 only for equal ones."""
    return product / np.maximum(first + second - product, 1e-6)


def _shrink(stencil: Image.Image, width: int, height: int, dx: float = 0.0, dy: float = 0.0) -> np.ndarray:
    """Stencil in the middle of a window of `width` x `height` pixels, moved by (dx, dy); float32 coverage."""
    scale = SUPERSAMPLING
    canvas = Image.new("L", (width * scale, height * scale), 0)
    left, top = (canvas.width - stencil.width) // 2, (canvas.height - stencil.height) // 2
    canvas.paste(stencil, (left + round(dx * scale), top + round(dy * scale)))
    return np.asarray(canvas.resize((width, height), Image.Resampling.BOX), np.float32) / 255.0


@dataclass(frozen=True)
class _Templates:
    """Stencils of T forms as coverages in one window, at four half-pixel places.

    `flat` (4, T, height * width), `norms` (4, T) their squared lengths, `areas` (T,) in pixels.
    """

    height: int
    width: int
    flat: np.ndarray
    norms: np.ndarray
    areas: np.ndarray

    @staticmethod
    def of(stencils: list[Image.Image], width: int, height: int) -> _Templates:
        places = [(dx, dy) for dy in (0.0, 0.5) for dx in (0.0, 0.5)]
        flat = np.stack([[_shrink(s, width, height, dx, dy).ravel() for s in stencils] for dx, dy in places])
        return _Templates(height, width, flat, (flat**2).sum(axis=2), flat[0].sum(axis=1))


@functools.cache
def _shape_templates(size: int) -> _Templates:
    return _Templates.of([shape_stencil(shape, size) for shape in SHAPES], size + 6, size + 6)


@functools.cache
def _digit_templates() -> _Templates:
    return _Templates.of([digit_stencil(digit) for digit in range(10)], GLYPH_WIDTH + 2, GLYPH_HEIGHT + 2)


def _match(alpha: np.ndarray, top: int, left: int, reach: int, templates: _Templates) -> tuple[np.ndarray, int, int]:
    """Best soft IoU of every template over shifts of up to `reach` pixels around a window, and where it lies.

    Whole pixels first; then half pixels around the best place.
    """
    height, width = templates.height, templates.width
    padded = np.pad(alpha, IMAGE_SIZE)

    def search(top: int, left: int, reach: int, flat: np.ndarray, norms: np.ndarray) -> np.ndarray:
        rows, columns = top + IMAGE_SIZE - reach, left + IMAGE_SIZE - reach
        region = padded[rows : rows + height + 2 * reach, columns : columns + width + 2 * reach]
        patches = np.lib.stride_tricks.sliding_window_view(region, (height, width)).reshape(-1, height * width)
        return _soft_iou(patches @ flat.T, (patches**2).sum(axis=1)[:, None], norms[None, :])

    side = 2 * reach + 1
    coarse = search(top, left, reach, templates.flat[0], templates.norms[0])
    best = int(coarse.max(axis=1).argmax())
    top, left = top - reach + best // side, left - reach + best % side
    fine = search(top, left, 1, templates.flat.reshape(-1, height * width), templates.norms.ravel())
    return np.maximum(coarse.max(axis=0), fine.max(axis=0).reshape(4, -1).max(axis=0)), top, left


def _shapes(alpha: np.ndarray, scene: Scene) -> tuple[float, float, bool]:
    """Parts for shape and count, and whether both are right."""
    size = SINGLE_SIZE if scene.count == 1 else MULTI_SIZE
    templates = _shape_templates(size)
    areas, window = templates.areas, templates.width
    wanted = SHAPES.index(scene.shape or "")
    labels, pieces = _components(alpha > 0.5)
    matches: list[np.ndarray] = []
    covered = np.zeros_like(alpha, dtype=bool)
    for label in range(1, pieces + 1):
        ys, xs = np.nonzero(labels == label)
        if not 0.5 * areas.min() <= len(ys) <= 1.5 * areas.max():
            continue
        # The piece with its soft edge, without its neighbours.
        piece = np.where((labels == label) | (labels == 0), alpha, 0.0)
        top = round((ys.min() + ys.max() + 1 - window) / 2)
        left = round((xs.min() + xs.max() + 1 - window) / 2)
        iou, _, _ = _match(piece, top, left, 1, templates)
        matches.append(iou)
        covered |= labels == label
    clutter = float(alpha[~_grown(covered, 2)].sum() / (areas[wanted] * scene.count))
    found = len(matches)
    count = max(0.0, 1.0 - abs(found - scene.count) / scene.count) ** 2 * max(0.0, 1.0 - 2.0 * clutter)
    if found == 0:
        return 0.0, 0.0, False
    matches.sort(key=lambda iou: -iou[wanted])
    best = np.array([iou[wanted] for iou in matches[: scene.count]])
    right = all(int(iou.argmax()) == wanted and iou[wanted] >= STRICT_IOU for iou in matches)
    strict = right and found == scene.count and clutter <= STRICT_CLUTTER
    return float(_ramp(best).mean()), count, strict


def _number(alpha: np.ndarray, scene: Scene) -> tuple[float, float, bool]:
    """Parts for the number and for clutter around it, and whether it is right.

    A digit earns by its own IoU, cut by how far another digit fits better: 3 and 8 share most of their pixels. One
    right digit of two earns a quarter.
    """
    templates = _digit_templates()
    height, width = templates.height, templates.width
    top = (IMAGE_SIZE - height) // 2
    earned, right = 0.0, True
    covered = np.zeros_like(alpha, dtype=bool)
    for digit, centre in zip(scene.digits, digit_centres(scene), strict=True):
        iou, at_top, at_left = _match(alpha, top, round(centre - width / 2), SEARCH, templates)
        others = np.delete(iou, digit).max()
        earned += float(_ramp(iou[digit])) * float(np.clip(0.9 + (iou[digit] - others) / 0.25, 0.0, 1.0))
        right = right and iou[digit] > others and bool(iou[digit] >= STRICT_IOU)
        covered[max(at_top, 0) : at_top + height, max(at_left, 0) : at_left + width] = True
    ink = float(templates.areas[list(scene.digits)].sum())
    clutter = float(alpha[~covered].sum()) / ink
    part = (earned / len(scene.digits)) ** 2
    return part, max(0.0, 1.0 - 2.0 * clutter), right and clutter <= STRICT_CLUTTER


def _grown(mask: np.ndarray, pixels: int) -> np.ndarray:
    """Mask with a rim of so many pixels around it: soft edges belong to the piece they surround."""
    for _ in range(pixels):
        padded = np.pad(mask, 1)
        mask = padded[1:-1, 1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    return mask


def _components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Label 4-connected pieces of a boolean mask: labels (height, width), 0 outside, and how many there are.

    Runs of each row are joined with the runs they touch in the row above (union-find over runs).
    """
    height, width = mask.shape
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    run_rows, starts = np.nonzero(edges == 1)
    _, stops = np.nonzero(edges == -1)
    rows, firsts, lasts = run_rows.tolist(), starts.tolist(), stops.tolist()
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    above = 0
    for run in range(len(rows)):
        while above < run and (
            rows[above] < rows[run] - 1 or (rows[above] == rows[run] - 1 and lasts[above] <= firsts[run])
        ):
            above += 1
        other = above
        while other < run and rows[other] == rows[run] - 1 and firsts[other] < lasts[run]:
            parent[root(other)] = root(run)
            other += 1
    numbers: dict[int, int] = {}
    labels = np.zeros((height, width), np.int32)
    for run in range(len(rows)):
        labels[rows[run], firsts[run] : lasts[run]] = numbers.setdefault(root(run), len(numbers) + 1)
    return labels, len(numbers)
