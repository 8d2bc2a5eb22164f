"""Training times: strata, shifts and ranges, and every step as likely as the next."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.scheduler.training_times import draw_sigmas, draw_steps, shift_sigma


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_larger_shift_raises_the_mean_sigma() -> None:
    """Pitfall 9: the shift acts on sigma, not on the fraction of the way from noise to data."""
    means = []
    for shift in (0.5, 1.0, 3.0, 6.0):
        sampling = TimeSampling("uniform", 4000, (0.0, 1.0), shift)
        means.append(float(draw_sigmas(sampling, 4000, generator()).mean()))
    assert means == sorted(means) and means[1] == pytest.approx(0.5, abs=6e-3)
    # E[k u / (1 + (k - 1) u)] in closed form, k = 3.
    k = torch.tensor(3.0, dtype=torch.float64)
    assert means[2] == pytest.approx(float(k / (k - 1) - k * k.log() / (k - 1) ** 2), abs=1e-3)


def test_shift_keeps_the_ends_and_is_the_known_form() -> None:
    assert shift_sigma(torch.tensor([0.0, 0.5, 1.0]), 3.0).tolist() == [0.0, 0.75, 1.0]


@pytest.mark.parametrize("timestep_range", [(0.0, 1.0), (0.0, 0.6), (0.25, 0.5)])
def test_each_stratum_holds_one_uniform_time(timestep_range: tuple[float, float]) -> None:
    low, high = timestep_range
    for seed in range(20):
        sigma = draw_sigmas(TimeSampling("uniform", 8, timestep_range), 8, generator(seed)).double()
        fraction = (sigma - (1 - high)) / (high - low)
        assert sorted((fraction * 8 - 1e-6).floor().clamp(min=0).int().tolist()) == list(range(8))
        assert float(sigma.min()) >= 1 - high and float(sigma.max()) <= 1 - low


def test_logit_normal_has_its_quantiles() -> None:
    """Stratified through the inverse distribution function: the empirical quantiles are those of the law."""
    sampling = TimeSampling("logit_normal", 2000, (0.0, 1.0), 1.0, logit_mean=0.4, logit_std=1.5)
    sigma = draw_sigmas(sampling, 2000, generator()).double().sort().values
    normal = torch.distributions.Normal(0.4, 1.5)
    places = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    expected = normal.icdf(places).sigmoid().clamp(0.01, 1 - 1e-6)
    assert (sigma[5:-5] - expected[5:-5]).abs().max() < 2e-3


def test_times_come_in_random_order() -> None:
    sampling = TimeSampling("uniform", 6, (0.0, 1.0))
    orders = {tuple(draw_sigmas(sampling, 6, generator(seed)).argsort().tolist()) for seed in range(30)}
    assert len(orders) > 20


def test_grid_steps_are_counted_as_the_recipes_count() -> None:
    assert TimeSampling("discrete", 0, (0.0, 0.99)).steps(10) == tuple(range(9))  # the last step is out
    assert TimeSampling("discrete", 0, (0.0, 1.0)).steps(10) == tuple(range(10))
    assert TimeSampling("discrete", 0, (0.2, 0.6)).steps(10) == (2, 3, 4, 5)
    assert TimeSampling("discrete", 0, (0.0, 0.29)).steps(100) == tuple(range(29))  # 0.29 x 100 is 28.999... in binary
    assert TimeSampling("discrete_wo_init", 0, (0.0, 0.9)).steps(14) == tuple(range(1, 12))
    assert TimeSampling("discrete_with_init", 0, (0.4, 0.6)).steps(10) == (0, 4, 5)
    assert TimeSampling("uniform", 0, (0.0, 0.99)).num_times(40) == 39
    assert TimeSampling("discrete", 3, (0.0, 0.05)).num_times(10) == 0


def test_all_steps_are_a_permutation() -> None:
    for seed in range(5):
        drawn = draw_steps(TimeSampling("discrete", 0, (0.0, 0.99)), 10, generator(seed))
        assert sorted(drawn.tolist()) == list(range(9))
    assert (
        len({tuple(draw_steps(TimeSampling("discrete", 0, (0, 0.99)), 10, generator(s)).tolist()) for s in range(9)})
        > 7
    )


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 9])
def test_steps_are_distinct_equally_likely_and_one_per_sub_range(count: int) -> None:
    sampling, candidates, trials = TimeSampling("discrete", count, (0.0, 0.99)), 9, 3000
    seen: Counter[int] = Counter()
    for seed in range(trials):
        drawn = sorted(draw_steps(sampling, 10, generator(seed)).tolist())
        assert len(set(drawn)) == count
        seen.update(drawn)
        for i, step in enumerate(drawn):  # the i-th of `count` equal sub-ranges of [0, 9)
            assert step >= int(i * candidates / count) and step < (i + 1) * candidates / count
    for step in range(candidates):  # the last index of the range too
        assert seen[step] / trials == pytest.approx(count / candidates, abs=0.05)


def test_more_times_than_steps_visit_every_step_about_equally() -> None:
    """CRD trains 20 times on the 9 steps of a range: twice or three times each."""
    for seed in range(10):
        counts = Counter(draw_steps(TimeSampling("discrete", 20, (0.0, 0.99)), 10, generator(seed)).tolist())
        assert set(counts) == set(range(9)) and set(counts.values()) == {2, 3}


def test_step_zero_always_or_never() -> None:
    for seed in range(50):
        with_init = draw_steps(TimeSampling("discrete_with_init", 3, (0.0, 0.9)), 10, generator(seed)).tolist()
        assert with_init.count(0) == 1 and len(set(with_init)) == 3
        without = draw_steps(TimeSampling("discrete_wo_init", 3, (0.0, 0.9)), 10, generator(seed)).tolist()
        assert 0 not in without and len(set(without)) == 3
    assert draw_steps(TimeSampling("discrete_with_init", 1, (0.0, 0.9)), 10, generator()).tolist() == [0]


def test_wrong_uses_are_said() -> None:
    with pytest.raises(InputError, match=r"train\.timestep_range .* holds no step of a grid of 4 steps"):
        draw_steps(TimeSampling("discrete", 2, (0.0, 0.2)), 4, generator())
    with pytest.raises(ValueError, match="draw_steps"):
        draw_sigmas(TimeSampling("discrete", 2, (0.0, 0.9)), 2, generator())
