"""Evaluation during training: fixed prompts and noise, EMA weights, every prompt counted once, contact sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from flow_factory.data_utils.conditions import PromptBatch
from flow_factory.data_utils.loaders import EvalLoader, build_eval_loaders
from flow_factory.distributed import Comm
from flow_factory.hparams import Arguments
from flow_factory.models.abc import BaseAdapter
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample, NoiseKey
from flow_factory.tracking.tracker import Tracker
from flow_factory.trainers.drivers import CycleDropped
from flow_factory.trainers.monitoring import measure_dataset
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch
from flow_factory.trainers.sheets import SampleSheets


@dataclass
class Evaluator:
    """Scores the evaluation sets.

    Attributes:
        loaders: Dataset name to its loader; empty if nothing is to be evaluated.
        plans: Dataset name to how it is sampled.
        processor: Scores the samples (`eval_rewards`, or the training rewards).
        owns_rewards: Whether the reward models are this evaluator's own, to be closed by it.
        seed: Evaluation seed; noise depends on it and on the prompt's index alone.
        solver: "pipeline" or "dynamics".
        sheets: Saves what the first prompts have become.
        monitor: Whether the pictures are measured too (a row of kind "eval_monitor").
    """

    loaders: dict[str, EvalLoader]
    plans: dict[str, RolloutPlan]
    processor: RewardProcessor
    owns_rewards: bool
    adapter: BaseAdapter
    comm: Comm
    tracker: Tracker
    seed: int
    solver: Literal["pipeline", "dynamics"]
    sheets: SampleSheets
    monitor: bool

    @classmethod
    def build(
        cls,
        config: Arguments,
        adapter: BaseAdapter,
        comm: Comm,
        run_dir: Path,
        tracker: Tracker,
        training_rewards: RewardProcessor | None = None,
    ) -> Evaluator:
        """The evaluator of a run; without `eval_rewards` it scores with the models of `training_rewards`."""
        from flow_factory.trainers import setup

        loaders = build_eval_loaders(config, adapter, comm) if config.eval_args.eval_freq else {}
        owns = config.eval_reward_args is not None
        if owns and loaders:
            processor = setup.build_reward_processor(config, comm, run_dir)
        elif training_rewards is not None:
            processor = training_rewards.without_groups()
        else:
            processor = RewardProcessor()
        return cls(
            loaders=loaders,
            plans={name: setup.build_eval_plan(config, adapter, name) for name in loaders},
            processor=processor,
            owns_rewards=owns,
            adapter=adapter,
            comm=comm,
            tracker=tracker,
            seed=config.eval_seed,
            solver=config.eval_args.solver,
            sheets=SampleSheets(run_dir, comm, tracker, config.eval_args.num_grid_images),
            monitor=config.log_args.monitor,
        )

    @property
    def enabled(self) -> bool:
        """True if there is something to evaluate."""
        return bool(self.loaders)

    def run(self, epoch: int, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Evaluates every dataset. Called by all ranks.

        Args:
            epoch: Finished cycles.
            step: Optimizer steps taken so far.
            should_stop: Asked between batches on each rank by itself; true on one rank ends the evaluation on all.

        Returns:
            "<dataset>/<reward>" to the mean over the dataset, every prompt counted once.

        Raises:
            CycleDropped: If `should_stop` became true; nothing has been logged then.
        """
        means: dict[str, float] = {}
        measured: dict[str, float] = {}
        for name in self.loaders:
            samples = self.generate(name, should_stop)
            # Ranks may have different numbers of batches, so they talk only when all are through.
            if self.comm.any_true(should_stop()):
                raise CycleDropped
            self.processor.score(samples)
            means.update(self._means(name, samples))
            if self.monitor:
                measured.update(measure_dataset(name, samples, self.comm))
            self.sheets.save(name, samples, epoch)
        self.tracker.log_evaluation(epoch, step, means)
        if measured:
            self.tracker.log(measured, step, kind="eval_monitor")
        return means

    def close(self) -> None:
        """Closes the rewards that are not the training's."""
        if self.owns_rewards:
            self.processor.close()

    def generate(self, name: str, should_stop: Callable[[], bool] = lambda: False) -> list[BaseSample]:
        """This rank's share of a dataset's samples, in the order of its prompts; cut short by `should_stop`."""
        loader, plan = self.loaders[name], self.plans[name]
        self.adapter.eval()
        weights = self.adapter.snapshot("ema") if "ema" in self.adapter.weights.snapshots else nullcontext()
        with weights, self.tracker.progress(f"evaluate {name}", total=loader.num_local) as advance:
            return generate_panel(
                self.adapter, loader, plan, self.seed, self.solver, advance=advance, should_stop=should_stop
            )

    def _means(self, name: str, samples: list[BaseSample]) -> dict[str, float]:
        """Means over all ranks, which hold disjoint prompts; failed scores are left out."""
        means: dict[str, float] = {}
        for reward in self.processor.names_for(name):
            values = [s.rewards[reward] for s in samples if s.rewards.get(reward) is not None]
            rows = self.comm.gather_rows(torch.tensor(values, dtype=torch.float64))
            if rows.numel():
                means[f"{name}/{reward}"] = rows.mean().item()
        return means


def generate_panel(
    adapter: BaseAdapter,
    loader: Iterable[PromptBatch],
    plan: RolloutPlan,
    seed: int,
    solver: Literal["pipeline", "dynamics"],
    *,
    member: int = 0,
    advance: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[BaseSample]:
    """One sample of every prompt of a loader under the active weights: what training's evaluation and `eval` share.

    The noise of a sample depends on (seed, index of its prompt, member) alone, so it is the same for any weights, batch
    size and number of processes.

    Args:
        adapter: The model.
        loader: This rank's batches of prompts.
        plan: How they are sampled.
        seed: Evaluation seed.
        solver: "pipeline" or "dynamics".
        member: Which of several samples of a prompt; training's evaluation makes member 0.
        advance: Called with the number of new samples after each batch.
        should_stop: Asked before each batch; true cuts the list short.
    """
    samples: list[BaseSample] = []
    with torch.no_grad():
        for batch in loader:
            if should_stop():
                break
            batch = replace(batch, members=(member,) * len(batch))
            keys = [NoiseKey(seed, 0, record.index, member) for record in batch.records]
            new = rollout_batch(
                adapter, batch, plan, keys, compute_log_prob=False, trajectory_indices=(), solver=solver
            )
            samples.extend(new)
            advance(len(new))
    return samples
