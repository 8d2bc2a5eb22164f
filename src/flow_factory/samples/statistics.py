"""What can be measured in a picture without a judge: brightness, colour, contrast, edges, fine structure, diversity.

These numbers are not rewards. They are watched while a reward is trained (`tracking/monitors.py`), because a policy
that games its reward nearly always shows it in one of them: pictures turn dark or lurid, fill with fine texture, or
become all alike. All are in units of stored pixel values scaled to [0, 1], so they can be compared between runs.

Pixels are float32, sums are accumulated in float64 and each result is rounded to float32 once at its end. So it depends
neither on the batch that a picture is in nor on the number of threads (see `reductions`), and two processes measure
what one would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flow_factory.samples.reductions import row_mean
from flow_factory.samples.sample import BaseSample, ImageSample, VideoSample

REC_709 = (0.2126, 0.7152, 0.0722)
"""Weights of red, green and blue in luminance (ITU-R BT.709), applied to the stored values."""
HIGH_FREQUENCY = 1 / 8
"""Cycles per pixel above which structure counts as fine: a quarter of the Nyquist frequency, a period of 8 pixels."""
THUMBNAIL_SIZE = 32
VIDEO_FRAMES = 8
"""A video is measured at so many frames, evenly spaced from the first to the last; a shorter one at all of its own."""

_CHUNK = 1 << 22  # values measured at once: copies of a whole cycle of large pictures would fill the memory
_FLAT = 1e-6  # root mean square below which a windowed picture has no structure; one gray level in one pixel has more

DiversityMetric = Literal["rms", "correlation"]


def luminance(pictures: Tensor) -> Tensor:
    """Rec. 709 luminance in [0, 1] of stored values.

    Args:
        pictures: [N, C, H, W] with C = 3, or 1 (gray); uint8, or floating point in [0, 1].

    Returns:
        float32 [N, H, W].

    Raises:
        ValueError: If the shape or the dtype is another one.
    """
    unit = _as_unit(pictures)
    if unit.shape[1] == 1:
        return unit[:, 0]
    red, green, blue = unit.unbind(dim=1)
    return REC_709[0] * red + REC_709[1] * green + REC_709[2] * blue


def brightness(pictures: Tensor) -> Tensor:
    """Mean luminance, float32 [N] in [0, 1]; `pictures` as for `luminance`."""
    return row_mean(luminance(pictures)).float()


def saturation(pictures: Tensor) -> Tensor:
    """Mean HSV saturation (max - min) / max over pixels (0 where black), float32 [N]; `pictures` as for `luminance`."""
    unit = _as_unit(pictures)
    high = unit.amax(dim=1)  # amin and amax are many times faster than aminmax along this dimension
    return row_mean((high - unit.amin(dim=1)) / torch.where(high > 0, high, 1.0)).float()


def contrast(pictures: Tensor) -> Tensor:
    """Root-mean-square contrast: the standard deviation of a picture's luminance, float32 [N] in [0, 1/2].

    Peli, "Contrast in complex images", J. Opt. Soc. Am. A 7 (1990), equation 4.
    """
    return _contrast(luminance(pictures)).float()


def edge_energy(pictures: Tensor) -> Tensor:
    """Mean magnitude of the luminance's gradient, per pixel, by forward differences; float32 [N] in [0, sqrt(2)].

    The last row and column have no forward neighbour and are left out.

    Raises:
        ValueError: If a picture is less than two pixels high or wide.
    """
    return _edge_energy(luminance(pictures)).float()


def high_frequency_ratio(pictures: Tensor) -> Tensor:
    """Share of a picture's spectral power in fine structure, float32 [N] in [0, 1].

    The luminance, less its mean, is windowed by a Hann window along both axes (without one, the jump between opposite
    borders would appear as fine structure) and transformed. Of the power, the share counts whose radial frequency
    sqrt(fx^2 + fy^2) exceeds `HIGH_FREQUENCY`. 0 for a picture of one colour.
    """
    return _high_frequency_ratio(luminance(pictures)).float()


PICTURE_STATISTICS = ("brightness", "saturation", "contrast", "edge_energy", "high_frequency_ratio")
"""Names of the columns of `picture_statistics`."""


def picture_statistics(pictures: Tensor) -> Tensor:
    """All statistics of single pictures; float32 [N, 5], columns as in `PICTURE_STATISTICS`.

    Args:
        pictures: As for `luminance`.
    """
    _check(pictures)
    if not pictures.shape[0]:
        return torch.empty((0, len(PICTURE_STATISTICS)), device=pictures.device)
    per_chunk = max(1, _CHUNK // max(1, pictures.shape[1:].numel()))
    return torch.cat([_measure(chunk) for chunk in pictures.split(per_chunk)])


def _measure(pictures: Tensor) -> Tensor:
    unit = _as_unit(pictures)  # once: every function below takes it as it is
    light = luminance(unit)
    columns = (
        row_mean(light).float(),
        saturation(unit),
        _contrast(light).float(),
        _edge_energy(light).float(),
        _high_frequency_ratio(light).float(),
    )
    return torch.stack(columns, dim=1)


def thumbnails(pictures: Tensor, size: int = THUMBNAIL_SIZE) -> Tensor:
    """Area averages of pictures in `size` x `size` cells.

    Args:
        pictures: As for `luminance`.
        size: Cells along each axis, whatever the shape of the picture.

    Returns:
        float32 [N, 3, size, size] in [0, 1]; gray pictures have three equal channels.
    """
    unit = _as_unit(pictures)
    return torch.nn.functional.adaptive_avg_pool2d(unit.double(), size).expand(-1, 3, -1, -1).float().contiguous()


def group_diversity(members: Tensor, metric: DiversityMetric = "rms") -> float:
    """How different the members of a group are: the mean distance over all pairs.

    * `rms`: the root mean square of the difference of two thumbnails, over channels and cells. It sees everything that
      can be seen at this size, and fine noise, which is no diversity, averages out.
    * `correlation`: 1 - r, with r the correlation of the two thumbnails. It does not change with brightness and
      contrast, and so tells members that have become alike (it falls) from pictures that have become faint (it does
      not, while `rms` falls). A picture of one colour has nothing to correlate: two of them have distance 0, one and
      a picture with content 1.

    Neither knows what is shown: a shape that has moved by its own width differs as much as another shape.

    Args:
        members: [K, ...], thumbnails of one group, in the order of the members.
        metric: The distance.

    Returns:
        The mean over the K (K - 1) / 2 pairs, rounded to float32; 0 for less than two members.
    """
    if metric not in ("rms", "correlation"):
        raise ValueError(f"metric {metric!r} is not one of 'rms', 'correlation'.")
    count = members.shape[0]
    if count < 2:
        return 0.0
    rows = members.reshape(count, -1).to(torch.float64)
    first, second = torch.triu_indices(count, count, offset=1)
    if metric == "rms":
        distances = row_mean((rows[first] - rows[second]).square()).sqrt()
    else:
        centred = rows - rows.mean(dim=1, keepdim=True)
        norms = centred.square().sum(dim=1).sqrt()
        content = norms > _FLAT * rows.shape[1] ** 0.5
        unit = torch.where(content[:, None], centred / torch.where(content, norms, 1.0)[:, None], 0.0)
        blank = ~content[first] & ~content[second]
        distances = torch.where(blank, 0.0, 1.0 - (unit[first] * unit[second]).sum(dim=1))
    return float(distances.mean().float())


def sample_frames(sample: BaseSample) -> Tensor | None:
    """What is measured of a sample: its picture as [1, C, H, W], or at most `VIDEO_FRAMES` of its frames.

    Returns:
        uint8 [F, C, H, W], or None for a sample without decoded pictures (sound alone, or latents that an algorithm
        never decodes).
    """
    if isinstance(sample, ImageSample):
        return None if sample.image is None else sample.image[None]
    if isinstance(sample, VideoSample) and sample.video is not None:
        last = sample.video.shape[0] - 1
        if last < VIDEO_FRAMES:
            return sample.video  # none of them twice, which would weigh it more
        return sample.video[[round(i * last / (VIDEO_FRAMES - 1)) for i in range(VIDEO_FRAMES)]]
    return None


def sample_statistics(frames: Sequence[Tensor]) -> Tensor:
    """Statistics of samples, averaged over the frames of each; float32 [len(frames), 5].

    Args:
        frames: One [F, C, H, W] per sample (see `sample_frames`); sizes may differ between samples.
    """
    if not frames:
        return torch.empty((0, len(PICTURE_STATISTICS)))
    rows = [picture_statistics(stack) for stack in _stacks(frames)]
    parts = torch.cat(rows).to(torch.float64).split([f.shape[0] for f in frames])
    return torch.stack([part.mean(dim=0) for part in parts]).float()


def _stacks(frames: Sequence[Tensor]) -> list[Tensor]:
    """Neighbours of equal size, joined: one pass over many small pictures is several times faster than many passes."""
    stacks: list[list[Tensor]] = []
    for item in frames:
        if stacks and stacks[-1][0].shape[1:] == item.shape[1:] and stacks[-1][0].dtype == item.dtype:
            stacks[-1].append(item)
        else:
            stacks.append([item])
    return [torch.cat(stack) for stack in stacks]


def _contrast(light: Tensor) -> Tensor:
    mean = row_mean(light)
    return row_mean((light - mean[:, None, None]).square()).sqrt()  # in float64, as the mean is


def _edge_energy(light: Tensor) -> Tensor:
    height, width = light.shape[1:]
    if min(height, width) < 2:
        raise ValueError(f"a picture of {height} x {width} pixels has no gradient; it needs two along each axis.")
    across = light[:, :-1, 1:] - light[:, :-1, :-1]
    down = light[:, 1:, :-1] - light[:, :-1, :-1]
    return row_mean((across * across + down * down).sqrt())


def _high_frequency_ratio(light: Tensor) -> Tensor:
    height, width = light.shape[1:]
    light = light.to(torch.float64)
    windows = [torch.hann_window(n, periodic=True, dtype=light.dtype, device=light.device) for n in (height, width)]
    window = windows[0][:, None] * windows[1]
    # The mean under the window: then the windowed picture has none, whatever its brightness.
    mean = (window * light).sum(dim=(1, 2)) / window.sum()
    windowed = window * (light - mean[:, None, None])
    power = torch.fft.rfft2(windowed).abs().square()
    # The transform of real values keeps one of each pair of conjugate columns; the outer ones have no partner.
    pairs = torch.full((width // 2 + 1,), 2.0, dtype=light.dtype, device=light.device)
    pairs[0] = 1.0
    if width % 2 == 0:
        pairs[-1] = 1.0
    power = power * pairs
    fy, fx = torch.fft.fftfreq(height, dtype=light.dtype), torch.fft.rfftfreq(width, dtype=light.dtype)
    fine = (torch.hypot(fy[:, None], fx) > HIGH_FREQUENCY).to(light.device)
    total, high = power.sum(dim=(1, 2)), (power * fine).sum(dim=(1, 2))
    flat = row_mean(windowed.square()) < _FLAT**2
    return torch.where(flat, 0.0, high / torch.where(flat, 1.0, total))


def _check(pictures: Tensor) -> None:
    if pictures.ndim != 4 or pictures.shape[1] not in (1, 3):
        raise ValueError(f"pictures of shape {tuple(pictures.shape)} are not [N, C, H, W] with 1 or 3 channels.")
    if pictures.dtype != torch.uint8 and not pictures.is_floating_point():
        raise ValueError(f"pictures of dtype {pictures.dtype} are neither uint8 nor floating point in [0, 1].")


def _as_unit(pictures: Tensor) -> Tensor:
    """float32 in [0, 1]."""
    _check(pictures)
    unit = pictures.to(torch.float32)
    return unit / 255 if pictures.dtype == torch.uint8 else unit
