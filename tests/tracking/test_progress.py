"""Progress lines."""

from __future__ import annotations

import io

import pytest

from flow_factory.tracking.progress import ProgressDisplay, format_duration, format_number


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_one_per_phase_and_one_per_cycle():
    clock, stream = Clock(), io.StringIO()
    display = ProgressDisplay(stream=stream, clock=clock)
    for cycle in (1, 2, 3):
        display.enter_phase("rollout", cycle, 3)
        with display.count("rollout", 48, scale=2) as advance:
            for _ in range(4):
                clock.now += 0.5
                advance(12)
        display.enter_phase("optimize", cycle, 3)
        clock.now += 38.0 + 10 * cycle
        display.end_cycle(
            cycle,
            {
                "reward/match/mean": 0.7104,
                "reward/match/std": 9.0,
                "loss": 0.01234567,
                "first_update/ratio_deviation_max": 0,
            },
        )
    assert stream.getvalue().splitlines() == [
        "cycle 1/3 | rollout  | 96 images | 48.0 images/s | 2.0s",
        "cycle 1/3 | optimize | 48.0s",
        "cycle 1/3 | reward 0.7104 | loss 0.01235 | ratio dev 0 | 50.0s | eta 1m40s",
        "cycle 2/3 | rollout  | 96 images | 48.0 images/s | 2.0s",
        "cycle 2/3 | optimize | 58.0s",
        "cycle 2/3 | reward 0.7104 | loss 0.01235 | ratio dev 0 | 1m00s | eta 55.0s",
        "cycle 3/3 | rollout  | 96 images | 48.0 images/s | 2.0s",
        "cycle 3/3 | optimize | 1m08s",
        "cycle 3/3 | reward 0.7104 | loss 0.01235 | ratio dev 0 | 1m10s",
    ]


def test_several_rewards_are_named():
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream)
    display.end_cycle(1, {"reward/match/mean": 0.5, "reward/brightness/mean": 0.25, "reward/failed_ratio": 0.0})
    assert stream.getvalue() == "cycle 1 | match 0.5000 | brightness 0.2500\n"
    stream.truncate(stream.seek(0))
    display.end_cycle(1, {"reward/match/mean": 0.5, "reward/blur/mean": 0.25, "reward/total/mean": 0.75})
    display.end_cycle(2, {"reward/match/mean": 0.5, "reward/total/mean": 1.5})
    lines = ["cycle 1 | reward 0.7500 | match 0.5000 | blur 0.2500", "cycle 2 | reward 1.500"]
    assert stream.getvalue().splitlines() == lines


def test_without_an_end_there_is_no_eta_and_disabled_is_silent():
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream)
    display.enter_phase("rollout", 1, None)
    display.end_cycle(1, {})
    assert "eta" not in stream.getvalue() and stream.getvalue().startswith("cycle 1 | rollout")
    silent = io.StringIO()
    display = ProgressDisplay(enabled=False, stream=silent, plain=False)
    display.enter_phase("rollout", 1, 2)
    with display.count("rollout", 3) as advance:
        advance(3)
    display.end_cycle(1, {"loss": 1.0})
    assert silent.getvalue() == ""


def test_a_terminal_gets_the_same_lines():
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream, plain=False, clock=Clock())
    display.enter_phase("rollout", 1, 2)
    with display.count("rollout", 3) as advance:
        advance(3)
    display.end_phase()
    assert "cycle 1/2 | rollout  | 3 images | 0.0s" in stream.getvalue()


def test_an_error_inside_a_phase_ends_the_bar():
    display = ProgressDisplay(stream=io.StringIO(), plain=False)
    display.enter_phase("rollout", 1, 2)
    with pytest.raises(RuntimeError), display.count("rollout", 3):
        raise RuntimeError
    with display.count("rollout", 3) as advance:  # a second live bar would be refused by rich
        advance(1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (12.34, "12.3s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (80, "1m20s"),
        (3599.6, "1h00m"),
        (7500, "2h05m"),
        (86399, "1d00h"),
        (273600, "3d04h"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.71041, "0.7104"),
        (0.7, "0.7000"),
        (1234.56, "1235"),
        (-0.0123456, "-0.01235"),
        (1e-4, "1.00e-04"),
        (3.25e9, "3.25e+09"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text
