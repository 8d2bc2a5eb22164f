"""Tries a reward on two made-up samples before a run depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flow_factory.rewards.abc import BaseRewardModel, GroupwiseRewardModel
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import (
    BaseSample,
    Condition,
    Grid,
    ImageSample,
    NoiseKey,
    T2AVSample,
    T2ISample,
    Trajectory,
    VideoSample,
)


def smoke_reward(
    model: BaseRewardModel,
    *,
    processor: RewardProcessor | None = None,
    sample_class: type[BaseSample] = T2ISample,
    prompt: str = "a red circle on a white background",
    metadata: Mapping[str, Any] | None = None,
    size: tuple[int, int] = (64, 64),
) -> list[float | None]:
    """Scores a blank (mid-gray) and a noise sample, through the checks that a run applies.

    Args:
        model: The reward.
        processor: The processor that owns the model and will go on to use it (its event loop is then the one the
            model's clients are bound to); None where the model is only tried.
        sample_class: The class the adapter makes; its media fields are filled.
        prompt: A prompt of the run, since some rewards read it.
        metadata: That prompt's other columns.
        size: Height and width in pixels.

    Returns:
        Scores of the blank and of the noise sample; None where the reward says it failed.

    Raises:
        InputError: If the reward needs a field that the samples do not have.
        RunError: If the reward raises, or returns something that is not a finite number per sample.
    """
    generator = torch.Generator().manual_seed(0)
    blank = torch.full((3, *size), 128, dtype=torch.uint8)
    noise = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
    weighted = list(model.config.weight) if isinstance(model.config.weight, dict) else []
    source = (model.config.applicable_datasets or weighted or ["smoke"])[0]
    samples = [
        make_sample(sample_class, pixels, prompt, source, member, dict(metadata or {}))
        for member, pixels in enumerate((blank, noise))
    ]
    owner = processor or RewardProcessor(models=[model])
    chunks = [samples] if isinstance(model, GroupwiseRewardModel) else owner.chunks(model.name, samples)
    try:
        scores = [score for chunk in chunks for score in owner.score_chunk(model.name, chunk)]
    finally:
        if processor is None:
            owner.close_loop()
    return scores


def make_sample(
    sample_class: type[BaseSample], pixels: Tensor, prompt: str, source: str, member: int, metadata: dict[str, Any]
) -> BaseSample:
    """A sample of `sample_class` that shows `pixels` (uint8 [3, H, W]); videos show it in eight frames, silent."""
    media: dict[str, Any] = {}
    if issubclass(sample_class, ImageSample):
        media["image"] = pixels
    if issubclass(sample_class, VideoSample):
        media.update(video=pixels.expand(8, *pixels.shape).contiguous(), fps=8.0)
    if issubclass(sample_class, T2AVSample):
        media.update(audio=torch.zeros(2, 16000), sample_rate=16000)
    grid = Grid.single(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    return sample_class(
        prompt=prompt,
        source=source,
        source_id=0,
        index=0,
        group_id=0,
        member=member,
        key=NoiseKey(0, 0, 0, member),
        condition=Condition(),
        trajectory=Trajectory(grid, (0.0,)),
        metadata=metadata,
        **media,
    )
