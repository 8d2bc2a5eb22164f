"""Motion and loudness on media whose values are known, and what samples without them have instead."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.rewards.smoke import make_sample
from flow_factory.samples import BaseSample, T2ISample, T2VSample
from flow_factory.samples.measures import (
    MOTION_PAIRS,
    SAMPLE_STATISTICS,
    columns_by_name,
    loudness,
    measure_samples,
    motion,
)
from flow_factory.samples.statistics import PICTURE_STATISTICS, picture_statistics
from tests.tracking.media import clip, sounding_sample, tone, video_sample


def levels(*values: int) -> torch.Tensor:
    """Gray frames, uint8 [F, 3, 4, 6]."""
    return torch.tensor(values, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 6).contiguous()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((70,) * 5, 0.0),
        ((0, 255, 0, 255), 1.0),
        ((10, 20), 10 / 255),
        ((20, 10), 10 / 255),  # below zero, which bytes cannot hold
        ((0, 30, 30, 30), 10 / 255),
    ],
)
def test_motion_is_the_mean_difference_of_neighbours(values: tuple[int, ...], expected: float) -> None:
    assert motion(levels(*values)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", [9, 10, 40, 81])
def test_long_videos_are_measured_between_neighbours_from_end_to_end(count: int) -> None:
    """Frames that are measured lie far apart in a long video, but what is compared are neighbours."""
    steps = torch.arange(count, dtype=torch.int64) * 3
    assert motion(levels(*steps.tolist())) == pytest.approx(3 / 255)
    flicker = [0] * count
    flicker[-1] = 255
    assert motion(levels(*flicker)) == pytest.approx(1 / MOTION_PAIRS)
    assert motion(levels(255, *[0] * (count - 1))) == pytest.approx(1 / MOTION_PAIRS)


def test_loudness_is_the_root_mean_square_of_what_is_heard() -> None:
    assert loudness(torch.zeros(2, 100)) == 0.0
    assert loudness(tone(channels=2).waveform) == pytest.approx(0.5 / 2**0.5, abs=1e-3)
    assert loudness(torch.full((1, 8), -3.0)) == 1.0, "clipped"
    assert loudness(torch.tensor([[math.nan, 1.0]])) == pytest.approx(0.5**0.5)


def test_a_sample_has_the_statistics_of_its_kind() -> None:
    pixels = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
    picture = make_sample(T2ISample, pixels, "p", "toy", 0, {})
    video, sounding = video_sample(frames=clip(6)), sounding_sample(frames=clip(6))
    kinds: list[tuple[BaseSample, tuple[str, ...]]] = [
        (picture, PICTURE_STATISTICS),
        (video, (*PICTURE_STATISTICS, "motion")),
        (video_sample(frames=clip(1)), PICTURE_STATISTICS),
        (sounding, SAMPLE_STATISTICS),
    ]
    for sample, names in kinds:
        assert tuple(columns_by_name(measure_samples([sample, sample]))) == names
    assert columns_by_name(measure_samples([picture]))["contrast"] == picture_statistics(pixels[None])[:, 2].tolist()
    assert columns_by_name(measure_samples([sounding]))["motion"] == pytest.approx([50 / 255 / 3])  # red alone changes
    assert tuple(columns_by_name(measure_samples([video, sounding]))) == (*PICTURE_STATISTICS, "motion")


def test_what_was_never_decoded_has_a_row_of_nothing() -> None:
    sample = make_sample(T2VSample, torch.zeros(3, 8, 8, dtype=torch.uint8), "p", "toy", 0, {})
    sample.video = None  # type: ignore[attr-defined]
    assert measure_samples([]).shape == (0, len(SAMPLE_STATISTICS)) and columns_by_name(measure_samples([])) == {}
    assert measure_samples([sample]).isnan().all() and columns_by_name(measure_samples([sample])) == {}
