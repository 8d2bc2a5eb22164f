"""Size of the JPEG file: the two rewards of DDPO that need no judge.

Black et al., "Training Diffusion Models with Reinforcement Learning" (arXiv 2305.13301): the size of the image's file
as a JPEG of quality 95, in kilobytes (1000 bytes). Incompressibility maximises it, compressibility its negative.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from flow_factory.rewards.abc import PointwiseRewardModel

if TYPE_CHECKING:
    from flow_factory.samples import BaseSample, ImageSample

QUALITY = 95


def jpeg_kilobytes(sample: ImageSample) -> float:
    """Size of `sample.image` as a JPEG of quality 95, in units of 1000 bytes."""
    buffer = io.BytesIO()
    sample.pil.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class JpegIncompressibility(PointwiseRewardModel):
    """Kilobytes of the image as a JPEG: higher for busier pictures."""

    required_fields = ("image",)

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One size per sample, in kB."""
        return [jpeg_kilobytes(cast("ImageSample", sample)) for sample in samples]


class JpegCompressibility(PointwiseRewardModel):
    """Minus the kilobytes of the image as a JPEG: higher for smoother pictures."""

    required_fields = ("image",)

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One negative size per sample, in kB."""
        return [-jpeg_kilobytes(cast("ImageSample", sample)) for sample in samples]
