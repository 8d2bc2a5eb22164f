"""How many rows go through the trained network in a cycle, algorithm by algorithm.

Counted as `ModelBundle` counts them and as `metrics.jsonl` logs them: `network_rows`, and of these `trained_rows` with
gradients, over all ranks. A guided prediction of B samples is 2 B rows. Pure functions of counts; nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flow_factory.hparams.geometry import Geometry


@dataclass(frozen=True)
class Range:
    """A number of rows, from `low` to `high`; the two are equal where nothing is left to chance."""

    low: int
    high: int

    @classmethod
    def exactly(cls, number: int) -> Range:
        """Both ends the same."""
        return cls(number, number)

    @classmethod
    def over(cls, numbers: Sequence[int]) -> Range:
        """From the smallest to the largest."""
        return cls(min(numbers), max(numbers))

    @property
    def exact(self) -> bool:
        """True if there is one number only."""
        return self.low == self.high

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: int) -> Range:
        return Range(self.low * factor, self.high * factor)


NOTHING = Range(0, 0)


@dataclass(frozen=True)
class CycleFacts:
    """What the counts of a cycle depend on.

    Attributes:
        arguments: The trainer's arguments.
        geometry: Groups, batches and accumulation (offline: `optimized_batches` is those of an epoch and rank).
        window: The trained steps of this cycle (coupled).
        guided: Rows of one sample's prediction at each step of the grid, with the rollout's guidance.
        reference: The same with the guidance of the coupled trainers' reference.
        plain: Rows of one sample's prediction without guidance.
        guided_reference: Rows of one sample's prediction with the guidance of the decoupled trainers' reference; a
            range where it is guided at some times only.
        by_sequence: Whether the policy loss needs the ratio of whole trajectories.
    """

    arguments: Any
    geometry: Geometry
    window: tuple[int, ...] = ()
    guided: tuple[int, ...] = ()
    reference: tuple[int, ...] = ()
    plain: int = 1
    guided_reference: Range = Range(1, 1)
    by_sequence: bool = False

    @property
    def passes(self) -> int:
        """Passes over a cycle's samples."""
        return int(getattr(self.arguments, "num_inner_epochs", 1))

    @property
    def terms(self) -> int:
        """Loss terms of a rank in a cycle."""
        return self.geometry.optimized_batches * self.geometry.loss_terms * self.passes

    @property
    def rows_per_term(self) -> int:
        """Samples of a loss term, over all ranks."""
        return self.geometry.batch * self.geometry.world_size


@dataclass(frozen=True)
class OptimizationRows:
    """Rows of the optimisation of a cycle.

    Attributes:
        frozen: Without gradients: references, old policies, first passes.
        trained: With gradients.
    """

    frozen: Range
    trained: Range


def rollout_rows(
    path: Sequence[int], window: Sequence[int], guided: Sequence[int], samples: int, starts: int | None = None
) -> int:
    """Rows of a cycle's rollout over all ranks.

    Args:
        path: The steps that are taken.
        window: The stochastic ones among them.
        guided: Rows of one sample's prediction at each step of the grid.
        samples: Samples of a cycle.
        starts: Different starts, summed over ranks, where the members of a group share their initial noise: the steps
            before the first stochastic one are evaluated once for each. None: nothing is shared.
    """
    branch = min(window, default=len(guided))
    common = sum(guided[step] for step in path if step < branch)
    rest = sum(guided[step] for step in path if step >= branch)
    return common * (samples if starts is None else starts) + rest * samples


def coupled(facts: CycleFacts) -> OptimizationRows:
    """Replays of the stochastic steps; before each one the reference, and where the ratio is the trajectory's, all."""
    samples = facts.geometry.optimized_batches * facts.rows_per_term * facts.passes
    trained = sum(facts.guided[step] for step in facts.window)
    frozen = 0
    if float(getattr(facts.arguments, "kl_beta", 0.0)) > 0:
        frozen += sum(facts.reference[step] for step in facts.window) * samples
    if facts.by_sequence:
        frozen += _sequence_ratios(facts) * facts.rows_per_term * trained
    return OptimizationRows(Range.exactly(frozen), Range.exactly(trained * samples))


def _sequence_ratios(facts: CycleFacts) -> int:
    """How often a rank evaluates the ratio of whole trajectories: for each batch, and again after an update in it."""
    terms, window = facts.geometry.loss_terms, facts.geometry.accumulation_steps
    return sum(number % terms == 0 or number % window == 0 for number in range(facts.terms))


def nft(facts: CycleFacts) -> OptimizationRows:
    """Each term also asks the old policy, except where it is still the live one, and the reference of a KL term."""
    arguments = facts.arguments
    old = facts.terms if arguments.off_policy else _after_first_update(facts)
    return _plain_terms(facts, old + facts.terms * (arguments.kl_beta > 0))


