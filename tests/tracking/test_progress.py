"""Progress lines."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from flow_factory.checkpoints.signals import SignalGuard
from flow_factory.tracking.formatting import format_duration, format_number
from flow_factory.tracking.live import LiveStatus, sparkline
from flow_factory.tracking.progress import ProgressDisplay


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


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(display: ProgressDisplay, width: int = 100) -> list[str]:
    """What the live display shows now."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(display._status)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_terminal_shows_cycle_phase_speed_reward_ratio_and_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    display = ProgressDisplay(stream=stream, clock=clock)
    display.enter_phase("evaluate", 0, 4)
    with display.count("evaluate toy", 8) as advance:
        advance(2)
        clock.now += 1.0
        lines = shown(display)
        assert lines[0].startswith("cycle 0/4") and "left" not in lines[0], "nothing to judge by yet"
        assert lines[1].startswith("evaluate toy") and lines[1].endswith("2/8 images | 2.0 images/s | 1.0s")
    for cycle in (1, 2):
        display.enter_phase("rollout", cycle, 4)
        with display.count("rollout", 48, scale=2) as advance:
            advance(24)
            clock.now += 2.0
            middle = shown(display)
        display.enter_phase("optimize", cycle, 4)
        clock.now += 8.0
        assert shown(display)[1].startswith("optimize") and shown(display)[1].endswith("8.0s")
        metrics = {"reward/match/mean": 0.5 + cycle / 8, "loss": 0.25, "first_update/ratio_deviation_max": 0}
        display.end_cycle(cycle, metrics)
    assert middle[0].startswith("cycle 2/4") and middle[0].endswith("28.0s left"), "three cycles of 10 s, 2 s gone"
    assert middle[1].startswith("rollout") and middle[1].endswith("48/96 images | 24.0 images/s | 2.0s")
    assert middle[2] == "reward 0.6250 | loss 0.2500 | ratio dev 0 | 10.0s a cycle"
    assert shown(display)[0].endswith("20.0s left")
    assert shown(display)[2] == "reward 0.7500 ▁█ | loss 0.2500 | ratio dev 0 | 10.0s a cycle"
    assert all(len(line) <= 40 for line in shown(display, width=40)), "a narrow terminal cuts lines off"
    display.close()
    display.close()
    printed = stream.getvalue()
    assert "cycle 2/4 | reward 0.7500 | loss 0.2500 | ratio dev 0 | 10.0s" in printed
    assert "cycle 2/4 | rollout" not in printed, "phases stand in the live display"
    assert printed.rindex("\x1b[?25h") > printed.rindex("\x1b[?25l"), "the cursor is there whatever comes"


def test_the_cursor_stays_while_the_display_is_shown(monkeypatch):
    """A killed process could not bring it back."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = ProgressDisplay(stream=stream)
    display.enter_phase("rollout", 1, 2)
    printed = stream.getvalue()
    display.close()
    assert printed.rfind("\x1b[?25h") > printed.rfind("\x1b[?25l")


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came")


def test_a_signal_is_answered_inside_the_display(monkeypatch, capfd):
    """A bare write to the terminal would tear its lines, and be torn by them."""
    monkeypatch.setenv("TERM", "xterm")
    display = ProgressDisplay(stream=Terminal())
    display.enter_phase("rollout", 1, 2)
    with SignalGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        _until(lambda: bool(display._status.notice))
        assert guard.requested and "SIGTERM received: saving at the next safe point" in shown(display)[-1]
    assert "received" not in capfd.readouterr().err
    display.close()
    with SignalGuard():
        os.kill(os.getpid(), signal.SIGTERM)
        _until(lambda: "received" in capfd.readouterr().err)


def test_a_cycle_may_end_while_the_time_left_is_drawn():
    """The display is drawn in a thread of its own: here the cycle ends between its look and its use."""
    clock = Clock()
    display = ProgressDisplay(stream=io.StringIO(), clock=clock)
    display.enter_phase("rollout", 1, 3)
    clock.now += 10.0
    display.end_cycle(1, {})
    display.enter_phase("rollout", 2, 3)
    clock.now += 4.0

    def ending_clock() -> float:
        display._cycle_began = None
        return clock.now

    display._clock = ending_clock
    assert display._seconds_left() == 16.0


class EndingStatus(LiveStatus):
    """A phase that ends right after its total has been looked at."""

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name == "total" and value is not None:
            self.total = None
        return value


def test_a_phase_may_end_while_it_is_drawn():
    assert EndingStatus(phase="rollout", total=4, done=2)._phase_bar().total == 4
    assert EndingStatus(phase="rollout", total=4, done=2, unit="images")._work() == "2/4 images | 0.0s"


@pytest.mark.parametrize("error_stream", [io.StringIO, Terminal], ids=["file", "terminal"])
def test_standard_error_in_a_file_stays_there(monkeypatch, error_stream):
    """`2> err.log`: what is written there is not the display's; on the terminal it is drawn above the display."""
    monkeypatch.setenv("TERM", "xterm")
    stream, errors = Terminal(), error_stream()
    monkeypatch.setattr(sys, "stderr", errors)
    display = ProgressDisplay(stream=stream)
    display.enter_phase("rollout", 1, 2)
    sys.stderr.write("a warning\n")
    display.close()
    in_file = error_stream is io.StringIO
    assert ("a warning" in errors.getvalue()) == in_file and ("a warning" in stream.getvalue()) != in_file


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    display = ProgressDisplay(stream=stream, clock=Clock())
    display.enter_phase("rollout", 1, 2)
    display.close()
    assert stream.getvalue() == "cycle 1/2 | rollout  | 0.0s\n"


def test_an_error_inside_a_phase_leaves_a_display_that_goes_on(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    display = ProgressDisplay(stream=Terminal())
    display.enter_phase("rollout", 1, 2)
    with pytest.raises(RuntimeError), display.count("rollout", 3):
        raise RuntimeError
    with display.count("rollout", 3) as advance:
        advance(1)
        assert any("1/3 images" in line for line in shown(display))
    display.close()


def test_before_the_first_phase_there_is_little_to_show():
    console = Console(width=60, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(LiveStatus())
    assert captured.get().startswith("cycle 0")


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([1.0], ""),
        ([0.0, 7.0], "▁█"),
        ([3.0, 3.0, 3.0], "▁▁▁"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([0.0, float("nan"), 1.0], "▁ █"),
    ],
)
def test_sparklines(values, curve):
    assert sparkline(values) == curve


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
        (12, "12"),
        (2**53 + 1, "9.01e+15"),
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
