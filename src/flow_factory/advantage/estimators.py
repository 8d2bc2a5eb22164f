"""Advantage estimators that compare the members of a group: pure functions of the whole cycle's rewards, in float64.

`rewards` are the weighted totals R_i = sum_k w_k r_ki over the rewards that apply, [N], over all ranks. Standard
deviations are population ones (ddof 0), computed in two passes, with a floor of 1e-6. A group whose rewards are all
equal has advantages of exactly 0, whatever the rounding of its mean; so has a group with fewer than two valid members.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from flow_factory.advantage.groups import Groups, is_constant, population_std
from flow_factory.advantage.registry import register_adv_estimator

STD_FLOOR = 1e-6
PositiveCount = Annotated[int, Field(ge=1)]


class AdvantageEstimator(Protocol):
    """What `train.advantage_aggregation` names: a registered key, a dotted path, or a callable given from Python."""

    def __call__(self, rewards: Tensor, groups: Groups, **params: Any) -> Tensor:
        """Advantages of all samples of a cycle, over all ranks.

        Args:
            rewards: float64 [N], the weighted totals; 0 in rows that are not valid.
            groups: Who is compared with whom.
            params: Keyword parameters of the function, from `train.advantage_params`; one with the name of a field of
                `train:` (`global_std`) takes that field's value.

        Returns:
            [N], finite.
        """
        ...


@register_adv_estimator("sum")
def sum_advantages(rewards: Tensor, groups: Groups, *, global_std: bool = True) -> Tensor:
    """A_i = (R_i - mean of the group) / S.

    S is the standard deviation of R over all samples of the same source (`global_std`) or over the group. GRPO's
    group-relative advantage (arXiv 2402.03300) as Flow-GRPO (arXiv 2505.05470) uses it.
    """
    source_std = {source: population_std(rewards[rows]) for source, rows in groups.source_rows().items()}
    advantages = torch.zeros_like(rewards)
    for members in groups.rows():
        values = rewards[members]
        if is_constant(values):
            continue
        std = source_std[int(groups.sources[members[0]])] if global_std else population_std(values)
        advantages[members] = (values - values.mean()) / max(std, STD_FLOOR)
    return advantages


@register_adv_estimator("gdpo")
def gdpo_advantages(rewards: Tensor, groups: Groups) -> Tensor:
    """Normalise each reward in its group, sum, normalise once more over the cycle (GDPO, arXiv 2601.05242).

    z_ki = (r_ki - mean of the group) / max(std of the group, 1e-6); C = sum_k w_k z_k;
    A = (C - mean of all) / max(std of all, 1e-6). A reward that is constant in a group adds nothing there, and a group
    in which all rewards are constant has advantages of 0.
    """
    combined = torch.zeros_like(rewards)
    informative = torch.zeros_like(groups.valid)
    single = groups.components
    for members in groups.rows():
        for k in range(len(single.names)):
            scored = members[single.mask[members, k]]
            values = single.values[scored, k]
            if is_constant(values):
                continue
            z = (values - values.mean()) / max(population_std(values), STD_FLOOR)
            combined[scored] += single.weights[scored, k] * z
            informative[members] = True
    if not bool(informative.any()):
        return combined
    everyone = combined[groups.valid]
    normalised = (combined - everyone.mean()) / max(population_std(everyone), STD_FLOOR)
    return torch.where(informative, normalised, torch.zeros_like(normalised))


@register_adv_estimator("rloo")
def rloo_advantages(rewards: Tensor, groups: Groups) -> Tensor:
    """A_i = R_i minus the mean of the *other* members, the leave-one-out baseline (RLOO, arXiv 2402.14740).

    It equals K / (K - 1) (R_i - mean of the group): unbiased, and not divided by any deviation, so the advantages have
    the scale of the reward.
    """
    advantages = torch.zeros_like(rewards)
    for members in groups.rows():
        values, count = rewards[members], len(members)
        if not is_constant(values):
            advantages[members] = (values - values.mean()) * (count / (count - 1))
    return advantages


@register_adv_estimator("best_of")
def best_of_advantages(
    rewards: Tensor, groups: Groups, *, num_best: PositiveCount = 1, negatives: bool = True
) -> Tensor:
    """The group-relative advantage of *being among the best*: b_i = 1 for the `num_best` best of a group, 0 for others.

    A_i = (b_i - mean b) / std b. Members that tie for the last places share them. How far apart the rewards are does
    not matter, so one outlier cannot outweigh the rest. With `negatives: false` the others have 0 and only the best are
    learned from, as in reward-ranked fine-tuning (RAFT, arXiv 2304.06767).
    """
    advantages = torch.zeros_like(rewards)
    for members in groups.rows():
        values = rewards[members]
        if is_constant(values) or len(members) <= num_best:
            continue
        border = values.sort(descending=True).values[num_best - 1]
        above, tied = values > border, values == border
        best = above.double() + tied.double() * (num_best - int(above.sum())) / int(tied.sum())
        relative = (best - best.mean()) / max(population_std(best), STD_FLOOR)
        advantages[members] = relative if negatives else relative.clamp(min=0.0)
    return advantages


@register_adv_estimator("rank")
def rank_advantages(rewards: Tensor, groups: Groups) -> Tensor:
    """A_i = the rank of R_i in its group, centred, over sqrt((n^2 - 1) / 12), the deviation of n distinct ranks.

    Rank-based utilities as evolution strategies use them (Wierstra et al., arXiv 1106.4487): any monotone change of the
    reward leaves the advantages as they are. Ties have the mean of their ranks.
    """
    advantages = torch.zeros_like(rewards)
    for members in groups.rows():
        values, count = rewards[members], len(members)
        if is_constant(values):
            continue
        below = (values[:, None] > values[None, :]).sum(dim=1)
        equal = (values[:, None] == values[None, :]).sum(dim=1)
        ranks = below.double() + (equal.double() - 1) / 2
        advantages[members] = (ranks - (count - 1) / 2) / math.sqrt((count**2 - 1) / 12)
    return advantages
