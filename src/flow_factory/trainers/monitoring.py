"""Measures the samples of a run, over all ranks, and lets the hacking monitor judge each finished cycle."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flow_factory.distributed import Comm
from flow_factory.errors import RunError
from flow_factory.samples import BaseSample
from flow_factory.samples.measures import columns_by_name, measure_samples
from flow_factory.samples.statistics import group_diversity, sample_frames, thumbnails
from flow_factory.tracking.monitors import HackingMonitor, mean_of

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments
    from flow_factory.rewards.buffer import RewardBuffer
    from flow_factory.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

RewardWeightsOf = Callable[[BaseSample], Mapping[str, float]]
Limits = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class GroupTable:
    """One cycle's numbers, a value per group of samples of one prompt, in the order of (source, group).

    Attributes:
        statistics: Name to the groups' means over their members; "diversity" and "diversity_relative" where groups have
            several members (the distances of `group_diversity`). Empty without pictures.
        rewards: Mean weighted reward of each group, over members whose rewards were all scored; groups without such a
            member are absent.
    """

    statistics: dict[str, list[float]]
    rewards: list[float]

    def means(self) -> dict[str, float]:
        """`monitor/<name>` to the mean over groups."""
        return {f"monitor/{name}": mean_of(values) for name, values in self.statistics.items()}


def measure_groups(samples: Sequence[BaseSample], comm: Comm, weights_of: RewardWeightsOf | None = None) -> GroupTable:
    """Measures a cycle's samples; a group may be divided among ranks. Called by all ranks, with the same result.

    Args:
        samples: This rank's samples; those without pictures are left out.
        comm: Process group.
        weights_of: A sample's reward weights by name; None where there are no rewards.
    """
    with comm.together():
        shown = [(s, f) for s in samples if (f := sample_frames(s)) is not None]
        columns = measure_samples([s for s, _ in shown])
        small = [thumbnails(f).flatten() for _, f in shown]
        keys = [[s.source_id, s.group_id, s.member, _total_reward(s, weights_of)] for s, _ in shown]
    everyone = [(*key, len(small[0])) for key in keys] if small else []
    rows = [row for rank in comm.gather_objects(everyone) for row in rank]
    if not rows:
        return GroupTable({}, [])
    # A rank without pictures takes part with none of them.
    stacked = torch.stack(small) if small else torch.empty((0, rows[0][-1]))
    columns, stacked = comm.gather_rows(columns), comm.gather_rows(stacked)

    groups: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(rows)), key=lambda i: rows[i][:3]):
        groups.setdefault((rows[index][0], rows[index][1]), []).append(index)
    statistics = _tabulate(columns, stacked, list(groups.values()))
    totals = [[total for i in members if (total := rows[i][3]) is not None] for members in groups.values()]
    return GroupTable(statistics, [mean_of(values) for values in totals if values])


def _tabulate(columns: Tensor, small: Tensor, groups: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    statistics = {
        name: [mean_of([values[i] for i in members]) for members in groups]
        for name, values in columns_by_name(columns).items()
    }
    several = [small[list(members)] for members in groups if len(members) > 1]
    if several:
        statistics["diversity"] = [group_diversity(members, "rms") for members in several]
        statistics["diversity_relative"] = [group_diversity(members, "correlation") for members in several]
    return statistics


def measure_dataset(name: str, rows: Tensor, comm: Comm) -> dict[str, float]:
    """`<dataset>/monitor/<statistic>` of an evaluation set: the mean over its samples on all ranks.

    There is no diversity, as an evaluation shows one sample of each prompt.

    Args:
        name: The dataset.
        rows: Of this rank's samples, as from `measure_samples`.
        comm: Process group.
    """
    columns = columns_by_name(comm.gather_rows(rows))
    return {f"{name}/monitor/{key}": mean_of(values) for key, values in columns.items()}


class SampleWatch:
    """The monitor of a run: measures during a cycle, judges when the cycle is finished.

    A cycle that is dropped has been measured but changes nothing, so a resumed run judges as the uninterrupted one.
    With `log.monitor: false` it does nothing.

    Args:
        config: The configuration (`log.monitor`, `log.monitor_band`, `log.monitor_stop`).
        comm: Process group.

    Attributes:
        should_stop: True after a cycle that raised an alarm, if the run is to end then.
    """

    def __init__(self, config: Arguments, comm: Comm) -> None:
        self.enabled = config.log_args.monitor
        self.stop = config.log_args.monitor_stop
        self.monitor = HackingMonitor(config.log_args.monitor_band)
        self.should_stop = False
        self._comm = comm
        self._measured: GroupTable | None = None

    def measure(self, samples: Sequence[BaseSample], reward_buffer: RewardBuffer | None) -> dict[str, float]:
        """Measures this cycle's samples, after feedback. Called by all ranks.

        Args:
            samples: This rank's samples, scored.
            reward_buffer: Knows the weights of their rewards; None where there are none, hence no alarm.

        Returns:
            Metrics of the cycle: `monitor/<statistic>`, and the seconds it took; empty for samples without pictures.
        """
        if not self.enabled:
            return {}
        began = time.perf_counter()
        weights_of = None if reward_buffer is None else reward_buffer.processor.weights_for
        self._measured = measure_groups(samples, self._comm, weights_of)
        means = self._measured.means()
        return {**means, "seconds/monitor": time.perf_counter() - began} if means else {}

    def judge(self, tracker: Tracker, step: int) -> None:
        """Takes the finished cycle into the bands and smoothed values, and reports alarms. Called by all ranks."""
        measured, self._measured = self._measured, None
        if measured is None or not measured.statistics:
            return
        before = self.monitor.limits()
        alarms = self.monitor.observe(measured.statistics, measured.rewards)
        self._report_bands(before, self.monitor.limits(), tracker, step)
        for alarm in alarms:
            tracker.log(alarm.row(), step, kind="alarm")
            if self._comm.is_main:
                logger.warning("possible reward hacking: %s", alarm.message)
        # Ranks of different hardware may differ in a last bit; they must not differ in this.
        self.should_stop = self.stop and self._comm.any_true(bool(alarms))

    def _report_bands(self, before: Limits, after: Limits, tracker: Tracker, step: int) -> None:
        """Writes the ends of new and refined bands; the last row of kind "monitor_band" holds."""
        changed = {name: pair for name, pair in after.items() if before.get(name) != pair}
        if any(math.isinf(low) for low, _ in changed.values()):
            if self._comm.is_main:
                logger.warning(
                    "one prompt per cycle tells nothing about how prompts differ: the monitor measures but raises no "
                    "alarm (train.unique_sample_num_per_epoch)"
                )
        elif changed:
            bounds = {f"monitor/{name}/low": low for name, (low, _) in changed.items()}
            bounds |= {f"monitor/{name}/high": high for name, (_, high) in changed.items()}
            tracker.log(bounds, step, kind="monitor_band")

    def stopped(self, cycle: int, checkpoint: Path | None) -> RunError:
        """The end of a run by `log.monitor_stop`, once its state is saved."""
        return RunError(
            f"stopped after cycle {cycle} by log.monitor_stop: a reward may be being gamed, see the warning above. The "
            f"state is in {checkpoint}; the same command goes on from there and stops again only at a new alarm."
        )

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None where the monitor is off."""
        return self.monitor.state_dict() if self.enabled else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state_dict`; after None the next cycle defines the bands."""
        if state is not None:
            self.monitor.load_state_dict(state)


def _total_reward(sample: BaseSample, weights_of: RewardWeightsOf | None) -> float | None:
    """The weighted sum that the sample was given, or None if a reward failed or there is none."""
    weights = {} if weights_of is None else weights_of(sample)
    scores = [sample.rewards.get(name) for name in weights]
    if not scores or any(score is None for score in scores):
        return None
    return math.fsum(w * s for w, s in zip(weights.values(), scores, strict=True) if s is not None)
