"""From scored samples on every rank to each sample's advantage."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flow_factory.advantage.estimators import AdvantageEstimator
from flow_factory.advantage.groups import Groups, group_rows, population_std, weighted_totals
from flow_factory.advantage.registry import get_adv_estimator
from flow_factory.advantage.stateful import StatefulEstimator
from flow_factory.advantage.table import (
    Rewards,
    RewardTable,
    RewardWeights,
    build_table,
    empty_table,
    rows_of_scores,
    signed64,
)
from flow_factory.distributed import Comm
from flow_factory.errors import FlowFactoryError, InputError, RunError
from flow_factory.hparams.keyword_params import bind_params
from flow_factory.registry import describe_object
from flow_factory.samples.sample import BaseSample


class AdvantageProcessor:
    """Gathers rewards over ranks, groups them, and calls an estimator.

    Every rank computes the advantages of all samples from the same numbers in the same order, and keeps its own. So the
    result does not depend, to the last bit, on how samples are divided among ranks.

    Args:
        aggregation: Registered estimator key, dotted path, function (see `AdvantageEstimator`) or `StatefulEstimator`.
        params: Its keyword parameters (`train.advantage_params`).
        inherited: Fields of `train:` that a parameter of the same name takes its value from.
        global_std: As one of the inherited: divide by the deviation over the source dataset instead of the group.
        gather: The ranks; None = one process.
        group_size: Expected members per group; a group with another count is an error. None accepts any.
        place: Where `params` were written, for errors.
    """

    def __init__(
        self,
        aggregation: str | AdvantageEstimator | StatefulEstimator,
        *,
        params: Mapping[str, Any] | None = None,
        inherited: Mapping[str, Any] | None = None,
        global_std: bool = True,
        gather: Comm | None = None,
        group_size: int | None = None,
        place: str = "",
    ) -> None:
        self.name = aggregation if isinstance(aggregation, str) else getattr(aggregation, "__name__", repr(aggregation))
        function = get_adv_estimator(aggregation) if isinstance(aggregation, str) else aggregation
        self.what = f"{self.name!r}, {describe_object(function)},"
        inherited = {"global_std": global_std, **(inherited or {})}
        self.estimator = bind_estimator(aggregation, params or {}, inherited, place)
        self._cycle: int | None = None
        self._memory_before: dict[str, Any] = {}
        self.comm = gather if gather is not None else Comm.single()
        self.group_size = group_size
        self._metrics: dict[str, float] = {}

    def compute(
        self,
        samples: Sequence[BaseSample],
        rewards: Rewards | None,
        reward_weights: RewardWeights,
        cycle: int | None = None,
    ) -> Tensor:
        """Advantages of this rank's samples. Called by all ranks together.

        Args:
            samples: This rank's samples of the cycle.
            rewards: Per sample, a mapping of reward name to score; or per reward name, the scores of all samples.
                None = `sample.rewards`. A score of None = scoring failed; a missing name = the reward does not apply.
                In a column (`RewardBuffer.finalize`) NaN means either, and `sample.rewards` tells which.
            reward_weights: Reward name to weight, or to a mapping of source name to weight; or a function of the
                sample that returns reward name to weight.
            cycle: Number of the cycle. An estimator with a memory moves it on once per cycle: computed again for the
                same number, it starts from the memory of before.

        Returns:
            float64 [n] on CPU, in the order of `samples`. A sample with a failed reward has 0.

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
        self._begin(cycle)
        advantages = self._estimate(table, names)
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
        table = empty_table()
        try:
            rows = rows_of_scores(samples, rewards)
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
                table = build_table(samples, rows, names, reward_weights)
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

    def state_dict(self, cycle: int) -> dict[str, Any]:
        """The estimator's memory at the start of `cycle`, the number of the next unfinished one; empty without."""
        if not isinstance(self.estimator, StatefulEstimator):
            return {}
        unfinished = cycle == self._cycle
        return copy.deepcopy(self._memory_before if unfinished else self.estimator.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            InputError: If the memory is that of another estimator.
        """
        self._cycle = None
        if not isinstance(self.estimator, StatefulEstimator):
            return
        try:
            self.estimator.load_state_dict(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"the saved state has no memory of the advantage estimator {self.name!r} "
                f"({type(error).__name__}: {error}); it belongs to a run with another train.advantage_aggregation."
            ) from error

    def _begin(self, cycle: int | None) -> None:
        """Keeps the memory as it is before this cycle, or goes back to it."""
        if not isinstance(self.estimator, StatefulEstimator):
            return
        if cycle is not None and cycle == self._cycle:
            self.estimator.load_state_dict(copy.deepcopy(self._memory_before))
        else:
            self._cycle, self._memory_before = cycle, copy.deepcopy(self.estimator.state_dict())

    def _estimate(self, table: RewardTable, names: Sequence[str]) -> Tensor:
        groups = table.groups(names)
        single = groups.components
        totals = weighted_totals(single.values, single.weights, single.mask)
        try:
            result = self.estimator(totals, groups)
        except FlowFactoryError:
            raise
        except Exception as error:
            raise RunError(f"advantage estimator {self.what} raised {type(error).__name__}: {error}.") from error
        advantages = torch.as_tensor(result).detach().to(device="cpu", dtype=torch.float64)
        if advantages.shape != totals.shape or not bool(torch.isfinite(advantages).all()):
            raise RunError(
                f"advantage estimator {self.what} returned shape {tuple(advantages.shape)} with "
                f"{int((~torch.isfinite(advantages)).sum())} non-finite values; expected {tuple(totals.shape)} finite "
                f"ones."
            )
        return torch.where(groups.valid, advantages, torch.zeros_like(advantages))


def bind_estimator(
    aggregation: str | Callable[..., Any], params: Mapping[str, Any], inherited: Mapping[str, Any], place: str = ""
) -> Callable[[Tensor, Groups], Any]:
    """An estimator with its keyword parameters filled in; see `AdvantageProcessor` for the arguments.

    Raises:
        InputError: If there is no such estimator, or a parameter is unknown, missing or of the wrong type.
    """
    found: Any = get_adv_estimator(aggregation) if isinstance(aggregation, str) else aggregation
    if isinstance(found, StatefulEstimator):
        return found
    is_class = isinstance(found, type)
    if not callable(found) or (is_class and not issubclass(found, StatefulEstimator)):
        raise InputError(
            f"advantage estimator {aggregation!r} (train.advantage_aggregation) is {found!r}, not a function; give "
            f"fn(rewards, groups, **params), or a class derived from flow_factory.advantage.StatefulEstimator."
        )
    fixed = () if is_class else ("rewards", "groups")
    path = ("train", "advantage_params")
    bound = bind_params(found, params, fixed=fixed, path=path, place=place, inherited=inherited)
    return found(**bound) if is_class else functools.partial(found, **bound)


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
