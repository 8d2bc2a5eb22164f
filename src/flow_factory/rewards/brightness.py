"""Mean luminance of an image or a video: the smallest reward with a setting, and a good one to watch a loop with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from flow_factory.hparams.types import Fraction
from flow_factory.rewards.abc import PointwiseRewardModel

if TYPE_CHECKING:
    from flow_factory.samples import BaseSample, ImageSample, VideoSample

REC_709 = (0.2126, 0.7152, 0.0722)
"""Weights of red, green and blue in luminance (ITU-R BT.709), applied to the stored values."""


@dataclass
class BrightnessParams:
    """Settings of `brightness`."""

    target: Fraction | None = field(
        default=None,
        metadata={"help": "Mean luminance to aim at, 0 (black) to 1 (white); null: the brighter the better."},
    )


class Brightness(PointwiseRewardModel):
    """Mean luminance in [0, 1], or minus its distance from `target`."""

    required_fields = ("frames",)
    Params = BrightnessParams

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One number per sample."""
        values = [self._luminance(cast("ImageSample | VideoSample", sample)) for sample in samples]
        target = self.params.target
        return [value if target is None else -abs(value - target) for value in values]

    @staticmethod
    def _luminance(sample: ImageSample | VideoSample) -> float:
        import numpy as np

        assert sample.frames is not None  # required
        pixels = sample.frames.numpy()  # [F, 3, H, W]; summed as integers, for a video in float64 fills the memory
        means = pixels.sum(axis=(0, 2, 3), dtype=np.int64) / (pixels.size // pixels.shape[1])
        return float(means @ np.array(REC_709)) / 255
