"""What a person sees of a running run.

Where lines go to a file, one per phase and one per cycle:

cycle 3/20 | rollout  | 96 images | 41.2 images/s | 2.3s
cycle 3/20 | feedback | 0.1s
cycle 3/20 | optimize | 4.0s
cycle 3/20 | reward 0.7104 | loss 0.0123 | ratio dev 0 | 6.5s | eta 1m50s

On a terminal only the lines of cycles and evaluations, and below them the live display of `live.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TextIO

from rich.console import Console

from flow_factory.tracking.formatting import format_duration, format_number
from flow_factory.tracking.live import LiveDisplay, LiveStatus

# Metrics worth a place on a cycle's line beside the rewards: (key, label).
SHOWN_METRICS = (
    ("loss", "loss"),
    ("kl", "kl"),
    ("first_update/kl", "kl"),
    ("first_update/ratio_deviation_max", "ratio dev"),
    ("first_update/clip_fraction", "clipped"),
    ("first_update/grad_norm", "grad norm"),
    ("rollout_rows_saved", "rows saved"),
)


class ProgressDisplay:
    """Phase and cycle lines of a run.

    Args:
        enabled: Whether anything is shown (main rank, `log.verbose`).
        stream: Where lines go; standard output by default.
        plain: Lines only, no live display; by default decided by whether the stream is a terminal.
        clock: Source of seconds, for tests.
    """

    def __init__(
        self,
        enabled: bool = True,
        stream: TextIO | None = None,
        plain: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        dumb = not self._stream.isatty() or os.environ.get("TERM") == "dumb"
        self._clock = clock
        self._status = LiveStatus(seconds_left=self._seconds_left)
        self._live: LiveDisplay | None = None
        if enabled and not (dumb if plain is None else plain):
            self._live = LiveDisplay(Console(file=self._stream, highlight=False), self._status)
        self._label = ""
        self._total_cycles: int | None = None
        self._phase: str | None = None
        self._phase_began = 0.0
        self._counts: list[str] = []
        self._cycle_began: float | None = None
        self._cycle_seconds: list[float] = []

    def enter_phase(self, name: str, cycle: int, total_cycles: int | None) -> None:
        """Ends the present phase, with its line where there is no live display, and begins another.

        Args:
            name: "rollout", "feedback", "optimize", "evaluate", "checkpoint" ...
            cycle: Number of the cycle that the phase belongs to, 1 for the first; 0 before it.
            total_cycles: `train.max_epochs`, or None without an end.
        """
        self.end_phase()
        self._label = f"cycle {cycle}" + (f"/{total_cycles}" if total_cycles is not None else "")
        self._total_cycles = total_cycles
        self._phase, self._phase_began, self._counts = name, self._clock(), []
        if self._cycle_began is None and name not in ("evaluate", "checkpoint"):
            self._cycle_began = self._phase_began
        status, began = self._status, self._phase_began
        status.cycle, status.total_cycles, status.phase = cycle, total_cycles, name
        status.finished = cycle if self._cycle_began is None else max(0, cycle - 1)
        status.total, status.done = None, 0
        status.phase_seconds = lambda: self._clock() - began
        if self._live is not None:
            self._live.start()

    def end_phase(self) -> None:
        """Ends the present phase, with its line where there is no live display."""
        if self._phase is not None:
            fields = [f"{self._phase:<8}", *self._counts, format_duration(self._clock() - self._phase_began)]
            self._phase, self._status.phase, self._status.total = None, "", None
            if self._live is None:
                self.line(" | ".join([self._label, *fields]))

    def close(self) -> None:
        """Ends the present phase and takes the live display away; may be called twice."""
        self.end_phase()
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def count(self, name: str, total: int, unit: str = "images", scale: int = 1) -> Iterator[Callable[[int], None]]:
        """Counts units of work, and shows them in the live display.

        Args:
            name: What is being done.
            total: Units that this process will do.
            unit: Their name.
            scale: Processes that do the same, for the numbers shown.

        Yields:
            A function to be called with the number of units just done.
        """
        began, done, status = self._clock(), 0, self._status
        status.phase, status.done, status.total, status.unit = name, 0, total * scale, unit
        status.phase_seconds = lambda: self._clock() - began

        def advance(units: int) -> None:
            nonlocal done
            done += units
            status.done = done * scale

        try:
            yield advance
        finally:
            seconds = self._clock() - began
            rate = f"{done * scale / seconds:.1f} {unit}/s" if seconds > 0 else ""
            self._counts += [f"{done * scale} {unit}", *([rate] if rate else [])]

    def end_cycle(self, cycle: int, metrics: Mapping[str, float]) -> None:
        """The line of a finished cycle: its numbers, its time and the time left."""
        self.end_phase()
        fields = [f"cycle {cycle}" + (f"/{self._total_cycles}" if self._total_cycles is not None else "")]
        means = {key[7:-5]: key for key in metrics if key.startswith("reward/") and key.endswith("/mean")}
        total = means.pop("total", None)
        if total is None and len(means) == 1:
            _, total = means.popitem()
        rewards = [] if total is None else [(total, "reward")]
        rewards += [(key, name) for name, key in means.items()] if len(means) > 1 else []
        shown: set[str] = set()
        for key, label in (*rewards[:4], *SHOWN_METRICS):
            if key in metrics and label not in shown:
                shown.add(label)
                fields.append(f"{label} {format_number(float(metrics[key]))}")
        status = self._status
        status.numbers, status.finished, status.cycle = fields[1:], cycle, cycle
        if rewards:
            status.rewards.append(float(metrics[rewards[0][0]]))
        if self._cycle_began is not None:
            seconds = self._clock() - self._cycle_began
            self._cycle_seconds.append(seconds)
            self._cycle_began = None
            fields.append(format_duration(seconds))
            status.numbers = [*status.numbers, f"{format_duration(self._cycle_length())} a cycle"]
            left = self._seconds_left()
            if left is not None and self._live is None:
                fields.append(f"eta {format_duration(left)}")
        self.line(" | ".join(fields))

    def _cycle_length(self) -> float:
        """The median of the last ones: the first cycle warms up, single ones are held up."""
        return median(self._cycle_seconds[-9:])

    def _seconds_left(self) -> float | None:
        """Until the last cycle ends, without evaluations; None if there is no end or nothing to judge by."""
        finished = self._status.finished
        if self._total_cycles is None or not self._cycle_seconds or finished >= self._total_cycles:
            return None
        left = self._cycle_length() * (self._total_cycles - finished)
        began = self._cycle_began  # read once: the display asks from its own thread while a cycle ends in another
        if began is not None:
            left -= min(self._clock() - began, self._cycle_length())
        return left

    def line(self, text: str) -> None:
        """Writes one line."""
        if not self.enabled:
            return
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()
