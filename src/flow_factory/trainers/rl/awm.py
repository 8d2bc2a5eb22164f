"""Advantage Weighted Matching: Xue et al., arXiv 2509.25050.

PPO whose log-probability is the negative matching error of the sample itself. The ratio compares with the policy at the
start of the cycle on the same noise and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flow_factory.hparams import AWMTrainingArguments
from flow_factory.hparams.decay import DecaySchedule
from flow_factory.objectives.awm import awm_loss, pseudo_log_prob
from flow_factory.objectives.matching import mean_square
from flow_factory.samples import BaseSample, LatentState, SampleBatch
from flow_factory.trainers.noising import NoisedState
from flow_factory.trainers.rl.decoupled import DecoupledTrainer

FAST = "fast_ema"
FAST_SCHEDULE = DecaySchedule(0, 0.0, 0.001, 0.3)


class AWMTrainer(DecoupledTrainer):
    """Clipped policy gradient on pseudo log-probabilities, with optional KL terms to reference and fast average."""

    training_args: AWMTrainingArguments

    def _declare_model_variants(self) -> Sequence[str]:
        return (FAST,) if self.training_args.needs_fast_ema else ()

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """The live policy, or with `off_policy` the fast average."""
        return self.snapshot(FAST) if self.training_args.off_policy else super().sampling_policy()

    def optimize(self, samples: list[BaseSample]) -> None:
        """One term per micro-batch and time."""
        old = self._old_log_probs(samples)
        for number, batch, point in self._terms(samples):
            self._term(batch, point, old.get(number))

    def _terms(self, samples: list[BaseSample]) -> Iterator[tuple[int, SampleBatch, NoisedState]]:
        """All terms of the cycle, numbered; the same in every walk."""
        number = 0
        for repeat in range(self.training_args.num_inner_epochs):
            for batch in self.microbatches(samples, repeat):
                for point in self.noised(batch, repeat):
                    yield number, batch, point
                    number += 1

    def _old_log_probs(self, samples: list[BaseSample]) -> dict[int, Tensor]:
        """l_old by term, for those that come after the cycle's first update; up to it the policy is the old one."""
        terms = self.geometry.updates_per_cycle * self.accumulation_steps
        if terms <= self.accumulation_steps:
            return {}
        with torch.no_grad():
            return {
                number: self._log_prob(self.velocity(batch, point), point)
                for number, batch, point in self._terms(samples)
                if number >= self.accumulation_steps
            }

    def _log_prob(self, velocity: LatentState, point: NoisedState) -> Tensor:
        arguments = self.training_args
        error = mean_square(velocity, point.target)
        return pseudo_log_prob(arguments.awm_weighting, error, point.sigma, arguments.ghuber_power)

    def _term(self, batch: SampleBatch, point: NoisedState, old: Tensor | None) -> None:
        arguments = self.training_args
        reference = self.reference_velocity(batch, point)
        fast = None
        if arguments.ema_kl_beta > 0:
            fast = self.frozen_velocity(self.snapshot(FAST), batch, point)
        with self.adapter.pin():
            velocity = self.velocity(batch, point)
            log_prob = self._log_prob(velocity, point)
            loss, metrics = awm_loss(
                log_prob,
                log_prob if old is None else old,
                batch.advantages,
                arguments.clip_range,
                arguments.adv_clip_range,
            )
            loss = self.add_kl(loss, metrics, velocity, reference, weight=arguments.kl_beta)
            loss = self.add_kl(loss, metrics, velocity, fast, weight=arguments.ema_kl_beta, name="ema_kl")
            self.backward_step(loss, metrics)

    def _after_acquisition_cycle(self) -> None:
        if self.training_args.needs_fast_ema:
            self.own_snapshot(FAST).update(FAST_SCHEDULE(self.step))
