"""Evaluation during training: fixed prompts and noise, EMA weights, every prompt counted once, picture grids."""

from __future__ import annotations

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
from flow_factory.samples import BaseSample, ImageSample, NoiseKey
from flow_factory.tracking.grids import save_comparison, save_grid
from flow_factory.tracking.tracker import Tracker
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch


@dataclass
class Evaluator:
    """Scores the evaluation sets.

    Attributes:
        loaders: Dataset name to its loader; empty if nothing is to be evaluated.
        plans: Dataset name to how it is sampled.
        processor: Scores the samples (`eval_rewards`, or the training rewards).
        seed: Evaluation seed; noise depends on it and on the prompt's index alone.
        solver: "pipeline" or "dynamics".
        grid_images: Pictures per grid.
    """

    loaders: dict[str, EvalLoader]
    plans: dict[str, RolloutPlan]
    processor: RewardProcessor
    adapter: BaseAdapter
    comm: Comm
    run_dir: Path
    tracker: Tracker
    seed: int
    solver: Literal["pipeline", "dynamics"]
    grid_images: int

    @classmethod
    def build(cls, config: Arguments, adapter: BaseAdapter, comm: Comm, run_dir: Path, tracker: Tracker) -> Evaluator:
        """The evaluator of a run."""
        from flow_factory.trainers import setup

        loaders = build_eval_loaders(config, adapter, comm) if config.eval_args.eval_freq else {}
        return cls(
            loaders=loaders,
            plans={name: setup.build_eval_plan(config, adapter, name) for name in loaders},
            processor=setup.build_reward_processor(config, comm, run_dir),
            adapter=adapter,
            comm=comm,
            run_dir=run_dir,
            tracker=tracker,
            seed=config.eval_seed,
            solver=config.eval_args.solver,
            grid_images=config.eval_args.num_grid_images,
        )

    @property
    def enabled(self) -> bool:
        """True if there is something to evaluate."""
        return bool(self.loaders)

    def run(self, epoch: int, step: int) -> dict[str, float]:
        """Evaluates every dataset.

        Returns:
            "<dataset>/<reward>" to the mean over the dataset, every prompt counted once.
        """
        means: dict[str, float] = {}
        for name in self.loaders:
            samples = self.generate(name)
            self.processor.score(samples)
            means.update(self._means(name, samples))
            self._save_pictures(name, samples, epoch)
        self.tracker.log_evaluation(epoch, step, means)
        return means

    def generate(self, name: str) -> list[BaseSample]:
        """This rank's share of a dataset's samples, in the order of its prompts."""
        loader, plan = self.loaders[name], self.plans[name]
        self.adapter.eval()
        weights = self.adapter.snapshot("ema") if "ema" in self.adapter.weights.snapshots else nullcontext()
        samples: list[BaseSample] = []
        with torch.no_grad(), weights, self.tracker.progress(f"evaluate {name}", total=loader.num_local) as advance:
            for batch in loader:
                keys = [NoiseKey(self.seed, 0, record.index, 0) for record in batch.records]
                new = rollout_batch(
                    self.adapter,
                    batch,
                    plan,
                    keys,
                    compute_log_prob=False,
                    trajectory_indices=(),
                    solver=self.solver,
                )
                samples.extend(new)
                advance(len(new))
        return samples

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
        pictures = self.comm.gather_rows(torch.stack([s.image for s in shown if s.image is not None]))
        order = [i for rank in self.comm.gather_objects([i for i, _ in local]) for i in rank]
        if not self.comm.is_main:
            return
        by_index = dict(zip(order, pictures, strict=True))
        images = [by_index[i] for i in captions]
        folder = self.run_dir / "samples" / name
        save_grid(images, folder / f"cycle-{epoch:06d}.png", captions=list(captions.values()))
        self.tracker.log_images(f"samples/{name}", folder / f"cycle-{epoch:06d}.png", epoch)
        first = folder / "first.safetensors"
        if epoch == 0:
            _save_pixels(images, first)
        elif first.exists():
            rows = [("cycle 0", _load_pixels(first)), (f"cycle {epoch}", images)]
            save_comparison(rows, list(captions.values()), folder / "before_after.png")


def _save_pixels(images: list[torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{i:04d}": image.contiguous() for i, image in enumerate(images)}, path)


def _load_pixels(path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [image for _, image in sorted(load_file(path).items())]
