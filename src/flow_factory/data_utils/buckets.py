"""Aspect-ratio buckets: which size each picture of a mixed dataset is trained at, so that a batch has one size.

Pure functions of the pictures' sizes; the same on every rank and in every run. As in NovelAI's "Improvements on Stable
Diffusion" (2022), every bucket has about the area of the configured resolution, and a picture goes to the bucket whose
aspect ratio is nearest to its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Size = tuple[int, int]
"""Height and width in pixels."""

MAX_ASPECT_RATIO = 4.0
"""Longest side over shortest; pictures beyond it are cut to it."""


def bucket_sizes(resolution: Size, multiple: int) -> tuple[Size, ...]:
    """The sizes that pictures may be trained at.

    Args:
        resolution: The configured size; its area bounds that of every bucket, and it is a bucket itself.
        multiple: Heights and widths are multiples of this.

    Returns:
        Sizes by rising aspect ratio (height / width): for each short side the longest that fits the area, both ways.
    """
    area = resolution[0] * resolution[1]
    sizes = {resolution}
    for short in range(multiple, math.isqrt(area) + 1, multiple):
        long = area // short // multiple * multiple
        if long <= MAX_ASPECT_RATIO * short:
            sizes |= {(short, long), (long, short)}
    return tuple(sorted(sizes, key=lambda size: size[0] / size[1]))


def assign_buckets(pictures: Sequence[Size], sizes: Sequence[Size], smallest: int = 1) -> list[Size]:
    """The size that each picture is trained at.

    A bucket with fewer pictures than `smallest` would never fill a batch, so its pictures go to the nearest bucket that
    is left; the smallest bucket goes first.

    Args:
        pictures: Their sizes.
        sizes: The buckets.
        smallest: Pictures that a bucket must have (a global batch).

    Returns:
        One of `sizes` for each picture.
    """
    open_sizes = list(sizes)
    chosen = [nearest_bucket(picture, open_sizes) for picture in pictures]
    while True:
        counts = Counter(chosen)
        small = sorted((count, size) for size, count in counts.items() if count < smallest)
        if not small or len(counts) == 1:
            return chosen
        _, closed = small[0]
        open_sizes = [size for size in counts if size != closed]
        chosen = [nearest_bucket(p, open_sizes) if s == closed else s for p, s in zip(pictures, chosen, strict=True)]


def nearest_bucket(picture: Size, sizes: Sequence[Size]) -> Size:
    """The size whose aspect ratio is nearest on a logarithmic scale; of two as near, the larger, then the taller."""
    ratio = math.log(picture[0] / picture[1])
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - ratio), -size[0] * size[1], -size[0]))
