"""Bands and alarms: an alarm needs a reward that rises and a statistic that leaves its band, and comes once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from flow_factory.samples.statistics import PICTURE_STATISTICS, sample_statistics
from flow_factory.tracking.monitors import (
    REWARD_RISE,
    SMOOTHING,
    SPREAD_DEGREES,
    Alarm,
    HackingMonitor,
    MonitorBand,
    student_quantile,
)

GROUPS, MEMBERS = 8, 4


def cycle(number: int, *, light: float = 1.0, texture: float = 0.0) -> dict[str, list[float]]:
    """Statistics of made-up pictures of eight prompts: gray levels and slopes of their own, darkened, textured."""
    generator = torch.Generator().manual_seed(number)
    statistics: dict[str, list[float]] = {name: [] for name in PICTURE_STATISTICS}
    slope = torch.linspace(-1, 1, 32)
    for _ in range(GROUPS):
        level = 0.5 + 0.1 * float(torch.randn((), generator=generator))
        tilt = 0.2 + 0.05 * float(torch.randn((), generator=generator))
        noise = torch.randn(MEMBERS, 3, 32, 32, generator=generator)
        pictures = (level + tilt * slope + (0.03 + texture) * noise).clamp(0, 1) * light
        rows = sample_statistics([(p * 255).byte()[None] for p in pictures])
        for name, column in zip(PICTURE_STATISTICS, rows.T, strict=True):
            statistics[name].append(float(column.mean()))
    return statistics


def rewards(number: int, gain: float = 0.0) -> list[float]:
    generator = torch.Generator().manual_seed(1000 + number)
    return (0.5 + gain + 0.05 * torch.randn(GROUPS, generator=generator)).tolist()


def follow(monitor: HackingMonitor, cycles: Sequence[tuple[dict[str, list[float]], list[float]]]) -> list[list[Alarm]]:
    return [monitor.observe(statistics, reward) for statistics, reward in cycles]


def test_a_rising_reward_and_darkening_pictures_raise_an_alarm() -> None:
    monitor = HackingMonitor(3.0)
    steps = [(cycle(n, light=1 - 0.06 * n), rewards(n, 0.03 * n)) for n in range(12)]
    alarms = [alarm for new in follow(monitor, steps) for alarm in new]
    by_name = {alarm.statistic: alarm for alarm in alarms}
    assert "brightness" in by_name and len(by_name) == len(alarms), "once per statistic"
    alarm = by_name["brightness"]
    assert alarm.value < alarm.low < alarm.first < alarm.high
    assert alarm.reward > alarm.reward_first
    assert "brightness" in alarm.message and "below" in alarm.message and "dark" in alarm.message
    assert f"{alarm.low:.4g}" in alarm.message and f"{alarm.value:.4g}" in alarm.message
    assert alarm.row()["message"] == alarm.message and alarm.row()["statistic"] == "brightness"


def test_a_rising_reward_and_a_fine_texture_raise_an_alarm() -> None:
    monitor = HackingMonitor(3.0)
    steps = [(cycle(n, texture=0.02 * n), rewards(n, 0.03 * n)) for n in range(12)]
    alarms = {alarm.statistic: alarm for new in follow(monitor, steps) for alarm in new}
    assert {"edge_energy", "high_frequency_ratio"} <= set(alarms) and "brightness" not in alarms
    assert alarms["high_frequency_ratio"].value > alarms["high_frequency_ratio"].high
    assert "above" in alarms["high_frequency_ratio"].message and "texture" in alarms["high_frequency_ratio"].message


def test_a_rising_reward_alone_raises_none() -> None:
    monitor = HackingMonitor(3.0)
    assert not any(follow(monitor, [(cycle(n), rewards(n, 0.03 * n)) for n in range(12)]))
    assert monitor.reward_has_risen()


def test_darkening_pictures_alone_raise_none() -> None:
    monitor = HackingMonitor(3.0)
    assert not any(follow(monitor, [(cycle(n, light=1 - 0.06 * n), rewards(0)) for n in range(12)]))
    low, _ = monitor.limits()["brightness"]
    assert monitor.smoothed["brightness"] < low and not monitor.reward_has_risen()


def test_without_rewards_there_is_no_alarm() -> None:
    monitor = HackingMonitor(3.0)
    assert not any(follow(monitor, [(cycle(n, light=1 - 0.06 * n), []) for n in range(12)]))


def around(value: float) -> dict[str, list[float]]:
    """So many groups that the first cycle alone makes the band."""
    return {"brightness": (value + torch.linspace(-0.1, 0.1, SPREAD_DEGREES + 1)).tolist()}


def test_an_alarm_stands_until_the_statistic_has_come_back() -> None:
    monitor = HackingMonitor(2.0)
    monitor.observe(around(0.5), [0.0, 0.1, 0.2])
    low, high = monitor.limits()["brightness"]
    beyond = low - 0.05

    def step(value: float) -> int:
        monitor.smoothed["brightness"] = value  # where smoothing would bring it
        return len(monitor.observe(around(value), [5.0, 5.1, 5.2]))

    assert [step(beyond), step(beyond), step(beyond)] == [1, 0, 0]
    just_inside = low + 0.1 * (0.5 - low)
    assert [step(just_inside), step(beyond)] == [0, 0], "a value that wavers at the edge is one alarm"
    assert [step(0.5 - 0.2 * (high - low)), step(beyond)] == [0, 1], "back in the inner half, and out again"


def test_resumed_state_goes_on_the_same() -> None:
    steps = [(cycle(n, light=1 - 0.06 * n), rewards(n, 0.03 * n)) for n in range(12)]
    whole, first, second = HackingMonitor(3.0), HackingMonitor(3.0), HackingMonitor(3.0)
    expected = follow(whole, steps)
    got = follow(first, steps[:5])
    second.load_state_dict(first.state_dict())
    got += follow(second, steps[5:])
    assert got == expected and any(expected)
    assert second.state_dict() == whole.state_dict()


def test_the_band_by_hand() -> None:
    """Values 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 3; Student's t of 3 degrees at 1.959964 sigma is 3.1824.

    Then 10, 12 about their own mean 11: variance (14 + 2) / 4, t of 4 degrees 2.7764; the centre stays.
    """
    band = MonitorBand.of([1.0, 6.0, 3.0, 2.0])
    assert (band.mean, band.groups) == (3.0, 4) and band.spread == pytest.approx(math.sqrt(14 / 3))
    error = math.sqrt(14 / 3) * math.sqrt(1 / 4 + SMOOTHING / (2 - SMOOTHING) / 4)
    assert band.standard_error == pytest.approx(error)
    low, high = band.limits(1.959963985)
    assert high - 3 == pytest.approx(3.182446305 * error, rel=1e-7) and 3 - low == pytest.approx(high - 3)
    refined = band.refined([10.0, 12.0])
    assert (refined.mean, refined.groups, refined.spread) == (3.0, 4, 2.0)
    error = 2 * math.sqrt(1 / 4 + SMOOTHING / (2 - SMOOTHING) / 4)
    assert refined.limits(1.959963985)[1] - 3 == pytest.approx(2.776445105 * error, rel=1e-7)


def test_many_prompts_need_no_refinement_and_a_single_one_has_nothing_to_refine() -> None:
    values = torch.arange(SPREAD_DEGREES + 1.0).tolist()
    assert MonitorBand.of(values).refined([0.0, 100.0]) == MonitorBand.of(values)
    assert MonitorBand.of(values[1:]).refined([0.0, 100.0]) != MonitorBand.of(values[1:])
    assert MonitorBand.of([0.5]).refined([0.9]).limits(3.0) == (-math.inf, math.inf)


def test_the_standard_error_is_that_of_a_policy_that_does_not_change() -> None:
    """Monte Carlo: the smoothed value after 40 cycles of 8 new prompts each, about the first cycle's mean."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(20000, 40, generator=generator, dtype=torch.float64) / math.sqrt(8)
    smoothed = means[:, 0]
    for later in means[:, 1:].unbind(1):
        smoothed = smoothed + SMOOTHING * (later - smoothed)
    expected = MonitorBand(0.0, 8, 7.0, 7).standard_error
    assert float((smoothed - means[:, 0]).std()) == pytest.approx(expected, rel=0.03)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Normal prompts and a policy that does not change: the share of runs that are outside the band after 12 cycles.

    Two-sided 3 sigma is 0.0027; the spread is estimated from few prompts, which is what Student's t is for.
    """
    generator = torch.Generator().manual_seed(1)
    outside = runs = 0
    for values in torch.randn(3000, 12, 8, generator=generator, dtype=torch.float64):
        monitor = HackingMonitor(3.0)
        for groups in values.tolist():
            monitor.observe({"brightness": groups}, [])
        low, high = monitor.limits()["brightness"]
        outside, runs = outside + (not low <= monitor.smoothed["brightness"] <= high), runs + 1
    assert outside / runs < 0.0027 + 3 * math.sqrt(0.0027 / runs)


def test_the_reward_must_rise_by_more_than_chance() -> None:
    monitor = HackingMonitor(3.0)
    monitor.observe({}, [0.0, 1.0])
    band = monitor.bands["reward"]
    limit = 0.5 + REWARD_RISE * math.sqrt(0.5) * math.sqrt((1 + SMOOTHING / (2 - SMOOTHING)) / 2)
    assert band.mean + REWARD_RISE * band.standard_error == pytest.approx(limit)
    monitor.smoothed["reward"] = limit - 1e-9
    assert not monitor.reward_has_risen()
    monitor.smoothed["reward"] = limit + 1e-9
    assert monitor.reward_has_risen()


def test_equal_groups_still_have_a_band_and_one_group_has_none() -> None:
    assert MonitorBand.of([0.5, 0.5]).limits(3.0) == (0.499, 0.501)
    assert MonitorBand.of([0.5]).limits(3.0) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062047), (2, 4.30265273), (3, 3.18244631), (8, 2.30600414), (30, 2.04227246)]
)
def test_student_quantiles_against_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(1.959963985, degrees) == pytest.approx(expected, rel=1e-6)


def test_student_quantiles_tend_to_the_normal_ones() -> None:
    assert [student_quantile(z, 100000) for z in (1.0, 3.0)] == pytest.approx([1.0, 3.0], rel=1e-4)


@pytest.mark.parametrize("degrees", [2, 5, 6, 11])
def test_student_quantiles_against_the_integrated_density(degrees: int) -> None:
    """Simpson's rule over the density, with its gamma functions."""
    quantile, n = student_quantile(2.0, degrees), 20000
    t = torch.linspace(0, quantile, n + 1, dtype=torch.float64)
    density = (1 + t**2 / degrees) ** (-(degrees + 1) / 2) * math.exp(
        math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    )
    weights = torch.ones(n + 1, dtype=torch.float64)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    inside = 2 * float((weights * density).sum()) * quantile / n / 3
    assert inside == pytest.approx(math.erf(2.0 / math.sqrt(2)), rel=1e-9)
