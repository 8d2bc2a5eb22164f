"""Which prompt, for which member of its group, in which batch of which rank: the schedule of a rollout cycle.

A schedule is a pure function of (seed, cycle): every rank computes all of it and takes its own part, so ranks agree
without talking, and a resumed run needs only the cycle's number. Python's own hash takes no part, so PYTHONHASHSEED has
no effect.

Kinds (M prompts per cycle, K members per group, W ranks, B rows per batch):

* `distributed_k_repeat` (global_random): all M K rows shuffled, groups spread over ranks.
* `group_contiguous` (rank_local): a group stays on one rank, its members in consecutive rows.
* `group_distributed` (global_batch): every rank has the same prompts, K / W members of each.
* `contiguous_shard`: the rows in group order, cut into W equal pieces; a group may straddle two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from flow_factory.errors import InputError
from flow_factory.hparams.data_args import SAMPLER_ALIASES, CanonicalSampler
from flow_factory.samples.noise import Purpose, derive_seed


@dataclass(frozen=True)
class SourceShare:
    """One dataset's part in every cycle.

    Attributes:
        source: Name of the dataset.
        source_id: Its 64-bit id; part of the seed of its shuffles.
        num_prompts: N, how many prompts it has.
        per_cycle: M, how many distinct prompts of it a cycle draws.
    """

    source: str
    source_id: int
    num_prompts: int
    per_cycle: int


@dataclass(frozen=True)
class Draw:
    """One row of a batch: prompt `index` of dataset `source`, for member `member` of its group."""

    source: str
    index: int
    member: int


def canonical_kind(sampler_type: str) -> CanonicalSampler:
    """The kind behind a `sampler_type` or one of its other names.

    Raises:
        InputError: If there is no such kind.
    """
    if sampler_type not in SAMPLER_ALIASES:
        known = ", ".join(SAMPLER_ALIASES)
        raise InputError(f"data.sampler_type {sampler_type!r} has no sampler; use one of {known}.")
    return SAMPLER_ALIASES[sampler_type]


def is_rank_local(sampler_type: str) -> bool:
    """Whether all members of a group are generated on one rank (what groupwise rewards need)."""
    return canonical_kind(sampler_type) == "group_contiguous"


class PromptSequence:
    """An endless seeded stream of prompt indices, cut into cycles.

    The stream is one shuffled pass over the dataset after another: every prompt is visited once per pass. A cycle that
    spans the end of a pass draws no prompt twice (its group would have 2 K members): the prompts of the pass's tail are
    moved back in the next pass.

    Args:
        num_prompts: N.
        per_cycle: M <= N.
        seed: Run seed.
        source_id: The dataset's id.
    """

    def __init__(self, num_prompts: int, per_cycle: int, seed: int, source_id: int) -> None:
        self.num_prompts = num_prompts
        self.per_cycle = per_cycle
        self.seed = seed
        self.source_id = source_id
        self._pass_number = -1
        self._previous: list[int] = []
        self._current: list[int] = []

    def cycle(self, cycle: int) -> list[int]:
        """The M distinct prompt indices of a cycle, in drawing order."""
        start = cycle * self.per_cycle
        first, last = start // self.num_prompts, (start + self.per_cycle - 1) // self.num_prompts
        self._advance(last)
        offset = start - first * self.num_prompts
        if first == last:
            return self._current[offset : offset + self.per_cycle]
        tail = self._previous[offset:]
        return tail + self._current[: self.per_cycle - len(tail)]

    def _advance(self, number: int) -> None:
        """Makes `number` the current pass. A pass depends on the one before, so going back starts over."""
        if number < self._pass_number:
            self._pass_number, self._previous, self._current = -1, [], []
        while self._pass_number < number:
            self._pass_number += 1
            self._previous, self._current = self._current, self._shuffled(self._pass_number, self._current)

    def _shuffled(self, number: int, previous: Sequence[int]) -> list[int]:
        order = list(range(self.num_prompts))
        seed = derive_seed(self.seed, Purpose.DATA, cycle=number, group_id=self.source_id)
        random.Random(seed).shuffle(order)
        # How many draws of the cycle that spans the border were left over in the previous pass.
        taken = number * self.num_prompts % self.per_cycle
        if not taken:
            return order
        tail = set(previous[len(previous) - taken :])
        head_size = self.per_cycle - taken
        head = [index for index in order if index not in tail][:head_size]
        in_head = set(head)
        return head + [index for index in order if index not in in_head]


class GroupSampler:
    """The schedule of every cycle, for every rank.

    Args:
        kind: A `sampler_type` other than auto.
        sources: The datasets and their shares.
        group_size: K.
        batch_size: B, rows per batch and rank.
        world_size: W.
        seed: Run seed.

    Raises:
        InputError: If the numbers do not fit the kind, naming them.
    """

    def __init__(
        self,
        kind: str,
        sources: Sequence[SourceShare],
        *,
        group_size: int,
        batch_size: int,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.kind = canonical_kind(kind)
        self.sources = tuple(sources)
        self.group_size = group_size
        self.batch_size = batch_size
        self.world_size = world_size
        self.seed = seed
        for share in self.sources:
            self._check(share)
        self._sequences = [PromptSequence(s.num_prompts, s.per_cycle, seed, s.source_id) for s in self.sources]

    @property
    def batches_per_cycle(self) -> int:
        """Batches that each rank draws in a cycle."""
        return sum(self._batches(share) for share in self.sources)

    def cycle(self, cycle: int, rank: int) -> list[list[Draw]]:
        """The batches of one rank in one cycle; slot i has the same source on every rank.

        Args:
            cycle: Number of the cycle, from 0; any order of calls gives the same schedules.
            rank: 0 to W - 1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1}.")
        slots = [number for number, share in enumerate(self.sources) for _ in range(self._batches(share))]
        if len(self.sources) > 1:
            random.Random(derive_seed(self.seed, Purpose.SHUFFLE, cycle=cycle)).shuffle(slots)
        queues = []
        for share, sequence in zip(self.sources, self._sequences, strict=True):
            rows = self._rows(share, sequence.cycle(cycle), cycle, rank)
            queues.append(iter([rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]))
        return [next(queues[number]) for number in slots]

    def _rows(self, share: SourceShare, prompts: Sequence[int], cycle: int, rank: int) -> list[Draw]:
        """One dataset's rows on one rank, in the order they fill batches."""
        world, size, k = self.world_size, self.batch_size, self.group_size
        if self.kind == "group_contiguous":
            return [Draw(share.source, p, member) for p in prompts[rank::world] for member in range(k)]
        if self.kind == "group_distributed":
            part = k // world
            return [Draw(share.source, p, m) for p in prompts for m in range(rank * part, (rank + 1) * part)]
        rows = [Draw(share.source, p, member) for p in prompts for member in range(k)]
        if self.kind == "contiguous_shard":
            part = len(rows) // world
            return rows[rank * part : (rank + 1) * part]
        seed = derive_seed(self.seed, Purpose.SHUFFLE, cycle=cycle, group_id=share.source_id, step=1)
        random.Random(seed).shuffle(rows)
        # The j-th batches of all ranks together are the j-th W B rows, whatever W is.
        return [row for i in range(rank * size, len(rows), world * size) for row in rows[i : i + size]]

    def _batches(self, share: SourceShare) -> int:
        return share.per_cycle * self.group_size // (self.world_size * self.batch_size)

    def _check(self, share: SourceShare) -> None:
        m, k, b, w = share.per_cycle, self.group_size, self.batch_size, self.world_size
        numbers = (
            f"dataset {share.source!r}: M={m} prompts per cycle, group_size={k}, per_device_batch_size={b}, {w} ranks"
        )
        if m < 1 or k < 1 or b < 1:
            raise InputError(f"{numbers}: each must be at least 1.")
        if m > share.num_prompts:
            raise InputError(
                f"dataset {share.source!r} has {share.num_prompts} prompts, but a cycle draws {m} distinct ones; lower "
                "train.unique_sample_num_per_epoch or add prompts."
            )
        if m * k % (w * b):
            raise InputError(
                f"{numbers}: M * group_size must be a multiple of ranks * batch size; use a multiple of "
                f"{w * b // gcd(k, w * b)} for train.unique_sample_num_per_epoch."
            )
        if self.kind == "group_contiguous" and (m % w or m // w * k % b):
            unit = w * (b // gcd(k, b))
            raise InputError(f"{numbers}: {self.kind} keeps groups on one rank; use a multiple of {unit} for M.")
        if self.kind == "group_distributed" and (k % w or w * b % k):
            raise InputError(
                f"{numbers}: {self.kind} needs group_size divisible by the ranks, and ranks * batch size divisible by "
                "group_size."
            )
