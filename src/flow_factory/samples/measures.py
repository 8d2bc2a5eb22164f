"""What is measured of a whole sample: the statistics of its frames, and of what goes on in time, motion and loudness.

A policy can also game its reward where no single frame shows it: a video that stands still is easy to keep sharp and
steady, and silence has no faults. Like the statistics of pictures these are no rewards and depend neither on the batch
nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_factory.samples.reductions import row_mean
from flow_factory.samples.sample import BaseSample, T2AVSample, VideoSample
from flow_factory.samples.statistics import PICTURE_STATISTICS, sample_frames, sample_statistics

SAMPLE_STATISTICS = (*PICTURE_STATISTICS, "motion", "loudness")
"""Names of the columns of `measure_samples`."""
MOTION_PAIRS = 8
"""Motion is measured between so many pairs of neighbouring frames, evenly spaced; between all in a shorter video."""


def motion(frames: Tensor) -> float:
    """Mean absolute difference of neighbouring frames, over pixels and channels.

    Args:
        frames: uint8 [F, C, H, W].

    Returns:
        In [0, 1]: 0 for a video that stands still, 1 where black and white alternate. NaN for fewer than two frames.
    """
    pairs = frames.shape[0] - 1
    if pairs < 1:
        return math.nan
    count = min(pairs, MOTION_PAIRS)
    places = [0] if count == 1 else [round(i * (pairs - 1) / (count - 1)) for i in range(count)]
    # A pair at a time, in integers: exact, and without float copies of a whole video.
    total = sum(
        int((frames[i + 1].to(torch.int16) - frames[i].to(torch.int16)).abs().sum(dtype=torch.int64)) for i in places
    )
    return total / (255 * count * frames[0].numel())


def loudness(sound: Tensor) -> float:
    """Root mean square of a sound, over all its channels.

    Args:
        sound: Floating point [channels, samples]; clipped to [-1, 1] and NaN taken as 0, as where it is written.

    Returns:
        In [0, 1]: 0 for silence, 0.707 for a sine of full amplitude. NaN for a sound without samples.
    """
    if not sound.numel():
        return math.nan
    heard = sound.detach().cpu().double().nan_to_num(0.0).clamp(-1, 1)
    return row_mean(heard.square()[None]).sqrt().float().item()


def measure_samples(samples: Sequence[BaseSample]) -> Tensor:
    """All statistics of samples.

    Returns:
        float32 [len(samples), 7], columns as in `SAMPLE_STATISTICS`; NaN where a sample has no such thing, as a picture
        no motion, and one whose output was never decoded nothing at all.
    """
    frames = [sample_frames(sample) for sample in samples]
    pictures = iter(sample_statistics([shown for shown in frames if shown is not None]))
    rows = torch.full((len(samples), len(SAMPLE_STATISTICS)), math.nan)
    for row, sample, shown in zip(rows, samples, frames, strict=True):
        if shown is not None:
            row[: len(PICTURE_STATISTICS)] = next(pictures)
            row[len(PICTURE_STATISTICS) :] = torch.tensor([_motion_of(sample), _loudness_of(sample)])
    return rows


def columns_by_name(rows: Tensor) -> dict[str, list[float]]:
    """Name to a value per row of `measure_samples`, for what every row has."""
    columns = {name: column.tolist() for name, column in zip(SAMPLE_STATISTICS, rows.T, strict=True)}
    return {name: values for name, values in columns.items() if values and not any(map(math.isnan, values))}


def _motion_of(sample: BaseSample) -> float:
    return motion(sample.video) if isinstance(sample, VideoSample) and sample.video is not None else math.nan


def _loudness_of(sample: BaseSample) -> float:
    return loudness(sample.audio) if isinstance(sample, T2AVSample) and sample.audio is not None else math.nan
