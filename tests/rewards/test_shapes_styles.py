"""The outlined style: it is the shape's own edge, and the measure tells it from filled shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.errors import InputError
from flow_factory.rewards.build import build_reward_model
from flow_factory.rewards.shapes_styles import LINE_WIDTH, Hollowness, hollowness, outline_stencil, render_outlined
from flow_factory.rewards.shapes_world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SINGLE_SIZE,
    SUPERSAMPLING,
    Scene,
    format_caption,
    render,
    scenes,
    shape_stencil,
)
from flow_factory.samples import T2ISample
from tests.rewards.helpers import config, make_sample


def captioned(prompt: str, image: Image.Image) -> T2ISample:
    """A sample that shows `image`."""
    return dataclasses.replace(make_sample(prompt=prompt), image=torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_outlines_lie_inside_the_shape_and_have_its_edge(shape: str) -> None:
    whole = np.asarray(shape_stencil(shape, SINGLE_SIZE)) > 0
    outline = np.asarray(outline_stencil(shape, SINGLE_SIZE)) > 0
    assert (outline <= whole).all()
    inner = whole[1:-1, 1:-1] & whole[:-2, 1:-1] & whole[2:, 1:-1] & whole[1:-1, :-2] & whole[1:-1, 2:]
    edge = whole.copy()
    edge[1:-1, 1:-1] &= ~inner
    assert (outline[edge]).all(), "every pixel of the edge is drawn"
    assert 0.1 < outline.sum() / whole.sum() < 0.95


def test_the_line_has_the_stated_width() -> None:
    """Along the middle row of a square the line is as wide as said, on both sides."""
    row = np.asarray(outline_stencil("square", SINGLE_SIZE))[(SINGLE_SIZE + 2) * SUPERSAMPLING // 2] > 0
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]]))))[::2] / SUPERSAMPLING
    assert len(runs) == 2 and np.abs(runs - LINE_WIDTH).max() <= 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_measure_tells_outlines_from_filled_shapes(shape: str) -> None:
    rng = np.random.default_rng(0)
    for colour, background in (("red", "white"), ("cyan", "black"), ("purple", "gray"), ("yellow", "pink")):
        scene = Scene(background=background, colour=colour, shape=shape)
        for _ in range(8):
            assert hollowness(render_outlined(scene, rng), scene) > 0.98
            assert hollowness(render(scene, rng), scene) == 0.0


def test_the_measure_is_linear_between_the_two_colours_and_limited() -> None:
    scene = Scene(background="black", colour="green", shape="circle")
    ends = np.array(COLOURS["green"], dtype=float), np.array(BACKGROUNDS["black"], dtype=float)
    for share in (0.0, 0.25, 0.5, 1.0):
        colour = tuple(int(v) for v in np.round(ends[0] + share * (ends[1] - ends[0])))
        assert hollowness(Image.new("RGB", (64, 64), colour), scene) == pytest.approx(share, abs=0.01)
    assert hollowness(Image.new("RGB", (64, 64), (0, 0, 0)), scene) == 1.0


def test_it_is_a_reward_for_single_shapes() -> None:
    reward = build_reward_model(config("hollow", reward_model="flow_factory.rewards.shapes_styles.Hollowness"))
    assert isinstance(reward, Hollowness)
    scene = next(scenes("single"))
    rng = np.random.default_rng(1)
    images = [render(scene, rng), render_outlined(scene, rng)]
    samples = [captioned(format_caption(scene), image) for image in images]
    assert reward.score(samples) == [hollowness(image, scene) for image in images]
    number = captioned("the number 4 in red on a white background", images[0])
    with pytest.raises(InputError, match=r"hollow.*cannot judge a prompt: hollowness is defined for single shapes"):
        reward.score([number])


def test_what_cannot_be_outlined_or_measured_is_refused() -> None:
    scene = Scene(background="white", colour="red", shape="star", count=3)
    with pytest.raises(ValueError, match="only single shapes are outlined, not a count scene"):
        render_outlined(scene, np.random.default_rng(0))
    with pytest.raises(ValueError, match="the picture has"):
        hollowness(Image.new("RGB", (32, 32)), Scene(background="white", colour="red", shape="star"))
