"""Aspect-ratio buckets: their sizes, and which picture goes where."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from flow_factory.data_utils.buckets import MAX_ASPECT_RATIO, assign_buckets, bucket_sizes, nearest_bucket


@pytest.mark.parametrize(
    ("resolution", "multiple"), [((64, 64), 8), ((512, 512), 16), ((1024, 1024), 16), ((480, 832), 32)]
)
def test_sizes_fill_the_area_and_fit_the_model(resolution: tuple[int, int], multiple: int) -> None:
    sizes = bucket_sizes(resolution, multiple)
    area = resolution[0] * resolution[1]
    assert resolution in sizes and len(set(sizes)) == len(sizes)
    for height, width in sizes:
        assert height % multiple == width % multiple == 0 and height * width <= area
        assert max(height / width, width / height) <= MAX_ASPECT_RATIO
        # Nothing is wasted: the long side could not grow by one multiple.
        if (height, width) != resolution:
            assert (max(height, width) + multiple) * min(height, width) > area
        assert (width, height) in sizes or (height, width) == resolution
    ratios = [height / width for height, width in sizes]
    assert ratios == sorted(ratios)


def test_a_picture_goes_to_the_nearest_aspect_ratio() -> None:
    sizes = bucket_sizes((64, 64), 8)
    generator = random.Random(0)
    for _ in range(200):
        picture = (generator.randint(1, 4000), generator.randint(1, 4000))
        chosen = nearest_bucket(picture, sizes)
        distances = {size: abs(math.log(size[0] / size[1]) - math.log(picture[0] / picture[1])) for size in sizes}
        assert distances[chosen] == min(distances.values())
    assert nearest_bucket((1000, 1000), sizes) == (64, 64)
    assert nearest_bucket((10, 5000), sizes) == (32, 128), "beyond the last ratio, the last"


def test_buckets_too_small_for_a_batch_join_their_neighbours() -> None:
    sizes = bucket_sizes((64, 64), 8)
    pictures = [(64, 64)] * 5 + [(96, 40)] * 2 + [(80, 48)] * 3 + [(32, 128)]
    assert Counter(assign_buckets(pictures, sizes)) == {(64, 64): 5, (96, 40): 2, (80, 48): 3, (32, 128): 1}
    joined = assign_buckets(pictures, sizes, smallest=4)
    assert Counter(joined) == {(64, 64): 6, (80, 48): 5}
    assert joined[5:7] == [(80, 48)] * 2, "not to the largest bucket, to the nearest"


def test_too_few_pictures_end_in_one_bucket() -> None:
    sizes = bucket_sizes((64, 64), 8)
    assert len(set(assign_buckets([(64, 64), (96, 40), (40, 96)], sizes, smallest=8))) == 1


def test_assignment_does_not_depend_on_the_order_of_the_pictures() -> None:
    sizes = bucket_sizes((512, 512), 16)
    generator = random.Random(1)
    pictures = [(generator.randint(200, 2000), generator.randint(200, 2000)) for _ in range(300)]
    chosen = dict(zip(pictures, assign_buckets(pictures, sizes, smallest=16), strict=True))
    shuffled = generator.sample(pictures, len(pictures))
    assert dict(zip(shuffled, assign_buckets(shuffled, sizes, smallest=16), strict=True)) == chosen
    assert min(Counter(chosen.values()).values()) >= 16
