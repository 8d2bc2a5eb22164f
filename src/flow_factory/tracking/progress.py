"""What a person sees of a running run: a bar for the present phase on a terminal, a line per finished phase anywhere.

cycle 3/20 | rollout  | 96 images | 41.2 images/s | 2.3s
cycle 3/20 | feedback | 0.1s
cycle 3/20 | optimize | 4.0s
cycle 3/20 | reward 0.7104 | loss 0.0123 | ratio dev 0 | 6.5s | eta 1m50s
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Metrics worth a place on a cycle's line beside the rewards: (key, label).
SHOWN_METRICS = (
    ("loss", "loss"),
    ("kl", "kl"),
    ("first_update/kl", "kl"),
    ("first_update/ratio_deviation_max", "ratio dev"),
    ("first_update/clip_fraction", "clipped"),
    ("first_update/grad_norm", "grad norm"),
)


class ProgressDisplay:
    """Phase and cycle lines of a run.

    Args:
        enabled: Whether anything is shown (main rank, `log.verbose`).
        stream: Where lines go; standard output by default.
        plain: Lines only, no bar; by default decided by whether the stream is a terminal.
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
        self._plain = not self._stream.isatty() if plain is None else plain
        self._clock = clock
        self._console = None if self._plain else Console(file=self._stream)
        self._label = ""
        self._total_cycles: int | None = None
        self._phase: str | None = None
        self._phase_began = 0.0
        self._counts: list[str] = []
        self._cycle_began: float | None = None
        self._cycle_seconds: list[float] = []

    def enter_phase(self, name: str, cycle: int, total_cycles: int | None) -> None:
        """Ends the present phase with its line and begins another.

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

    def end_phase(self) -> None:
        """Ends the present phase with its line, if there is one."""
        if self._phase is not None:
            fields = [f"{self._phase:<8}", *self._counts, format_duration(self._clock() - self._phase_began)]
            self._phase = None
            self.line(" | ".join([self._label, *fields]))

    @contextmanager
    def count(self, name: str, total: int, unit: str = "images", scale: int = 1) -> Iterator[Callable[[int], None]]:
        """Counts units of work; on a terminal with a bar.

        Args:
            name: What is being done.
            total: Units that this process will do.
            unit: Their name.
            scale: Processes that do the same, for the numbers shown.

        Yields:
            A function to be called with the number of units just done.
        """
        began, done = self._clock(), 0
        bar: Progress | None = None
        if self.enabled and self._console is not None:
            # Four refreshes a second cost nothing that can be measured.
            bar = Progress(
                TextColumn(f"{self._label} | {{task.description}}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
        task = None if bar is None else bar.add_task(name, total=total * scale)

        def advance(units: int) -> None:
            nonlocal done
            done += units
            if bar is not None and task is not None:
                bar.advance(task, units * scale)

        if bar is not None:
            bar.start()
        try:
            yield advance
        finally:
            if bar is not None:
                bar.stop()
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
        if self._cycle_began is not None:
            seconds = self._clock() - self._cycle_began
            self._cycle_seconds.append(seconds)
            self._cycle_began = None
            fields.append(format_duration(seconds))
            if self._total_cycles is not None and cycle < self._total_cycles:
                # The median of the last ones: the first cycle warms up, single ones are held up.
                left = median(self._cycle_seconds[-9:]) * (self._total_cycles - cycle)
                fields.append(f"eta {format_duration(left)}")
        self.line(" | ".join(fields))

    def line(self, text: str) -> None:
        """Writes one line."""
        if not self.enabled:
            return
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def format_duration(seconds: float) -> str:
    """`0.4s`, `12.3s`, `1m20s`, `2h05m`, `3d04h`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_number(value: float) -> str:
    """Four significant digits, without needless zeros for whole numbers."""
    if value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.2e}"
