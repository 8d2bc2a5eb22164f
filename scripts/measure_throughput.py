"""Throughput of each adapter's rollout over the diffusers pipeline's own call, on the tiny pipelines of tests/parity.

Both sides encode the same prompts and media, take the same number of steps without gradients, and decode. The rollout
keeps no log-probabilities and no states, and the network has no LoRA on either side. Calls alternate in one process,
the first of them not counted. The ratio of the medians, in wall and in CPU seconds, is above 1 where the toolkit is
faster.

    python scripts/measure_throughput.py                     # every case, ten calls each
    python scripts/measure_throughput.py sd3-5 flux1 --calls 20 --solver pipeline
    python scripts/measure_throughput.py --grow 2            # four times the area
    python scripts/measure_throughput.py --grow 2 --json guidance/data/throughput.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cases belong to the tests

from tests.parity.bench import Bench
from tests.parity.case import Case, Setting
from tests.parity.cases import all_cases

from flow_factory.samples import Media, MediaItem, Video


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def enlarged(media: Media, times: int) -> Media:
    """Condition media with every pixel repeated: some pipelines take the size of what they make from them."""

    def large(frames: Tensor) -> Tensor:
        return frames.repeat_interleave(times, -2).repeat_interleave(times, -1)

    def item(medium: MediaItem) -> MediaItem:
        if isinstance(medium, Tensor):
            return large(medium)
        return replace(medium, frames=large(medium.frames)) if isinstance(medium, Video) else medium

    return {slot: tuple(item(medium) for medium in items) for slot, items in media.items()}


def measured_size(made: Any) -> tuple[int, ...]:
    """(width, height) of the first picture of a pipeline's result, however deep it lies."""
    while isinstance(made, (list, tuple)):
        made = made[0]
    return made.size


def enlarged_case(case: Case, steps: int, times: int) -> Case:
    """The case with larger media, those that it is given included."""
    height, width = (side * times for side in case.size)
    media = tuple(enlarged(row, times) for row in case.media)
    return replace(case, steps=steps, size=(height, width), media=media)


def measure(case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row per setting of the case, at the largest size that its pipeline makes: `grow` times its own, or less.

    Tiny networks have position tables that end, and some pipelines go by sizes of their own.
    """
    times = arguments.grow
    while True:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(enlarged_case(case, arguments.steps, times), Path(folder))
            try:
                theirs = bench.reference(case.settings[0], "pil", rows=(0,), pipeline=bench.pipeline)
            except (IndexError, ValueError) as error:
                if times == 1:
                    raise
                print(f"{case.name}: not {times} times as large ({error})")
            else:
                if times == 1 or measured_size(theirs) == bench.case.size[::-1]:
                    return [compare(bench, setting, arguments) for setting in case.settings]
                print(f"{case.name}: the pipeline makes {measured_size(theirs)} pixels all the same")
            times //= 2


def compare(bench: Bench, setting: Setting, arguments: argparse.Namespace) -> dict[str, object]:
    """Median seconds of both sides under one setting, and their ratios."""
    # Where a pipeline's rows depend on their batch, or it cannot batch, its calls are single.
    rows = (0,) if bench.case.alone else (0, 1, 2)
    adapter, pipeline = bench.full, bench.pipeline
    pairs = []
    for number in range(arguments.calls + 1):
        # The order alternates, so that a slow drift of a shared machine weighs on both alike.
        sides = [
            lambda: bench.roll(adapter, setting, rows=rows, solver=arguments.solver),
            lambda: bench.reference(setting, "pil", rows=rows, pipeline=pipeline),
        ]
        order = (0, 1) if number % 2 else (1, 0)
        taken = {side: timed(sides[side]) for side in order}
        pairs.append((*taken[0], *taken[1]))
    own, own_cpu, reference, reference_cpu = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    return {
        "case": bench.case.name,
        "setting": setting.name,
        "size": "x".join(str(side) for side in bench.case.size),
        "rows": len(rows),
        "rollout_s": round(own, 4),
        "pipeline_s": round(reference, 4),
        "ratio": round(reference / own, 3),
        "cpu_ratio": round(reference_cpu / own_cpu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="beginnings of names of cases; none: all")
    parser.add_argument("--calls", type=int, default=10, help="of each side, after one that is not counted")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--grow", type=int, default=1, help="times height and width, of given media too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--solver", choices=("dynamics", "pipeline"), default="dynamics")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    cases = [c for c in all_cases() if not arguments.cases or c.name.startswith(tuple(arguments.cases))]
    if not cases:
        raise SystemExit(f"no case begins with {arguments.cases}; there are {', '.join(c.name for c in all_cases())}.")
    rows: list[dict[str, object]] = []
    console = Console()
    for case in cases:
        rows += (new := measure(case, arguments))
        for row in new:
            console.print(
                f"{row['case']} ({row['setting']}): {row['rollout_s']} s, pipeline {row['pipeline_s']} s, "
                f"ratio {row['ratio']}, of CPU seconds {row['cpu_ratio']}",
                soft_wrap=True,
            )
    table = Table("case", "setting", "size", "rows", "rollout s", "pipeline s", "ratio", "CPU ratio")
    for row in sorted(rows, key=lambda row: float(str(row["ratio"]))):
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    machine = f"{platform.machine()}, {arguments.threads} thread(s), torch {torch.__version__}"
    if arguments.json is not None:
        options = {name: getattr(arguments, name) for name in ("calls", "steps", "grow", "solver")}
        arguments.json.write_text(json.dumps({"machine": machine, **options, "rows": rows}, indent=2) + "\n")
    console.print(machine)


if __name__ == "__main__":
    main()
