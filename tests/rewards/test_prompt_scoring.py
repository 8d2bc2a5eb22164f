"""The scorer of the shapes world: right pictures score 1, every wrong one scores low and is never strictly right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw

from flow_factory.rewards.prompt_scoring import Score, score
from flow_factory.rewards.shapes_world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Kind,
    Scene,
    format_caption,
    parse_caption,
    render,
    sample_scene,
    scenes,
    split_of,
)

KINDS: tuple[Kind, ...] = ("single", "count", "number")


def draws(kind: Kind, count: int, seed: int = 0) -> list[tuple[Scene, Image.Image]]:
    rng = np.random.default_rng(seed)
    chosen = [sample_scene(rng, kind) for _ in range(count)]
    return [(scene, render(scene, rng)) for scene in chosen]


# --- world ---


@pytest.mark.parametrize("kind", KINDS)
def test_captions_and_scenes_are_inverse(kind: Kind) -> None:
    everything = list(scenes(kind))
    captions = [format_caption(scene) for scene in everything]
    assert len(set(captions)) == len(everything)
    assert [parse_caption(caption) for caption in captions] == everything
    assert parse_caption("  " + captions[0].upper() + ". ") == everything[0]


@pytest.mark.parametrize(
    ("caption", "hint"),
    [
        ("a photo of a dog", "a red circle on a white background"),
        ("a mauve circle on a white background", "Use one of: red, green"),
        ("a red circle on a yellow background", "Use one of: white, black"),
        ("two red circle on a white background", "Use one of: circles"),
        ("five red circles on a white background", "Use one of: a, two, three, four"),
        ("the number 123 in red on a white background", "0..99"),
        ("the number 07 in red on a white background", "leading zeros"),
    ],
)
def test_a_caption_outside_the_grammar_is_told_what_is_inside(caption: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint.replace(".", r"\.")):
        parse_caption(caption)


def test_a_scene_checks_itself() -> None:
    with pytest.raises(ValueError, match="either a shape or a number"):
        Scene("white", "red")
    with pytest.raises(ValueError, match="count=5"):
        Scene("white", "red", shape="star", count=5)
    with pytest.raises(ValueError, match="number=100"):
        Scene("white", "red", number=100)


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_attributes_occurs_on_both_sides_of_the_split(kind: Kind) -> None:
    def pairs(scene: Scene) -> set[tuple[object, ...]]:
        values = [
            ("background", scene.background),
            ("colour", scene.colour),
            ("shape", scene.shape),
            ("count", scene.count),
        ]
        values += [("digit", place, digit) for place, digit in enumerate(scene.digits)]
        return {(a, b) for a in values for b in values}

    sides = {side: [s for s in scenes(kind) if split_of(s) == side] for side in ("train", "test")}
    seen = [set().union(*(pairs(scene) for scene in side)) for side in sides.values()]
    assert seen[0] == seen[1]
    assert len(sides["test"]) * 3 == len(sides["train"]) + len(sides["test"])


def test_a_picture_depends_on_the_generator_alone() -> None:
    scene = Scene("gray", "cyan", shape="star", count=3)
    first, again, other = (np.asarray(render(scene, np.random.default_rng(seed))) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# --- right pictures ---


@pytest.mark.parametrize("kind", KINDS)
def test_ground_truth_is_right(kind: Kind) -> None:
    scores = [score(picture, scene) for scene, picture in draws(kind, 300)]
    assert np.mean([item.strict for item in scores]) >= 0.99
    assert min(item.graded for item in scores) > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_in_range_and_graded_is_their_product(kind: Kind) -> None:
    for scene, picture in draws(kind, 40):
        blurred = picture.resize((24, 24)).resize((64, 64))
        item = score(blurred, scene)
        parts = [item.background, item.colour, item.shape, item.count, item.number]
        assert all(type(part) is float and 0.0 <= part <= 1.0 for part in parts)
        assert item.graded == pytest.approx(np.prod(parts))
        assert item.strict in (0.0, 1.0)


def test_a_picture_and_its_array_score_alike_and_size_does_not_matter() -> None:
    (scene, picture), *_ = draws("count", 1)
    assert score(picture, scene) == score(np.asarray(picture), scene)
    assert score(picture.resize((256, 256), Image.Resampling.NEAREST), scene) == score(picture, scene)
    with pytest.raises(ValueError, match=r"float64 .*astype"):
        score(np.zeros((64, 64, 3)), scene)


def test_a_little_noise_costs_little_and_more_noise_costs_more() -> None:
    rng = np.random.default_rng(3)
    means = []
    for deviation in (0, 8, 24, 80):
        values = []
        for scene, picture in draws("count", 40):
            noisy = np.asarray(picture) + rng.normal(0, deviation, (64, 64, 3))
            values.append(score(noisy.clip(0, 255).astype(np.uint8), scene).graded)
        means.append(np.mean(values))
    assert means == sorted(means, reverse=True)
    assert means[1] > 0.9 and means[3] < 0.2


# --- wrong pictures ---


def wrong(score_: Score, ceiling: float) -> bool:
    return score_.strict == 0.0 and score_.graded <= ceiling


@pytest.mark.parametrize(
    ("kind", "attribute", "values", "ceiling"),
    [
        *((kind, "background", tuple(BACKGROUNDS), 0.2) for kind in KINDS),
        *((kind, "colour", tuple(COLOURS), 0.2) for kind in KINDS),
        ("single", "shape", SHAPES, 0.45),
        ("count", "shape", SHAPES, 0.45),
        ("count", "count", (2, 3, 4), 0.6),
        ("number", "number", tuple(range(100)), 0.35),
    ],
)
def test_one_wrong_attribute_is_enough(kind: Kind, attribute: str, values: tuple[object, ...], ceiling: float) -> None:
    rng = np.random.default_rng(5)
    for scene, _ in draws(kind, 120, seed=4):
        others = [value for value in values if value != getattr(scene, attribute)]
        shown = dataclasses.replace(scene, **{attribute: others[rng.integers(len(others))]})
        item = score(render(shown, rng), scene)
        assert wrong(item, ceiling), (scene, shown, item)


def test_the_nearer_wrong_count_earns_more() -> None:
    rng = np.random.default_rng(0)
    scene = Scene("white", "blue", shape="square", count=4)
    earned = [score(render(dataclasses.replace(scene, count=n), rng), scene).graded for n in (2, 3, 4)]
    assert earned == sorted(earned) and earned[0] < earned[1] < earned[2]


def paint(scene: Scene, draw_on: Callable[[ImageDraw.ImageDraw, tuple[int, int, int]], None]) -> Image.Image:
    picture = Image.new("RGB", (64, 64), BACKGROUNDS[scene.background])
    draw_on(ImageDraw.Draw(picture), COLOURS[scene.colour])
    return picture


def stripes(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    for x in range(0, 64, 8):
        draw.rectangle((x, 0, x + 3, 63), fill=colour)


def checkerboard(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    for x in range(0, 64, 8):
        for y in range(0, 64, 8):
            if (x + y) % 16:
                draw.rectangle((x, y, x + 7, y + 7), fill=colour)


def flood(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.rectangle((0, 0, 63, 63), fill=colour)


def slab(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.rectangle((6, 6, 57, 57), fill=colour)


def dots(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    for x in range(6, 60, 7):
        for y in range(6, 60, 7):
            draw.rectangle((x, y, x + 3, y + 3), fill=colour)


def ring(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.ellipse((14, 14, 49, 49), outline=colour, width=6)


def frame(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.rectangle((14, 14, 49, 49), outline=colour, width=5)


def concave_square(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.polygon([(14, 14), (32, 26), (50, 14), (38, 32), (50, 50), (32, 38), (14, 50), (26, 32)], fill=colour)


def bars(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    draw.rectangle((8, 13, 29, 50), fill=colour)
    draw.rectangle((35, 13, 56, 50), fill=colour)


def nothing(draw: ImageDraw.ImageDraw, colour: tuple[int, int, int]) -> None:
    del draw, colour


TRICKS = (stripes, checkerboard, flood, slab, dots, ring, frame, concave_square, bars, nothing)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_made_to_please_do_not(
    kind: Kind, trick: Callable[[ImageDraw.ImageDraw, tuple[int, int, int]], None]
) -> None:
    for scene, _ in draws(kind, 60, seed=7):
        item = score(paint(scene, trick), scene)
        assert wrong(item, 0.35), (scene, item)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_oversaturation_do_not_please(kind: Kind) -> None:
    rng = np.random.default_rng(11)
    for scene, picture in draws(kind, 40, seed=8):
        assert wrong(score(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), scene), 0.05)
        pixels = np.asarray(picture).astype(int)
        hard = np.where(pixels > 127, 255, 0).astype(np.uint8)  # every channel driven to its end
        assert score(hard, scene).graded < 0.75
        inverted = (255 - pixels).astype(np.uint8)
        assert wrong(score(inverted, scene), 0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_extra_ink_costs(kind: Kind) -> None:
    for scene, picture in draws(kind, 40, seed=9):
        clean = score(picture, scene).graded
        pixels = np.asarray(picture).copy()
        pixels[4:7, 4:60] = COLOURS[scene.colour]
        pixels[58:61, 4:60] = COLOURS[scene.colour]
        spoiled = score(pixels, scene)
        assert spoiled.graded < 0.85 * clean, (scene, spoiled)


def test_part_of_the_paint_in_another_colour_costs() -> None:
    for scene, picture in draws("single", 60, seed=10):
        other = next(name for name in COLOURS if name != scene.colour)
        pixels = np.asarray(picture).astype(float)
        inside = np.linalg.norm(pixels - np.array(COLOURS[scene.colour]), axis=2) < 5
        inside[:, 32:] = False
        pixels[inside] = COLOURS[other]
        assert score(pixels.astype(np.uint8), scene).graded < 0.65, scene
