"""What an advantage estimator knows about a cycle beside its rewards: who is compared with whom, and what counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Components:
    """The single rewards behind the weighted totals, for estimators that combine them themselves.

    Attributes:
        names: The R rewards.
        values: float64 [N, R]; entries outside the mask are 0 and mean nothing.
        weights: float64 [N, R], each reward's weight for that sample's dataset.
        mask: bool [N, R], False where a reward does not apply to the sample, or the sample is not valid.
    """

    names: tuple[str, ...]
    values: Tensor
    weights: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Groups:
    """The samples of a cycle over all ranks, in rows sorted by dataset, group and member.

    Attributes:
        ids: int64 [N], the group of each sample. It names the prompt and does not change from cycle to cycle.
        sources: int64 [N], its dataset.
        members: int64 [N], its number inside the group.
        valid: bool [N]. A sample whose scoring failed is not: its reward means nothing, no statistic may contain it,
            and its advantage is 0 whatever the estimator returns.
        components: The rewards one by one.
    """

    ids: Tensor
    sources: Tensor
    members: Tensor
    valid: Tensor
    components: Components

    def rows(self) -> list[Tensor]:
        """Row indices of each group's valid members; groups without any are left out."""
        return group_rows(self.ids, self.sources, self.valid)

    def prompts(self) -> list[str]:
        """An identity of the prompt of each entry of `rows()`, the same in every cycle and after a resume."""
        firsts = [int(members[0]) for members in self.rows()]
        return [f"{int(self.sources[row])}/{int(self.ids[row])}" for row in firsts]

    def source_rows(self) -> dict[int, Tensor]:
        """Row indices of the valid samples of each dataset that has any."""
        present = sorted(set(self.sources[self.valid].tolist()))
        return {source: ((self.sources == source) & self.valid).nonzero().flatten() for source in present}


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
