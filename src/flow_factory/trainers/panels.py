"""Samples of an evaluation set, scored as they come, so that their media need not be kept.

A video of 81 frames of 480 x 832 is 97 MB, and its encoded prompt several more on the device; an evaluation may have
hundreds. So samples are scored in windows, and of a scored one only its numbers stay, and what a person is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flow_factory.data_utils.conditions import PromptBatch
from flow_factory.models.abc import BaseAdapter
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample, NoiseKey
from flow_factory.samples.measures import SAMPLE_STATISTICS, measure_samples
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch


def generate_panel(
    adapter: BaseAdapter,
    loader: Iterable[PromptBatch],
    plan: RolloutPlan,
    seed: int,
    solver: Literal["pipeline", "dynamics"],
    *,
    member: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[BaseSample]]:
    """One sample of every prompt of a loader under the active weights: what training's evaluation and `eval` share.

    The noise of a sample depends on (seed, index of its prompt, member) alone, so it is the same for any weights, batch
    size and number of processes.

    Args:
        adapter: The model.
        loader: This rank's batches of prompts.
        plan: How they are sampled.
        seed: Evaluation seed.
        solver: "pipeline" or "dynamics".
        member: Which of several samples of a prompt; training's evaluation makes member 0.
        should_stop: Asked before each batch; true ends it.

    Yields:
        The samples of each batch, in the order of the prompts.
    """
    for batch in loader:
        if should_stop():
            return
        batch = replace(batch, members=(member,) * len(batch))
        keys = [NoiseKey(seed, 0, record.index, member) for record in batch.records]
        with torch.no_grad():
            made = rollout_batch(
                adapter, batch, plan, keys, compute_log_prob=False, trajectory_indices=(), solver=solver
            )
        yield made


@dataclass(frozen=True)
class Scored:
    """What is left of a sample that has been scored.

    Attributes:
        index: Row of the prompt in its dataset.
        member: Which sample of the prompt.
        group_id: Identity of the prompt.
        prompt: The text.
        rewards: Reward to score, None where scoring failed.
        statistics: float32 [S], as in `SAMPLE_STATISTICS`; NaN for what the sample does not have.
    """

    index: int
    member: int
    group_id: int
    prompt: str
    rewards: dict[str, float | None]
    statistics: Tensor


class PanelScorer:
    """Scores the samples of one dataset on one rank with the very calls that a reward would get for all of them.

    Pointwise rewards are called for `batch_size` samples, in order, so a window whose length is a multiple of all batch
    sizes can be scored as soon as it is full. A groupwise reward needs groups, whose members may be far apart: then
    everything is kept until the end.

    Args:
        processor: The rewards.
        dataset: Whose samples they are.
        look: Is shown the samples of each window before they are let go.
        measure: Whether statistics are wanted.
    """

    def __init__(
        self,
        processor: RewardProcessor,
        dataset: str,
        look: Callable[[Sequence[BaseSample]], None] = lambda samples: None,
        measure: bool = True,
    ) -> None:
        self._processor = processor
        self._window = processor.window(dataset)
        self._look = look
        self._measure = measure
        self._waiting: list[BaseSample] = []
        self._scored: list[Scored] = []

    def add(self, samples: Sequence[BaseSample]) -> None:
        """Takes new samples, and scores the windows that they fill."""
        self._waiting += samples
        while self._window is not None and len(self._waiting) >= self._window:
            full, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
            self._score(full)

    def finish(self) -> list[Scored]:
        """Scores the rest; all that were taken, in their order."""
        rest, self._waiting = self._waiting, []
        self._score(rest)
        return self._scored

    def _score(self, samples: list[BaseSample]) -> None:
        self._processor.score(samples)
        self._look(samples)
        rows = (
            measure_samples(samples) if self._measure else torch.full((len(samples), len(SAMPLE_STATISTICS)), math.nan)
        )
        self._scored += [
            Scored(s.index, s.member, s.group_id, s.prompt, dict(s.rewards), row)
            for s, row in zip(samples, rows, strict=True)
        ]


def statistics_of(scored: Sequence[Scored]) -> Tensor:
    """Their rows of statistics, float32 [len(scored), S]."""
    return torch.stack([one.statistics for one in scored]) if scored else torch.empty((0, len(SAMPLE_STATISTICS)))
