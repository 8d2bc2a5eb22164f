"""Advantage estimators that remember earlier cycles. Their memory is part of a run's state.

Every rank computes the advantages of all samples from the same gathered numbers, so the memories of all ranks are equal
to the last bit, and a checkpoint holds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from flow_factory.advantage.estimators import STD_FLOOR, PositiveCount
from flow_factory.advantage.groups import Groups, is_constant, population_std
from flow_factory.advantage.registry import register_adv_estimator

Decay = Annotated[float, Field(ge=0, lt=1)]


class StatefulEstimator(ABC):
    """An estimator with a memory: registered as a class, built once per run with `train.advantage_params`.

    The processor calls it once per cycle, and undoes the memory of a cycle that was dropped or is computed again.
    """

    @abstractmethod
    def __call__(self, rewards: Tensor, groups: Groups) -> Tensor:
        """Advantages of a cycle, as `AdvantageEstimator`; moves the memory on."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The memory: nested dicts and lists of tensors, numbers, strings and None."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


@register_adv_estimator("reinforce")
class MovingAverageBaseline(StatefulEstimator):
    """A_i = R_i - b with b a moving average of earlier cycles' mean rewards, one per dataset.

    REINFORCE (Williams, "Simple statistical gradient-following algorithms", Machine Learning 8, 1992) with a
    reinforcement baseline: after each cycle b <- decay b + (1 - decay) mean R. The baseline of a cycle does not contain
    that cycle's rewards, which keeps the gradient unbiased; only the first cycle has nothing else than its own mean.

    Args:
        decay: Weight of the past.
    """

    def __init__(self, *, decay: Decay = 0.9) -> None:
        self.decay = decay
        self._baselines: dict[str, float] = {}

    def __call__(self, rewards: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(rewards)
        for source, rows in groups.source_rows().items():
            mean = float(rewards[rows].mean())
            baseline = self._baselines.get(str(source), mean)
            advantages[rows] = rewards[rows] - baseline
            self._baselines[str(source)] = self.decay * baseline + (1 - self.decay) * mean
        return advantages

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baselines = {str(source): float(value) for source, value in state["baselines"].items()}


@register_adv_estimator("per_prompt")
class PerPromptStatistics(StatefulEstimator):
    """A_i = (R_i - mean) / std over the last rewards of the *prompt*, from this cycle and from earlier ones.

    Per-prompt statistics as DDPO keeps them (arXiv 2305.13301): they need no groups, so a prompt may have few samples
    per cycle as long as it comes back. While a prompt has fewer than `min_count` rewards, mean and std are those of all
    samples of its dataset in this cycle.

    Args:
        buffer_size: Rewards kept per prompt; the oldest are forgotten.
        min_count: From how many on they are used.
    """

    def __init__(self, *, buffer_size: PositiveCount = 32, min_count: PositiveCount = 16) -> None:
        self.buffer_size, self.min_count = buffer_size, min(min_count, buffer_size)
        self._rewards: dict[str, list[float]] = {}

    def __call__(self, rewards: Tensor, groups: Groups) -> Tensor:
        advantages = torch.zeros_like(rewards)
        everyone = {source: rewards[rows] for source, rows in groups.source_rows().items()}
        for prompt, rows in zip(groups.prompts(), groups.rows(), strict=True):
            kept = [*self._rewards.get(prompt, []), *rewards[rows].tolist()][-self.buffer_size :]
            self._rewards[prompt] = kept
            known = torch.tensor(kept, dtype=torch.float64)
            if len(kept) < self.min_count:
                known = everyone[int(groups.sources[rows[0]])]
            if not is_constant(known):
                advantages[rows] = (rewards[rows] - known.mean()) / max(population_std(known), STD_FLOOR)
        return advantages

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": {prompt: list(values) for prompt, values in self._rewards.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards = {str(prompt): [float(v) for v in values] for prompt, values in state["rewards"].items()}
