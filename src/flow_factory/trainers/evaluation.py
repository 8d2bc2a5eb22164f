"""Evaluation during training: fixed prompts and noise, EMA weights, every prompt counted once, contact sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from flow_factory.data_utils.loaders import EvalLoader, build_eval_loaders
from flow_factory.distributed import Comm
from flow_factory.hparams import Arguments
from flow_factory.models.abc import BaseAdapter
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample
from flow_factory.tracking.previews import Preview
from flow_factory.tracking.tracker import Tracker
from flow_factory.trainers.drivers import CycleDropped
from flow_factory.trainers.monitoring import measure_dataset
from flow_factory.trainers.panels import PanelScorer, Scored, generate_panel, statistics_of
from flow_factory.trainers.rollouts import RolloutPlan
from flow_factory.trainers.sheets import SampleSheets, Shown


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
            scored, shown = self._score(name, should_stop)
            means.update(self._means(name, scored))
            if self.monitor:
                measured.update(measure_dataset(name, statistics_of(scored), self.comm))
            self.sheets.save(name, shown, epoch)
        self.tracker.log_evaluation(epoch, step, means)
        if measured:
            self.tracker.log(measured, step, kind="eval_monitor")
        return means

    def close(self) -> None:
        """Closes the rewards that are not the training's."""
        if self.owns_rewards:
            self.processor.close()

    def _score(self, name: str, should_stop: Callable[[], bool]) -> tuple[list[Scored], Shown]:
        """This rank's share of a dataset, in the order of its prompts, and what will be shown of the first ones."""
        shown: dict[int, tuple[str, Preview]] = {}
        scorer = PanelScorer(
            self.processor, name, lambda samples: shown.update(self.sheets.preview(samples)), self.monitor
        )
        weights = self.adapter.snapshot("ema") if "ema" in self.adapter.weights.snapshots else nullcontext()
        progress = self.tracker.progress(f"evaluate {name}", total=self.loaders[name].num_local)
        # Ranks may have different numbers of batches, so they talk only when all are through.
        with self.comm.together(), weights, progress as advance:
            for samples in self.generate(name, should_stop):
                scorer.add(samples)
                advance(len(samples))
        if self.comm.any_true(should_stop()):
            raise CycleDropped
        with self.comm.together():
            return scorer.finish(), shown

    def generate(self, name: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[list[BaseSample]]:
        """This rank's share of a dataset's samples under the active weights, batch by batch, until `should_stop`."""
        self.adapter.eval()
        loader, plan = self.loaders[name], self.plans[name]
        return generate_panel(self.adapter, loader, plan, self.seed, self.solver, should_stop=should_stop)

    def _means(self, name: str, samples: Sequence[Scored]) -> dict[str, float]:
        """Means over all ranks, which hold disjoint prompts; failed scores are left out."""
        means: dict[str, float] = {}
        for reward in self.processor.names_for(name):
            values = [s.rewards[reward] for s in samples if s.rewards.get(reward) is not None]
            rows = self.comm.gather_rows(torch.tensor(values, dtype=torch.float64))
            if rows.numel():
                means[f"{name}/{reward}"] = rows.mean().item()
        return means
