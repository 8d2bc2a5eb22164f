"""From scored samples on every rank to each sample's advantage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_factory.advantage.estimators import AdvantageEstimator, group_rows, population_std, weighted_totals
from flow_factory.advantage.registry import get_adv_estimator
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


class AdvantageProcessor:
    """Gathers rewards over ranks, groups them, and calls an estimator.

    Every rank computes the advantages of all samples from the same numbers in the same order, and keeps its own. So the
    result does not depend, to the last bit, on how samples are divided among ranks.

    Args:
        aggregation: Registered estimator key, dotted path, or callable (see `AdvantageEstimator`).
        global_std: Divide by the standard deviation over the source dataset instead of over the group.
        gather: The ranks; None = one process.
        group_size: Expected members per group; a group with another count is an error. None accepts any.
    """

    def __init__(
        self,
        aggregation: str | AdvantageEstimator,
        *,
        global_std: bool,
        gather: Comm | None = None,
        group_size: int | None = None,
    ) -> None:
        self.name = aggregation if isinstance(aggregation, str) else getattr(aggregation, "__name__", repr(aggregation))
        self.estimator: AdvantageEstimator = (
            get_adv_estimator(aggregation) if isinstance(aggregation, str) else aggregation
        )
        self.global_std = global_std
        self.comm = gather if gather is not None else Comm.single()
        self.group_size = group_size
        self._metrics: dict[str, float] = {}

    def compute(self, samples: Sequence[BaseSample], rewards: Rewards | None, reward_weights: RewardWeights) -> Tensor:
        """Advantages of this rank's samples. Called by all ranks together.

        Args:
            samples: This rank's samples of the cycle.
            rewards: Per sample, a mapping of reward name to score; or per reward name, the scores of all samples.
                None = `sample.rewards`. A score of None = scoring failed; a missing name = the reward does not apply.
                In a column (`RewardBuffer.finalize`) NaN means either, and `sample.rewards` tells which.
            reward_weights: Reward name to weight, or to a mapping of source name to weight; or a function of the
                sample that returns reward name to weight.

        Returns:
            float64 [n] on CPU, in the order of `samples`. A sample with a failed reward, or in a group with fewer than
            two usable members, has 0.

        Raises:
            RunError: A score that is not finite, an incomplete group, or an estimator with a wrong result.
            InputError: A reward without a weight, or a dataset to which no reward applies.
        """
        names, sources, local = self._build(samples, rewards, reward_weights)
        counts = self.comm.gather_rows(torch.tensor([len(samples)], dtype=torch.int64)).tolist()
        table = local.gather(self.comm)
        order = table.canonical_order()
        table = table[order]
        self._check_groups(table, sources)
        advantages = self._estimate(table)
        self._metrics = _measure(table, advantages, names, sources)

        unsorted = torch.empty_like(advantages)
        unsorted[order] = advantages
        start = sum(counts[: self.comm.rank])
        return unsorted[start : start + len(samples)]

    def pop_advantage_metrics(self) -> dict[str, float]:
        """Metrics of the last `compute`, over all ranks, and forgets them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _build(
        self, samples: Sequence[BaseSample], rewards: Rewards | None, reward_weights: RewardWeights
    ) -> tuple[list[str], dict[int, str], RewardTable]:
        """Reward names and source names of all ranks, and this rank's table; fails on all ranks if one fails."""
        error: Exception | None = None
        rows: list[Mapping[str, float | None]] = []
        table = _empty_table()
        try:
            rows = _rows_of_scores(samples, rewards)
        except Exception as found:
            error = found
        facts = self.comm.gather_objects(
            {
                "names": sorted({name for row in rows for name in row}),
                "sources": {str(signed64(s.source_id)): s.source for s in samples},
            }
        )
        names = sorted({name for fact in facts for name in fact["names"]})
        sources = {int(key): name for fact in facts for key, name in fact["sources"].items()}
        if error is None:
            try:
                table = _build_table(samples, rows, names, reward_weights)
            except Exception as found:  # raised below, on every rank: a lone failure would leave the others waiting
                error = found
        self.comm.raise_together(error)
        return names, sources, table

    def _check_groups(self, table: RewardTable, sources: Mapping[int, str]) -> None:
        if self.group_size is None:
            return
        for members in group_rows(table.group_ids, table.source_ids, torch.ones_like(table.group_ids).bool()):
            if len(members) != self.group_size:
                first = members[0]
                raise RunError(
                    f"group {int(table.group_ids[first])} of dataset {sources[int(table.source_ids[first])]!r} has "
                    f"{len(members)} samples in this cycle, but train.group_size is {self.group_size}. The sampler "
                    f"must give complete groups."
                )

    def _estimate(self, table: RewardTable) -> Tensor:
        advantages = self.estimator(
            torch.where(table.mask, table.rewards, torch.zeros_like(table.rewards)),
            table.group_ids,
            table.source_ids,
            table.weights,
            table.mask,
            global_std=self.global_std,
        )
        advantages = torch.as_tensor(advantages).detach().to(device="cpu", dtype=torch.float64)
        if advantages.shape != table.group_ids.shape or not bool(torch.isfinite(advantages).all()):
            raise RunError(
                f"advantage estimator {self.name!r} returned shape {tuple(advantages.shape)} with "
                f"{int((~torch.isfinite(advantages)).sum())} non-finite values; expected "
                f"{tuple(table.group_ids.shape)} finite ones."
            )
        return advantages


def _rows_of_scores(samples: Sequence[BaseSample], rewards: Rewards | None) -> list[Mapping[str, float | None]]:
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


def _build_table(
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


def _empty_table() -> RewardTable:
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


def _measure(
    table: RewardTable, advantages: Tensor, names: Sequence[str], sources: Mapping[int, str]
) -> dict[str, float]:
    """Metrics of a whole cycle: over all samples, and per source where there are several."""
    metrics = _measure_rows(table, advantages, names)
    present = sorted(set(table.source_ids.tolist()))
    if len(present) > 1:
        for source in present:
            rows = (table.source_ids == source).nonzero().flatten()
            part = _measure_rows(table[rows], advantages[rows], names)
            metrics |= {f"{sources[source]}/{key}": value for key, value in part.items()}
    return metrics


def _measure_rows(table: RewardTable, advantages: Tensor, names: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    mask, valid = table.mask, table.mask.any(dim=1)
    totals = weighted_totals(table.rewards, table.weights, mask)
    columns = [(name, table.rewards[(table.applicable & ~table.failed)[:, k], k]) for k, name in enumerate(names)]
    for name, values in [*columns, ("total", totals[valid])]:
        if values.numel():
            metrics[f"reward/{name}/mean"] = float(values.mean())
            metrics[f"reward/{name}/std"] = population_std(values)
    everyone = torch.ones_like(valid)
    groups = group_rows(table.group_ids, table.source_ids, everyone)
    stds = [population_std(totals[members[valid[members]]]) for members in groups]
    silent = [bool((advantages[members] == 0).all()) for members in groups]
    if groups:
        metrics["reward/group_std"] = sum(stds) / len(stds)
        metrics["reward/zero_std_ratio"] = sum(silent) / len(silent)
        metrics["reward/failed_ratio"] = float(table.failed.any(dim=1).double().mean())
        metrics["advantage/abs_mean"] = float(advantages.abs().mean())
    return metrics


def signed64(value: int) -> int:
    """A 64-bit identity as the signed integer with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
