"""Numbers that belong to complete groups, whose members may lie in different micro-batches and on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flow_factory.distributed import Comm
from flow_factory.samples import BaseSample
from flow_factory.samples.noise import signed64


def over_groups(
    samples: Sequence[BaseSample], columns: Tensor, function: Callable[[Tensor], Tensor], comm: Comm
) -> Tensor:
    """Applies a function to the rows of each complete group, and gives every sample its own row of the result.

    All ranks call it together. Members come to the function in the order of their member numbers, whatever the order
    and the division of the samples, so the result does not depend on them to the last bit.

    Args:
        samples: This rank's samples.
        columns: What is known of each, [n, C], in their order.
        function: [K, C] of one group to [K, D].
        comm: The ranks.

    Returns:
        float64 [n, D], on the CPU, in the order of `samples`.
    """
    identity = [(signed64(s.source_id), signed64(s.group_id), s.member) for s in samples]
    counts = comm.gather_rows(torch.tensor([len(samples)], dtype=torch.int64)).tolist()
    keys = comm.gather_rows(torch.tensor(identity, dtype=torch.int64).reshape(-1, 3))
    values = comm.gather_rows(columns.detach().to("cpu", torch.float64))
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, (source, group, member) in enumerate(keys.tolist()):
        groups.setdefault((source, group), []).append((member, row))
    results: list[Tensor | None] = [None] * len(keys)
    for members in groups.values():
        rows = [row for _, row in sorted(members)]
        for row, result in zip(rows, function(values[rows]).unbind(), strict=True):
            results[row] = result
    start = sum(counts[: comm.rank])
    mine = [result for result in results[start : start + len(samples)] if result is not None]
    return torch.stack(mine)


def group_members(samples: Sequence[BaseSample]) -> list[list[BaseSample]]:
    """This rank's samples by group, groups in the order of their ids and members in that of their numbers."""
    groups: dict[tuple[int, int], list[BaseSample]] = {}
    for sample in samples:
        groups.setdefault((signed64(sample.source_id), signed64(sample.group_id)), []).append(sample)
    return [sorted(groups[key], key=lambda sample: sample.member) for key in sorted(groups)]
