"""A cycle's scores as a table of rows, which ranks gather and put in one order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_factory.advantage.groups import Components, Groups
from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.samples.sample import BaseSample

Weight = float | Mapping[str, float]
RewardWeights = Mapping[str, Weight] | Callable[[BaseSample], Mapping[str, float]]
Rewards = Sequence[Mapping[str, float | None]] | Mapping[str, Sequence[float | None] | Tensor]
MISSING = object()
_LARGEST = 1e100  # squares of larger numbers, summed over a dataset, would overflow float64 and silently give 0


@dataclass(frozen=True)
class RewardTable:
    """Rewards of samples in rows, on CPU.

    Attributes:
        source_ids, group_ids, members: int64 [N].
        rewards, weights: float64 [N, R]; 0 outside the mask.
        applicable: bool [N, R], the reward is meant for the sample.
        failed: bool [N, R], it is meant for it, but scoring failed.
    """

    source_ids: Tensor
    group_ids: Tensor
    members: Tensor
    rewards: Tensor
    weights: Tensor
    applicable: Tensor
    failed: Tensor

    @property
    def mask(self) -> Tensor:
        """bool [N, R]: usable rewards. A sample with a failed reward has none: its total would be a different sum."""
        return self.applicable & ~self.failed.any(dim=1, keepdim=True)

    def __getitem__(self, rows: Tensor) -> RewardTable:
        return RewardTable(
            self.source_ids[rows],
            self.group_ids[rows],
            self.members[rows],
            self.rewards[rows],
            self.weights[rows],
            self.applicable[rows],
            self.failed[rows],
        )

    def groups(self, names: Sequence[str]) -> Groups:
        """The rows as estimators see them."""
        mask = self.mask
        values = torch.where(mask, self.rewards, torch.zeros_like(self.rewards))
        components = Components(tuple(names), values, self.weights, mask)
        return Groups(self.group_ids, self.source_ids, self.members, mask.any(dim=1), components)

    def gather(self, comm: Comm) -> RewardTable:
        """The tables of all ranks, in rank order. Integers travel as int64, scores as float64."""
        r = self.rewards.shape[1]
        ids = torch.stack([self.source_ids, self.group_ids, self.members], dim=1)
        flags = torch.cat([self.applicable, self.failed], dim=1).to(torch.int64)
        integers = comm.gather_rows(torch.cat([ids, flags], dim=1).contiguous())
        floats = comm.gather_rows(torch.cat([self.rewards, self.weights], dim=1).contiguous())
        return RewardTable(
            integers[:, 0],
            integers[:, 1],
            integers[:, 2],
            floats[:, :r],
            floats[:, r:],
            integers[:, 3 : 3 + r].bool(),
            integers[:, 3 + r :].bool(),
        )

    def canonical_order(self) -> Tensor:
        """Rows sorted by source, group and member: the same for every division of the samples among ranks."""
        keys = zip(
            self.source_ids.tolist(),
            self.group_ids.tolist(),
            self.members.tolist(),
            self.failed.tolist(),
            self.rewards.tolist(),
            range(self.rewards.shape[0]),
            strict=True,
        )
        return torch.tensor([key[-1] for key in sorted(keys)], dtype=torch.int64)


def rows_of_scores(samples: Sequence[BaseSample], rewards: Rewards | None) -> list[Mapping[str, float | None]]:
    if rewards is None:
        return [sample.rewards for sample in samples]
    if isinstance(rewards, Mapping):
        for name, column in rewards.items():
            if len(column) != len(samples):
                raise RunError(f"reward {name!r} has {len(column)} scores for {len(samples)} samples.")
        columns = {name: c.tolist() if isinstance(c, Tensor) else list(c) for name, c in rewards.items()}
        return [
            {
                name: score
                for name, column in columns.items()
                if (score := _in_column(column[i], name, s)) is not MISSING
            }
            for i, s in enumerate(samples)
        ]
    if len(rewards) != len(samples):
        raise RunError(f"rewards has {len(rewards)} rows for {len(samples)} samples.")
    return list(rewards)


def _in_column(score: float | None, name: str, sample: BaseSample) -> Any:
    """A score of a column, in which NaN stands for "failed" and "does not apply" alike: the sample knows which.

    A NaN that the sample does not explain stays, and is an error later.
    """
    if score is None or not math.isnan(score) or not sample.rewards:
        return score
    return MISSING if name not in sample.rewards else None if sample.rewards[name] is None else score


def build_table(
    samples: Sequence[BaseSample],
    rows: Sequence[Mapping[str, float | None]],
    names: Sequence[str],
    reward_weights: RewardWeights,
) -> RewardTable:
    shape = (len(samples), len(names))
    rewards, weights = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    applicable, failed = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        if not row:
            raise InputError(
                f"no reward applies to dataset {sample.source!r} (prompt {sample.prompt!r}). Add a reward, or add the "
                f"dataset to some reward's applicable_datasets."
            )
        for name, score in row.items():
            k = names.index(name)
            applicable[i, k] = True
            weights[i, k] = _weight(reward_weights, name, sample)
            if score is None:
                failed[i, k] = True
            elif not abs(score) <= _LARGEST:
                raise RunError(
                    f"reward {name!r} is {score} for prompt {sample.prompt!r} (member {sample.member}); means and "
                    f"deviations need finite numbers of at most {_LARGEST:g}."
                )
            else:
                rewards[i, k] = float(score)
    return RewardTable(
        torch.tensor([signed64(s.source_id) for s in samples], dtype=torch.int64),
        torch.tensor([signed64(s.group_id) for s in samples], dtype=torch.int64),
        torch.tensor([s.member for s in samples], dtype=torch.int64),
        rewards,
        weights,
        applicable,
        failed,
    )


def empty_table() -> RewardTable:
    ids, scores = torch.zeros(0, dtype=torch.int64), torch.zeros((0, 0), dtype=torch.float64)
    return RewardTable(ids, ids, ids, scores, scores, scores.bool(), scores.bool())


def _weight(reward_weights: RewardWeights, name: str, sample: BaseSample) -> float:
    known = reward_weights if isinstance(reward_weights, Mapping) else reward_weights(sample)
    weight = known.get(name)
    if isinstance(weight, Mapping):
        weight = weight.get(sample.source)
    if weight is None:
        raise InputError(
            f"reward {name!r} has no weight for dataset {sample.source!r} (rewards[].weight). Give a number, or name "
            f"every dataset it applies to."
        )
    return float(weight)


def signed64(value: int) -> int:
    """A 64-bit identity as the signed integer with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
