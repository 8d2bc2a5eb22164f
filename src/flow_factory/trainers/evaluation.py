"""Evaluation during training: fixed prompts and noise, EMA weights, every prompt counted once, picture grids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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
from flow_factory.samples import BaseSample, ImageSample, NoiseKey
from flow_factory.tracking.grids import save_comparison, save_grid
from flow_factory.tracking.tracker import Tracker
from flow_factory.trainers.drivers import CycleDropped
from flow_factory.trainers.monitoring import measure_dataset
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch


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
        grid_images: Pictures per grid.
        monitor: Whether the pictures are measured too (a row of kind "eval_monitor").
    """

    loaders: dict[str, EvalLoader]
    plans: dict[str, RolloutPlan]
    processor: RewardProcessor
    owns_rewards: bool
    adapter: BaseAdapter
    comm: Comm
    run_dir: Path
    tracker: Tracker
    seed: int
    solver: Literal["pipeline", "dynamics"]
    grid_images: int
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
            run_dir=run_dir,
            tracker=tracker,
            seed=config.eval_seed,
            solver=config.eval_args.solver,
            grid_images=config.eval_args.num_grid_images,
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
            self._save_pictures(name, samples, epoch)
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

    def _save_pictures(self, name: str, samples: list[BaseSample], epoch: int) -> None:
        """Saves the first pictures of the set, one file each and as a grid, and the comparison with the first time."""
        shown = [s for s in samples if s.index < self.grid_images and isinstance(s, ImageSample)]
        local = [(s.index, s.prompt) for s in shown]
        captions = dict(sorted((i, p) for rank in self.comm.gather_objects(local) for i, p in rank))
        if not captions:
            return
        own = [s.image for s in shown if s.image is not None]
        shape = next(s for s in self.comm.gather_objects(list(own[0].shape) if own else None) if s is not None)
        # A rank without pictures takes part with none of them.
        stacked = torch.stack(own) if own else torch.empty((0, *shape), dtype=torch.uint8)
        pictures = self.comm.gather_rows(stacked)
        order = [i for rank in self.comm.gather_objects([i for i, _ in local]) for i in rank]
        if not self.comm.is_main:
            return
        by_index = dict(zip(order, pictures, strict=True))
        by_index = {i: by_index[i] for i in captions}
        images = list(by_index.values())
        folder = self.run_dir / "samples" / name
        save_grid(images, folder / f"cycle-{epoch:06d}.png", captions=list(captions.values()))
        self.tracker.log_images(f"samples/{name}", folder / f"cycle-{epoch:06d}.png", epoch)
        first = folder / "first.safetensors"
        if epoch == 0:
            _save_pixels(by_index, captions, first)
        elif first.exists():
            before = _load_pixels(first)
            # `eval:` may change when a run is resumed: only what was shown then can be compared.
            both = [i for i, caption in captions.items() if i in before and before[i][0] == caption]
            if both:
                rows = [("cycle 0", [before[i][1] for i in both]), (f"cycle {epoch}", [by_index[i] for i in both])]
                save_comparison(rows, [captions[i] for i in both], folder / "before_after.png")


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


def _save_pixels(images: Mapping[int, torch.Tensor], captions: Mapping[int, str], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {str(index): captions[index] for index in images}
    save_file(
        {str(index): image.contiguous() for index, image in images.items()}, path, {"captions": json.dumps(metadata)}
    )


def _load_pixels(path: Path) -> dict[int, tuple[str, torch.Tensor]]:
    """Caption and picture by the prompt's index."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, framework="pt") as file:
        captions = json.loads((file.metadata() or {})["captions"])
    return {int(index): (captions[index], image) for index, image in load_file(path).items()}
