"""How often the monitor for reward hacking alarms at a policy that does not change, how much it sees, what it costs.

A run whose updates change nothing gives the statistics of many groups of one fixed policy. Many runs are then drawn
from these groups, with other prompts in each cycle as in training, and go through the monitor itself. Two columns of
false alarms: runs with any alarm at all, as drawn; and runs whose reward is made to rise from the second cycle on, so
that only the bands stand between the policy and an alarm.

    python scripts/measure_monitor.py                  # the embedded pipeline, 12 cycles
    python scripts/measure_monitor.py --cycles 20 --runs 5000 train.noise_level=0.5
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Sequence

import torch

from flow_factory import build_trainer, load_config
from flow_factory.hparams import LogArguments
from flow_factory.samples import BaseSample
from flow_factory.tracking.metrics import read_metrics
from flow_factory.tracking.monitors import SPREAD_DEGREES, HackingMonitor, MonitorBand
from flow_factory.trainers.monitoring import measure_groups

Group = tuple[dict[str, float], float]
"""One group's statistics and mean reward."""


def gather_groups(config: str, cycles: int, overrides: Sequence[str]) -> tuple[list[Group], float, int]:
    """Groups of a policy that stays as it is, the monitor's share of the cycles' seconds, and the run's own alarms."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"log.save_dir={folder}",
            "log.run_name=still",
            "log.save_freq=0",
            "eval.eval_freq=0",
            f"train.max_epochs={cycles}",
            "train.learning_rate=1e-30",  # nothing in float32 can be changed by so little
        ]
        trainer = build_trainer(load_config(config, [*fixed, *overrides]))
        assert trainer.reward_buffer is not None
        weights_of = trainer.reward_buffer.processor.weights_for
        optimize = trainer.optimize

        def keep_groups(samples: list[BaseSample]) -> None:
            table = measure_groups(samples, trainer.comm, weights_of)
            for row, reward in enumerate(table.rewards):
                groups.append(({name: values[row] for name, values in table.statistics.items()}, reward))
            optimize(samples)

        trainer.optimize = keep_groups  # type: ignore[method-assign]
        trainer.start()
        rows = read_metrics(trainer.run_dir, "cycle")
        phases = ("rollout", "feedback", "optimize")
        shares = [row["seconds/monitor"] / sum(row[f"seconds/{phase}"] for phase in phases) for row in rows]
        return groups, statistics.median(shares), len(read_metrics(trainer.run_dir, "alarm"))


def false_alarms(groups: Sequence[Group], prompts: int, band: float, runs: int, cycles: int, rising: bool) -> float:
    """Share of drawn runs with an alarm."""
    rng = random.Random(f"{prompts} {band} {rising}")
    alarmed = 0
    for _ in range(runs):
        monitor = HackingMonitor(band)
        for cycle in range(cycles):
            drawn = rng.choices(groups, k=prompts)
            gain = 10.0 if rising and cycle else 0.0
            columns = {name: [group[name] for group, _ in drawn] for name in drawn[0][0]}
            if monitor.observe(columns, [reward + gain for _, reward in drawn]):
                alarmed += 1
                break
    return alarmed / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/grpo/lora/sd3_5/tiny.yaml")
    parser.add_argument("--cycles", type=int, default=12, help="cycles that are really run")
    parser.add_argument("--runs", type=int, default=1000, help="runs that are drawn")
    parser.add_argument("--length", type=int, default=40, help="cycles of a run that is drawn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    groups, share, own = gather_groups(arguments.config, arguments.cycles, arguments.overrides)
    print(
        f"{len(groups)} groups in {arguments.cycles} cycles; {own} alarms; {share:.2%} of a cycle goes to the monitor\n"
    )
    print(f"| prompts per cycle | band | runs of {arguments.length} cycles with an alarm | the same, reward rising |")
    print("|---|---|---|---|")
    for prompts in (4, 8, 24, 48):
        for band in (3.0, 3.5, 4.0):
            shares = [
                false_alarms(groups, prompts, band, arguments.runs, arguments.length, rising)
                for rising in (False, True)
            ]
            print(f"| {prompts} | {band} | {shares[0]:.1%} | {shares[1]:.1%} |")
    print("\n| statistic | mean | std over prompts | half-width, 8 prompts | 48 prompts |\n|---|---|---|---|---|")
    for name in groups[0][0]:
        values = MonitorBand.of([group[name] for group, _ in groups])
        halves = []
        for prompts in (8, 48):
            # As after the cycles that it takes to know the spread.
            degrees = (prompts - 1) * math.ceil(SPREAD_DEGREES / (prompts - 1))
            band = MonitorBand(0.0, prompts, values.spread**2 * degrees, degrees)
            halves.append(band.limits(LogArguments().monitor_band)[1])
        print(f"| {name} | {values.mean:.4f} | {values.spread:.4f} | {halves[0]:.4f} | {halves[1]:.4f} |")


if __name__ == "__main__":
    main()
