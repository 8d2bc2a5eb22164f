"""Advantage estimators: pure functions of the whole cycle's rewards, in float64.

Standard deviations are population ones (ddof 0), computed in two passes, with a floor of 1e-6. A group whose rewards
are all equal has advantages of exactly 0, whatever the rounding of its mean.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flow_factory.advantage.registry import register_adv_estimator

STD_FLOOR = 1e-6


class AdvantageEstimator(Protocol):
    """What `train.advantage_aggregation` names: a registered key, a dotted path, or a callable given from Python."""

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        source_ids: Tensor,
        weights: Tensor,
        mask: Tensor,
        *,
        global_std: bool,
    ) -> Tensor:
        """Advantages of all samples of a cycle, over all ranks.

        Args:
            rewards: float64 [N, R]; entries outside the mask are 0 and mean nothing.
            group_ids: int64 [N].
            source_ids: int64 [N], the dataset of each sample.
            weights: float64 [N, R], each reward's weight for that sample's dataset.
            mask: bool [N, R], False where a reward does not apply to the sample. A row that is False throughout has
                no usable reward (scoring failed): its advantage is 0 and no statistic contains it.
            global_std: Divide by the standard deviation over the source dataset instead of over the group.

        Returns:
            float64 [N].
        """
        ...


@register_adv_estimator("sum")
def sum_advantages(
    rewards: Tensor, group_ids: Tensor, source_ids: Tensor, weights: Tensor, mask: Tensor, *, global_std: bool
) -> Tensor:
    """A_i = (R_i - mean of the group) / S with R_i = sum_k w_k r_ki over the rewards that apply.

    S is the standard deviation of R over all samples of the same source (`global_std`) or over the group. GRPO's
    group-relative advantage (arXiv 2402.03300) as Flow-GRPO (arXiv 2505.05470) uses it. A group with fewer than two
    usable members has advantages of 0. See `AdvantageEstimator` for the arguments.
    """
    totals = weighted_totals(rewards, weights, mask)
    valid = mask.any(dim=1)
    source_std = {
        int(source): population_std(totals[(source_ids == source) & valid]) for source in source_ids.unique().tolist()
    }
    advantages = torch.zeros_like(totals)
    for members in group_rows(group_ids, source_ids, valid):
        values = totals[members]
        if is_constant(values):
            continue
        std = source_std[int(source_ids[members[0]])] if global_std else population_std(values)
        advantages[members] = (values - values.mean()) / max(std, STD_FLOOR)
    return advantages


@register_adv_estimator("gdpo")
def gdpo_advantages(
    rewards: Tensor, group_ids: Tensor, source_ids: Tensor, weights: Tensor, mask: Tensor, *, global_std: bool = False
) -> Tensor:
    """Normalise each reward in its group, sum, normalise once more over the cycle (GDPO, arXiv 2601.05242).

    z_ki = (r_ki - mean of the group) / max(std of the group, 1e-6); C = sum_k w_k z_k;
    A = (C - mean of all) / max(std of all, 1e-6). A reward that is constant in a group adds nothing there, and a group
    in which all rewards are constant has advantages of 0. `global_std` has no meaning here and is ignored. See
    `AdvantageEstimator` for the arguments.
    """
    combined = torch.zeros(rewards.shape[0], dtype=torch.float64, device=rewards.device)
    valid = mask.any(dim=1)
    informative = torch.zeros_like(valid)
    for members in group_rows(group_ids, source_ids, valid):
        for k in range(rewards.shape[1]):
            scored = members[mask[members, k]]
            values = rewards[scored, k]
            if is_constant(values):
                continue
            z = (values - values.mean()) / max(population_std(values), STD_FLOOR)
            combined[scored] += weights[scored, k] * z
            informative[members] = True
    if not bool(informative.any()):
        return combined
    everyone = combined[valid]
    normalised = (combined - everyone.mean()) / max(population_std(everyone), STD_FLOOR)
    return torch.where(informative, normalised, torch.zeros_like(normalised))


def weighted_totals(rewards: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """R_i = sum_k w_k r_ki over the mask, float64 [N]."""
    return torch.where(mask, weights * rewards, torch.zeros_like(rewards)).sum(dim=1)


def group_rows(group_ids: Tensor, source_ids: Tensor, valid: Tensor) -> list[Tensor]:
    """Row indices of each group's valid members, in order of first appearance.

    A group is a pair of source and group id, so that equal ids in two datasets stay apart. Ids are compared as Python
    integers: they use all 64 bits, more than a float can hold.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    for row, (source, group, ok) in enumerate(
        zip(source_ids.tolist(), group_ids.tolist(), valid.tolist(), strict=True)
    ):
        members = rows.setdefault((source, group), [])
        if ok:
            members.append(row)
    return [torch.tensor(members, dtype=torch.int64, device=group_ids.device) for members in rows.values() if members]


def population_std(values: Tensor) -> float:
    """Standard deviation with ddof 0 by two passes (E[x^2] - E[x]^2 cancels, and can turn negative); 0 if empty."""
    if values.numel() == 0:
        return 0.0
    values = values.double()
    return float((values - values.mean()).square().mean().sqrt())


def is_constant(values: Tensor) -> bool:
    """True if there are fewer than two values, or all are equal."""
    return values.numel() < 2 or bool((values == values[0]).all())
