"""Online Diffusion-DPO: Wallace et al., arXiv 2311.12908, on pairs that the policy itself has generated.

Of each group the sample with the largest advantage wins against the one with the smallest. Groups lie whole on one
rank, so every rank has equally many pairs and the accumulation windows hold. A group whose members are all alike has no
pair; its place is kept by a pair of weight 0, so that windows and ranks stay aligned, and it is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_factory.hparams import DPOTrainingArguments
from flow_factory.objectives.dpo import dpo_loss
from flow_factory.objectives.matching import mean_square
from flow_factory.samples import BaseSample, Purpose, SampleBatch, make_generator
from flow_factory.trainers.groups import group_members
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.replay import microbatches
from flow_factory.trainers.rl.decoupled import DecoupledTrainer


@dataclass(frozen=True)
class Pair:
    """Two samples of one group.

    Attributes:
        winner: The one with the largest advantage.
        loser: The one with the smallest.
        weight: 1, or 0 where the group has no two different advantages.
    """

    winner: BaseSample
    loser: BaseSample
    weight: float


def form_pairs(samples: list[BaseSample]) -> list[Pair]:
    """One pair per group of this rank, in the order of the groups' ids; samples that could not be scored take no part.

    Among equals the first member is taken.
    """
    pairs = []
    for members in group_members(samples):
        scored = [s for s in members if not any(score is None for score in s.rewards.values())]
        usable = scored or members
        winner = max(usable, key=lambda s: s.advantage or 0.0)
        loser = min(usable, key=lambda s: s.advantage or 0.0)
        different = bool(scored) and winner.advantage != loser.advantage
        pairs.append(Pair(winner, loser, float(different)))
    return pairs


class DPOTrainer(DecoupledTrainer):
    """Prefers the best to the worst sample of each group, relative to the reference."""

    training_args: DPOTrainingArguments

    def needs_reference(self) -> bool:
        """Always: the preference is relative to it."""
        return True

    def optimize(self, samples: list[BaseSample]) -> None:
        """One term per micro-batch of pairs and time; both arms see the same noise and time."""
        pairs = form_pairs(samples)
        self._count_ties(pairs)
        for repeat in range(self.training_args.num_inner_epochs):
            for batch, weights in self._pair_batches(pairs, repeat):
                for point in self.noised(batch, repeat, shared_noise=True, shared_times=True):
                    self._term(batch, point, weights)

    def _pair_batches(self, pairs: list[Pair], repeat: int) -> Iterator[tuple[SampleBatch, Tensor]]:
        """Micro-batches of winners, then their losers in the same order, each with its own condition."""
        order = list(range(len(pairs)))
        if self.training_args.shuffle_samples:
            generator = make_generator(
                self.training_args.seed, Purpose.SHUFFLE, cycle=self.progress.rollout_iteration, step=repeat
            )
            order = torch.randperm(len(pairs), generator=generator).tolist()
        size = self.training_args.pairs_per_batch(len(pairs))
        for start in range(0, len(order), size):
            chosen = [pairs[i] for i in order[start : start + size]]
            rows = [pair.winner for pair in chosen] + [pair.loser for pair in chosen]
            stack: dict[str, Any] = {"device": self.device, "shuffle_seed": None, "cycle": 0}
            weights = torch.tensor([pair.weight for pair in chosen], dtype=torch.float64, device=self.device)
            yield next(microbatches(rows, self.adapter, len(rows), **stack)), weights

    def _term(self, batch: SampleBatch, point: NoisedState, weights: Tensor) -> None:
        reference = self.frozen_velocity(self.reference_policy(), batch, point)
        winner_ref, loser_ref = mean_square(reference, point.target).chunk(2)
        with self.adapter.pin():
            winner, loser = mean_square(self.velocity(batch, point), point.target).chunk(2)
            loss, metrics = dpo_loss(winner, loser, winner_ref, loser_ref, self.training_args.beta, weights)
            self.backward_step(loss, metrics)

    def _count_ties(self, pairs: list[Pair]) -> None:
        """Logs how many groups of all ranks gave a pair."""
        counts = torch.tensor([sum(pair.weight for pair in pairs), float(len(pairs))], dtype=torch.float64)
        formed, groups = self.comm.all_reduce_sum_(counts).tolist()
        self._cycle_metrics |= {"pairs": formed, "tied_groups": groups - formed}
