"""Two trainers outside the package: a dataset trainer and a generation trainer without feedback."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT, ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT
from flow_factory.hparams import OfflineFlowMatchingTrainingArguments, TrainingArguments
from flow_factory.samples import BaseSample, LatentState
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.setup import run_grid


@dataclass
class RegressionArguments(OfflineFlowMatchingTrainingArguments):
    """Arguments of `RegressionTrainer`."""

    trainer_type: Literal["regression"] = field(default="regression", metadata={"help": "Key of the trainer."})


class Targets(Dataset[Tensor]):
    """Eight constants."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index) / 8)


class RegressionTrainer(BaseTrainer):
    """Draws the mean velocity of fixed latents towards stored constants."""

    paradigm = "decoupled"
    execution_contract = OFFLINE_EXECUTION_CONTRACT
    interrupt_after = -1
    fail_at = -1
    batches_seen = 0

    def _build_train_dataloader(self) -> tuple[Any, dict[str, Any]]:
        dataset = Targets()
        sampler = DistributedSampler(
            dataset, num_replicas=self.comm.world_size, rank=self.comm.rank, shuffle=True, seed=self.training_args.seed
        )
        return DataLoader(dataset, batch_size=2, sampler=sampler), {}

    def optimize_batch(self, batch: Tensor) -> None:
        self.batches_seen += 1
        if self.batches_seen == self.fail_at:
            raise ZeroDivisionError("a broken batch")
        if self.batches_seen == self.interrupt_after:
            signal.raise_signal(signal.SIGINT)
        noisy = batch + 1e-3 * torch.randn(batch.shape)  # as dropout, or a dataset's augmentations, draw
        loss = (_velocity(self, batch.shape[0]).mean(dim=(1, 2, 3)) - noisy).pow(2).mean()
        self.backward_step(loss, {})


@dataclass
class ShrinkArguments(TrainingArguments):
    """Arguments of `ShrinkTrainer`."""

    trainer_type: Literal["shrink"] = field(default="shrink", metadata={"help": "Key of the trainer."})
    execution_contract = ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT
    paradigm = "distillation"

    def loss_terms_per_batch(self, scheduler_args: Any) -> int:
        return 1


class ShrinkTrainer(BaseTrainer):
    """Makes the velocity at generated latents small: no reward, no advantage."""

    paradigm = "distillation"
    execution_contract = ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT

    def sample(self) -> list[BaseSample]:
        return self.generate_samples(trajectory_indices=(-1,))

    def optimize(self, samples: Sequence[BaseSample]) -> None:
        for batch in self.microbatches(samples):
            final = batch.trajectory.states[batch.trajectory.grid.length]
            times = batch.trajectory.grid.times(0, len(batch), self.device)
            output = self.adapter.forward(
                final, times, batch.condition, self.rollout_plan.guidance, dynamics="ODE", noise_level=0.0
            )
            self.backward_step(output.velocity.only.pow(2).mean(), {})


def _velocity(trainer: BaseTrainer, rows: int) -> Tensor:
    """The velocity at fixed noise for an empty prompt."""
    adapter = trainer.adapter
    condition = adapter.encode_prompt([""] * rows, None, False)
    latents = torch.randn(rows, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    grid = run_grid(adapter, 2, 32, 32)
    output = adapter.forward(
        LatentState.single(latents),
        grid.times(0, rows),
        condition,
        adapter.guidance(1.0),
        dynamics="ODE",
        noise_level=0.0,
    )
    return output.velocity.only
