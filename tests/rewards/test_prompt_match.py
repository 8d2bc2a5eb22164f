"""The reward on top of the scorer: graded or strict, and what it says about prompts it cannot judge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.rewards.build import build_reward_model
from flow_factory.rewards.prompt_scoring import score
from flow_factory.rewards.shapes_world import Kind, format_caption, render, sample_scene
from flow_factory.samples import T2ISample
from tests.rewards.helpers import config, make_sample


def captioned(kind: Kind, seed: int) -> T2ISample:
    """A sample whose picture shows its caption."""
    rng = np.random.default_rng(seed)
    scene = sample_scene(rng, kind)
    pixels = torch.from_numpy(np.array(render(scene, rng))).permute(2, 0, 1)
    return dataclasses.replace(make_sample(prompt=format_caption(scene)), image=pixels)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["single", "count", "number"])
def test_right_pictures_get_one_and_exchanged_ones_do_not(kind: Kind, strict: bool) -> None:
    reward = build_reward_model(config(reward_model="prompt_match", params={"strict": strict}))
    samples = [captioned(kind, seed) for seed in range(8)]
    assert reward.score(samples) == pytest.approx([1.0] * 8, abs=0.05)
    exchanged = [
        dataclasses.replace(sample, image=other.image)
        for sample, other in zip(samples, samples[1:] + samples[:1], strict=True)
        if sample.prompt != other.prompt
    ]
    values = reward.score(exchanged)
    assert isinstance(values, list)
    assert all(value is not None and value <= (0.0 if strict else 0.6) for value in values)


def test_graded_is_the_default_and_equals_the_scorer() -> None:
    reward = build_reward_model(config(reward_model="prompt_match"))
    sample = captioned("count", 3)
    assert sample.image is not None
    faded = dataclasses.replace(sample, image=(sample.image.float() * 0.8 + 20).to(torch.uint8))
    from flow_factory.rewards.shapes_world import parse_caption

    expected = score(faded.pil, parse_caption(faded.prompt)).graded
    assert reward.score([faded]) == [expected]
    assert 0.0 < expected < 1.0


def test_a_prompt_of_another_world_is_refused_with_examples() -> None:
    reward = build_reward_model(config("match", reward_model="prompt_match"))
    with pytest.raises(InputError, match=r"'match' \(prompt_match\).*a corgi.*a red circle on a white background"):
        reward.score([make_sample(prompt="a corgi")])


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(InputError, match="strict"):
        build_reward_model(config(reward_model="prompt_match", params={"strikt": True}))
