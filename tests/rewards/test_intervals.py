"""The bootstrap of mean rewards: against the normal limit, exact cases, and its coverage."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.rewards.intervals import bootstrap_mean


def test_equals_the_normal_interval_of_many_units() -> None:
    """With 2,000 independent values the percentile interval is mean +- 1.96 s / sqrt(n)."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bootstrap_mean(x.tolist(), list(range(2000)))
    half = 1.959964 * x.std(unbiased=False).item() / math.sqrt(2000)
    assert found.mean == pytest.approx(x.mean().item(), abs=1e-12)
    assert found.low == pytest.approx(found.mean - half, abs=0.03 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.03 * half)


def test_two_units_are_enumerated_by_hand() -> None:
    """Means of two draws from {0, 1}: 0, 1/2, 1/2, 1 with probability 1/4 each, so the 95 % interval is [0, 1]."""
    found = bootstrap_mean([0.0, 1.0], [7, 9])
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    inner = bootstrap_mean([0.0, 1.0], [7, 9], level=0.4)  # quantiles 0.3 and 0.7 fall on 1/2
    assert (inner.low, inner.high) == (0.5, 0.5)


def test_all_samples_of_a_prompt_are_one_unit() -> None:
    """Repeating every value says nothing new: the interval must not shrink as that of independent values would."""
    x = torch.rand(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    once = bootstrap_mean(x, list(range(30)))
    repeated = bootstrap_mean(x * 8, list(range(30)) * 8)
    assert (repeated.mean, repeated.low, repeated.high) == pytest.approx((once.mean, once.low, once.high), abs=1e-12)
    assert repeated.units == 30 and repeated.values == 240
    independent = bootstrap_mean(x * 8, list(range(240)))
    assert (
        independent.high is not None and independent.low is not None and once.high is not None and once.low is not None
    )
    assert (independent.high - independent.low) < 0.5 * (once.high - once.low)


def test_units_of_different_sizes_weigh_by_their_samples() -> None:
    found = bootstrap_mean([0.0, 0.0, 0.0, 1.0], [5, 5, 5, -6])
    assert found.mean == 0.25
    assert (found.low, found.high) == (0.0, 1.0)


def test_equal_values_have_no_width_and_one_unit_has_no_interval() -> None:
    same = bootstrap_mean([0.1] * 10, list(range(10)))
    assert same.low == same.high == pytest.approx(0.1, abs=1e-15)
    alone = bootstrap_mean([1.0, 3.0], [4, 4])
    assert (alone.mean, alone.low, alone.high, alone.units) == (2.0, None, None, 1)


def test_is_seeded_and_leaves_the_global_generator_alone() -> None:
    values, units = [0.1, 0.5, 0.9, 0.2], [1, 2, 3, 4]
    state = torch.get_rng_state()
    assert bootstrap_mean(values, units) == bootstrap_mean(values, units)
    assert torch.equal(torch.get_rng_state(), state)


def test_covers_the_true_mean_about_as_often_as_it_says() -> None:
    """200 experiments of 40 prompts x 2 samples: between 88 and 99 % of the intervals hold the mean."""
    generator = torch.Generator().manual_seed(3)
    hits = 0
    for experiment in range(200):
        prompt = torch.randn(40, 1, generator=generator, dtype=torch.float64)
        x = (prompt + 0.3 * torch.randn(40, 2, generator=generator, dtype=torch.float64)).flatten().tolist()
        found = bootstrap_mean(x, [i // 2 for i in range(80)], resamples=1000, seed=experiment)
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 values"):
        bootstrap_mean([], [])
    with pytest.raises(ValueError, match="1 units"):
        bootstrap_mean([1.0, 2.0], [1])
