"""Mean luminance of an image: the smallest reward with a setting of its own, and a good one to watch a loop with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from flow_factory.hparams.types import Fraction
from flow_factory.rewards.abc import PointwiseRewardModel

if TYPE_CHECKING:
    from flow_factory.samples import BaseSample, ImageSample

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

    required_fields = ("image",)
    Params = BrightnessParams

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One number per sample."""
        values = [self._luminance(cast("ImageSample", sample)) for sample in samples]
        target = self.params.target
        return [value if target is None else -abs(value - target) for value in values]

    @staticmethod
    def _luminance(sample: ImageSample) -> float:
        import numpy as np

        pixels = np.asarray(sample.pil, dtype=np.float64)  # [H, W, 3]
        return float(pixels.mean(axis=(0, 1)) @ np.array(REC_709)) / 255
