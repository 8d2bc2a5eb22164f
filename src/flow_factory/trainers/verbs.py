"""The verbs that algorithms are written with: generate, replay, step, and other weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flow_factory.models.prefix import SharedPrefix
from flow_factory.models.step import StepOutput
from flow_factory.rewards.buffer import RewardBuffer
from flow_factory.samples import BaseSample, SampleBatch
from flow_factory.trainers import setup
from flow_factory.trainers.noising import NoisedState, noised_at
from flow_factory.trainers.replay import Transition, microbatches, transitions
from flow_factory.trainers.rollouts import (
    RolloutPlan,
    SDESteps,
    collect_samples,
    cycle_window,
    rollout_batch,
    rollout_keys,
)

if TYPE_CHECKING:
    from flow_factory.advantage.processor import AdvantageProcessor
    from flow_factory.checkpoints.signals import SignalGuard
    from flow_factory.distributed import Comm
    from flow_factory.hparams import Arguments
    from flow_factory.hparams.geometry import Geometry
    from flow_factory.models.abc import BaseAdapter
    from flow_factory.models.ema import Ema
    from flow_factory.tracking.tracker import Tracker
    from flow_factory.trainers.drivers import TrainingProgress
    from flow_factory.trainers.result import TrainingResult
    from flow_factory.trainers.roles import RoleOptimizationCoordinator
    from flow_factory.trainers.stopping import Stopping

logger = logging.getLogger(__name__)


class TrainerVerbs:
    """What `BaseTrainer` offers to an algorithm; the parts are built there.

    Attributes:
        stores: What the objective needs from the rollout beside states and log-probs ({"mean"}).
    """

    stores: ClassVar[frozenset[str]] = frozenset()
    config: Arguments
    # Any, so that a subclass can annotate its own arguments class; the annotation also tells `hparams` which it is.
    training_args: Any
    comm: Comm
    adapter: BaseAdapter[Any]
    dataloader: Any
    geometry: Geometry
    roles: RoleOptimizationCoordinator
    ema: Ema | None
    reward_buffer: RewardBuffer | None
    advantage_processor: AdvantageProcessor | None
    tracker: Tracker
    progress: TrainingProgress
    result: TrainingResult
    sde_steps: SDESteps | None
    stopping: Stopping
    signals: SignalGuard | None
    _plan: RolloutPlan | None
    _cycle_losses: list[float]
    _cycle_metrics: dict[str, float]
    _warned_of_ratio: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps of the first role."""
        return self.progress.optimizer_step

    @property
    def device(self) -> torch.device:
        """The training device of this rank."""
        return self.comm.device

    @property
    def accumulation_steps(self) -> int:
        """Loss terms per optimizer step."""
        return self.geometry.accumulation_steps

    @property
    def at_update_boundary(self) -> bool:
        """True if no gradients wait for an optimizer step."""
        return self.roles.at_boundary

    def check_interrupt(self) -> None:
        """Drops the cycle if a signal has arrived; see `BaseTrainer`."""
        raise NotImplementedError

    def generate_samples(
        self,
        reward_buffer: RewardBuffer | None = None,
        compute_log_prob: bool = False,
        trajectory_indices: Sequence[int] = (-1,),
        stores: frozenset[str] | None = None,
    ) -> list[BaseSample]:
        """The one rollout of a cycle, under the sampling policy.

        Args:
            reward_buffer: Receives samples as they are made.
            compute_log_prob: Compute the log-probability of each stochastic step.
            trajectory_indices: Grid indices of the states to keep; -1 is the final one.
            stores: What else to keep of stochastic steps ("mean", "velocity"); None = `self.stores`.
        """
        plan, cycle = self.rollout_plan, self.progress.rollout_iteration
        self.dataloader.set_cycle(cycle)
        self.adapter.rollout()
        store = torch.device("cpu") if self.training_args.offload_samples_to_cpu else None

        shared = SharedPrefix() if plan.share_initial_noise else None

        def generate(batch: Any) -> list[BaseSample]:
            return rollout_batch(
                self.adapter,
                batch,
                plan,
                rollout_keys(batch, self.training_args.seed, cycle),
                compute_log_prob=compute_log_prob,
                trajectory_indices=trajectory_indices,
                stores=self.stores if stores is None else stores,
                policy_version=self.step,
                store_device=store,
                shared=shared,
                # All ranks take the same steps over equally many batches, so they ask together.
                should_stop=self.check_interrupt,
            )

        progress = self.tracker.progress("rollout", total=len(self.dataloader) * self.geometry.batch_size)
        with torch.no_grad(), self.sampling_policy(), progress as advance:
            samples = collect_samples(self.dataloader, generate, reward_buffer, self.check_interrupt, advance)
        if shared is not None:
            saved = torch.tensor([shared.saved], dtype=torch.int64)
            self._count("rollout_rows_saved", int(self.comm.all_reduce_sum_(saved)))
        self._count("samples", len(samples) * self.comm.world_size)
        return samples

    def _count(self, name: str, number: int) -> None:
        """Adds to a count of the run and to the same of the cycle."""
        self._cycle_metrics[name] = self._cycle_metrics.get(name, 0.0) + number
        self.result.counts[name] = self.result.counts.get(name, 0) + number

    @property
    def rollout_plan(self) -> RolloutPlan:
        """Grid, window and guidance of the current cycle."""
        if self._plan is None:
            assert self.sde_steps is not None
            window = cycle_window(
                self.config.scheduler_args, self.sde_steps, self.config.sde_seed, self.progress.rollout_iteration
            )
            self._plan = setup.build_plan(self.config, self.adapter, self.sde_steps, window)
        return self._plan

    def replay_indices(self) -> tuple[int, ...]:
        """States that replay needs: both ends of every stochastic step of this cycle."""
        return tuple(sorted({i + end for i in self.rollout_plan.window for end in (0, 1)}))

    def microbatches(self, samples: Sequence[BaseSample], repeat: int = 0) -> Iterator[SampleBatch]:
        """Shuffled micro-batches of `per_device_batch_size` rows, moved to the device one at a time."""
        return microbatches(
            samples,
            self.adapter,
            self.training_args.per_device_batch_size,
            device=self.device,
            shuffle_seed=self.training_args.seed if self.training_args.shuffle_samples else None,
            cycle=self.progress.rollout_iteration,
            repeat=repeat,
        )

    def replay(self, batch: SampleBatch) -> Iterator[Transition]:
        """The stored stochastic transitions of a micro-batch."""
        return transitions(batch, self.device)

    def replay_forward(
        self, batch: SampleBatch, transition: Transition, guidance_scale: float | None = None
    ) -> StepOutput:
        """The stored transition under the active weights: the same kernel as the rollout, with `next_state` given.

        Args:
            batch: The micro-batch.
            transition: One of its transitions.
            guidance_scale: Another guidance than the rollout's (of a reference); None = the same.
        """
        plan = self.rollout_plan
        guidance = plan.guidance
        if guidance_scale is not None:
            guidance = self.adapter.guidance(guidance_scale, self.config.train_generation)
        return self.adapter.forward(
            transition.state,
            transition.times,
            batch.condition,
            guidance,
            dynamics=plan.dynamics,
            noise_level=transition.noise_level,
            next_state=transition.next_state,
            compute_log_prob=True,
            log_prob_normalised=plan.log_prob_normalised,
        )

    @property
    def num_train_times(self) -> int:
        """Training times of each sample and pass (decoupled objectives)."""
        return self.training_args.time_sampling.num_times(self.rollout_plan.grid.length)

    def noised(
        self, batch: SampleBatch, repeat: int = 0, *, shared_noise: bool = False, shared_times: bool = False
    ) -> Iterator[NoisedState]:
        """The micro-batch's final latents, noised to each of its training times.

        Args:
            batch: Samples whose final latents were kept (`trajectory_indices=(-1,)`).
            repeat: Number of the pass over the samples; each draws anew.
            shared_noise: One noise per group and time, instead of one per sample and time.
            shared_times: The same times for all members of a group.
        """
        for number in range(self.num_train_times):
            yield self.noised_at(batch, number, repeat, shared_noise=shared_noise, shared_times=shared_times)

    def noised_at(
        self,
        batch: SampleBatch,
        number: int,
        repeat: int = 0,
        *,
        shared_noise: bool = False,
        shared_times: bool = False,
    ) -> NoisedState:
        """The micro-batch at training time `number` alone; the same each time it is asked for."""
        return noised_at(
            batch,
            number,
            self.training_args.time_sampling,
            self.rollout_plan.grid,
            self.adapter.timestep_for_sigma,
            component_sigma=self.adapter.component_sigma,
            repeat=repeat,
            shared_noise=shared_noise,
            shared_times=shared_times,
        )

    def backward_step(self, loss: Tensor, metrics: Mapping[str, Tensor | float], role: str | None = None) -> bool:
        """Adds one loss term; at the end of its window reduces, guards, clips and steps.

        Args:
            loss: Scalar.
            metrics: Numbers to average over the window ("*_max" are maximised).
            role: The role to step; None is the first.

        Returns:
            True if the optimizer was stepped.
        """
        optimizer = self.roles.activate(role or next(iter(self.roles.roles)))
        report = optimizer.accumulate(
            loss,
            metrics,
            self.accumulation_steps,
            measure_change=not self._cycle_losses,
            deadline_passed=self.stopping.overdue(self.signals),
        )
        if report is None:
            return False
        if optimizer is self.roles.primary:
            self.progress = replace(self.progress, optimizer_step=report.step)
            self.result.losses.append(report.metrics["loss"])
            self._cycle_losses.append(report.metrics["loss"])
            self._note_first_update(report.metrics)
            if self.ema is not None:
                self.ema.step(report.step)
        self.result.counts["optimizer_steps"] = self.result.counts.get("optimizer_steps", 0) + 1
        self.tracker.log({f"{report.role}/{k}": v for k, v in report.metrics.items()}, report.step, kind="update")
        return True

    def _note_first_update(self, metrics: Mapping[str, float]) -> None:
        """Keeps what shows whether the policy is on-policy and moves: the cycle's first update."""
        if len(self._cycle_losses) > 1:
            return
        for name in ("ratio_deviation_max", "param_change_norm", "grad_norm", "clip_fraction", "kl"):
            if name in metrics:
                self._cycle_metrics[f"first_update/{name}"] = metrics[name]
        if not self.comm.is_main:
            return  # the numbers are those of all ranks; one warning is enough
        self._warn_if_off_policy(metrics.get("ratio_deviation_max", 0.0))
        if metrics.get("param_change_norm") == 0.0 and metrics["learning_rate"] > 0:
            logger.warning(
                "update %d changed no parameter: the policy does not move (are all advantages zero, or is the learning "
                "rate below the resolution of the weights?)",
                self.step,
            )

    def _warn_if_off_policy(self, deviation: float) -> None:
        """Warns, once, where precision alone moves the first ratio of a cycle by more than half the clip range."""
        clip_range = getattr(self.training_args, "clip_range", None)
        if clip_range is None or self._warned_of_ratio:
            return
        limit = 0.5 * min(abs(bound) for bound in clip_range)
        if deviation > limit:
            self._warned_of_ratio = True
            logger.warning(
                "update %d: the first ratio of the cycle deviates from 1 by %.3g, more than half of train.clip_range: "
                "the clip acts on rounding. Use mixed_precision: no, or a wider clip range.",
                self.step,
                deviation,
            )

    def compute_advantages(
        self, samples: list[BaseSample], rewards: Any = None, store_to_samples: bool = True
    ) -> Tensor:
        """Advantages of this rank's samples, [n], computed over complete groups of all ranks."""
        assert self.advantage_processor is not None
        assert self.reward_buffer is not None
        weights = self.reward_buffer.processor.weights_for
        cycle = self.progress.rollout_iteration
        advantages = self.advantage_processor.compute(samples, rewards, weights, cycle)
        if store_to_samples:
            for sample, advantage in zip(samples, advantages.tolist(), strict=True):
                sample.advantage = advantage
        return advantages

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """The weights that roll out: the live policy, unless the algorithm samples off-policy."""
        return nullcontext()

    def reference_policy(self) -> AbstractContextManager[Any]:
        """The reference weights (`train.reference`: the pretrained base, or the start of the run)."""
        return self.adapter.reference_policy()

    def snapshot(self, name: str) -> AbstractContextManager[Any]:
        """A named snapshot's weights."""
        return self.adapter.snapshot(name)

    def log_data(self, data: Mapping[str, float], step: int | None = None) -> None:
        """Logs numbers under their names."""
        self.tracker.log(dict(data), self.step if step is None else step, kind="data")