def awm(facts: CycleFacts) -> OptimizationRows:
    """The old log-probabilities of the terms after the first update; reference and fast average of the KL terms."""
    arguments = facts.arguments
    kl_terms = (arguments.kl_beta > 0) + (arguments.ema_kl_beta > 0)
    return _plain_terms(facts, _after_first_update(facts) + facts.terms * kl_terms)


def dpo(facts: CycleFacts) -> OptimizationRows:
    """Pairs in place of samples, one for each group: both arms under the policy and under the reference."""
    pairs = facts.geometry.unique * facts.geometry.loss_terms * facts.passes
    rows = Range.exactly(2 * pairs * facts.plain)
    return OptimizationRows(rows, rows)


def dgpo(facts: CycleFacts) -> OptimizationRows:
    """A first pass with the policy, the fast average and the reference; a second one with gradients."""
    arguments = facts.arguments
    first = Range.exactly(facts.plain * (1 + (arguments.clip_dsm or arguments.use_ema_ref)))
    if arguments.kl_beta > 0 or not arguments.use_ema_ref:
        first += facts.guided_reference
    return _two_passes(facts, first)


def crd(facts: CycleFacts) -> OptimizationRows:
    """A first pass with the policy, the old policy (or the reference in its place), and the KL term's reference."""
    first = Range.exactly(2 * facts.plain)
    if facts.arguments.kl_beta > 0:
        first += facts.guided_reference
    return _two_passes(facts, first)


def sft(facts: CycleFacts) -> OptimizationRows:
    """One prediction with gradients for each term."""
    return _plain_terms(facts, 0)


def offline_dpo(facts: CycleFacts) -> OptimizationRows:
    """Chosen and rejected medium, under the policy and under the reference."""
    rows = Range.exactly(2 * facts.terms * facts.rows_per_term * facts.plain)
    return OptimizationRows(rows, rows)


def _after_first_update(facts: CycleFacts) -> int:
    """Loss terms of a rank after the cycle's first optimizer step."""
    return max(facts.terms - facts.geometry.accumulation_steps, 0)


def _plain_terms(facts: CycleFacts, frozen_terms: int) -> OptimizationRows:
    rows = facts.rows_per_term * facts.plain
    return OptimizationRows(Range.exactly(frozen_terms * rows), Range.exactly(facts.terms * rows))


def _two_passes(facts: CycleFacts, first: Range) -> OptimizationRows:
    samples = facts.terms * facts.rows_per_term
    return OptimizationRows(first * samples, Range.exactly(samples * facts.plain))


@dataclass(frozen=True)
class Algorithm:
    """How an algorithm uses the network.

    Attributes:
        count: Rows of its optimisation.
        guided: Whether the differentiated prediction has the rollout's guidance.
        arms: Predictions of a loss term whose graphs are alive together.
        pairs: A micro-batch holds pairs (`pairs_per_batch`).
    """

    count: Callable[[CycleFacts], OptimizationRows]
    guided: bool = False
    arms: int = 1
    pairs: bool = False

    def micro_batch(self, arguments: Any, geometry: Geometry) -> int:
        """Rows of a differentiated prediction on one rank, before guidance."""
        if not self.pairs:
            return geometry.batch
        return 2 * arguments.pairs_per_batch(max(geometry.unique // geometry.world_size, 1))


def find_algorithm(trainer_class: type) -> tuple[Algorithm | None, type | None]:
    """The algorithm of a trainer class, and the class that it was found under: the trainer's own, or a base of it.

    Returns:
        (None, None) for a trainer outside this package that derives from none of it.
    """
    from flow_factory.trainers.offline.offline_dpo import OfflineDPOTrainer
    from flow_factory.trainers.offline.sft import SFTTrainer
    from flow_factory.trainers.rl.awm import AWMTrainer
    from flow_factory.trainers.rl.crd import CRDTrainer
    from flow_factory.trainers.rl.dgpo import DGPOTrainer
    from flow_factory.trainers.rl.dpo import DPOTrainer
    from flow_factory.trainers.rl.grpo import CoupledTrainer
    from flow_factory.trainers.rl.nft import NFTTrainer

    known: dict[type, Algorithm] = {
        CoupledTrainer: Algorithm(coupled, guided=True),
        NFTTrainer: Algorithm(nft),
        AWMTrainer: Algorithm(awm),
        DPOTrainer: Algorithm(dpo, pairs=True),
        DGPOTrainer: Algorithm(dgpo),
        CRDTrainer: Algorithm(crd),
        SFTTrainer: Algorithm(sft),
        OfflineDPOTrainer: Algorithm(offline_dpo, arms=2),
    }
    for cls in trainer_class.__mro__:
        if cls in known:
            return known[cls], cls
    return None, None
