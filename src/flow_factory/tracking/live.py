"""The live display of a run on a terminal: three lines at the bottom that always say where it stands.

cycle 7/40        ━━━━━━╸━━━━━━━━━━━━━━━━━  2m04s left
rollout           ━━━━━━━━━━━━━╸━━━━━━━━━━  48/96 images | 41.2 images/s | 1.2s
reward 0.7104 ▁▂▂▄▃▅▇ | loss 0.01235 | ratio dev 0 | 3.6s a cycle
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flow_factory.checkpoints import signals
from flow_factory.tracking.formatting import format_duration

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 28
_SHOWN_REWARDS = 24


@dataclass
class LiveStatus:
    """What the display shows; drawn anew four times a second.

    It is drawn in a thread of its own while its owner changes it, so what may become None is read only once.

    Attributes:
        cycle: The present cycle, 1 for the first; 0 before it.
        total_cycles: `train.max_epochs`, or None without an end.
        finished: Finished cycles.
        phase: The present phase; empty between two.
        phase_seconds: How long it has lasted.
        seconds_left: Estimate for the whole run, or None.
        done: Units counted in the phase.
        total: Units that the phase will have, or None if it does not count.
        unit: Their name.
        rewards: Rewards of the last cycles, for the little curve.
        numbers: What is said of the last finished cycle: the reward first.
        notice: What has just happened, such as a signal.
    """

    cycle: int = 0
    total_cycles: int | None = None
    finished: int = 0
    phase: str = ""
    phase_seconds: Callable[[], float] = lambda: 0.0
    seconds_left: Callable[[], float | None] = lambda: None
    done: int = 0
    total: int | None = None
    unit: str = ""
    rewards: list[float] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    notice: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=16, no_wrap=True)
        grid.add_column(width=min(_BAR_WIDTH, max(8, options.max_width // 4)))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        label = f"cycle {self.cycle}" + (f"/{self.total_cycles}" if self.total_cycles is not None else "")
        grid.add_row(Text(label, style="bold"), self._run_bar(), Text(self._left()))
        grid.add_row(Text(self.phase or "…"), self._phase_bar(), Text(self._work()))
        yield grid
        if self.numbers:
            text = Text(self.numbers[0], style="bold")
            curve = sparkline(self.rewards[-_SHOWN_REWARDS:])
            text.append(f" {curve}" if curve else "", style="cyan")
            text.append("".join(f" | {number}" for number in self.numbers[1:]), style="none")
            text.no_wrap, text.overflow = True, "ellipsis"
            yield text
        if self.notice:
            yield Text(self.notice, style="yellow", no_wrap=True, overflow="ellipsis")

    def _run_bar(self) -> ProgressBar | Text:
        total_cycles = self.total_cycles
        if total_cycles is None:
            return Text("")
        return ProgressBar(total=max(1, total_cycles), completed=self.finished)

    def _phase_bar(self) -> ProgressBar | Text:
        if not self.phase:
            return Text("")
        total = self.total
        if total is None:
            return ProgressBar(total=None, pulse=True, animation_time=self.phase_seconds())
        return ProgressBar(total=max(1, total), completed=self.done)

    def _left(self) -> str:
        left = self.seconds_left()
        return "" if left is None else f"{format_duration(left)} left"

    def _work(self) -> str:
        seconds, total = self.phase_seconds(), self.total
        fields = []
        if total is not None:
            fields.append(f"{self.done}/{total} {self.unit}")
            if self.done and seconds > 0:
                fields.append(f"{self.done / seconds:.1f} {self.unit}/s")
        return " | ".join([*fields, *([format_duration(seconds)] if self.phase else [])])


class LiveDisplay:
    """Keeps a `LiveStatus` at the bottom of a terminal; lines are printed above it.

    Args:
        console: Where.
        status: What is shown; its owner changes it.
    """

    def __init__(self, console: Console, status: LiveStatus) -> None:
        self.console = console
        self._status = status
        # Standard error is drawn above the display only where it would tear it: with `2> file` it belongs in the file.
        self._live = Live(
            status, console=console, refresh_per_second=4, transient=True, redirect_stderr=sys.stderr.isatty()
        )

    def start(self) -> None:
        """Shows it; does nothing if it is shown already."""
        if not self._live.is_started:
            self._live.start()
            # rich hides the cursor, and a process that is killed could not bring it back.
            self.console.show_cursor(True)
            signals.announce_with(self._notice)

    def stop(self) -> None:
        """Takes it away; may be called twice."""
        if self._live.is_started:
            signals.announce_with(None)
            self._live.stop()

    def _notice(self, text: str) -> None:
        self._status.notice = text


def sparkline(values: Sequence[float]) -> str:
    """A curve of one character per value, from its lowest to its highest; none for fewer than two numbers."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    if high == low:
        return _BLOCKS[0] * len(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / (high - low) * top)] if math.isfinite(v) else " " for v in values)
