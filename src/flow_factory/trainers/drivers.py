"""Acquisition drivers: one cycle of the training loop for each execution contract.

A driver owns what happens around a cycle and is the same for every algorithm of its kind: seeding, the order of the
phases, where an interruption may take effect, and the progress counters, which advance only after the cycle succeeded.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flow_factory.contracts import (
    OFFLINE_EXECUTION_CONTRACT,
    ONLINE_EXECUTION_CONTRACT,
    ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT,
    ExecutionContract,
)
from flow_factory.errors import RunError

if TYPE_CHECKING:
    from flow_factory.trainers.abc import BaseTrainer

_NO_BATCH = object()


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come. A cycle that raises does not advance it.

    Attributes:
        optimizer_step: Optimizer steps of the first role.
        rollout_iteration: Finished cycles of a generation trainer.
        data_epoch: Cleanly exhausted passes over the dataset of a dataset trainer.
    """

    optimizer_step: int = 0
    rollout_iteration: int = 0
    data_epoch: int = 0

    def to_mapping(self) -> dict[str, int]:
        """The counters by name, for checkpoints and logs."""
        return asdict(self)


class CycleDropped(Exception):
    """Internal: a signal arrived while nothing had been changed yet; the cycle is dropped and its start is saved."""


class AcquisitionDriver(ABC):
    """Runs one cycle of a trainer.

    Attributes:
        required_hooks: Methods that the trainer class must define for this contract.
    """

    required_hooks: ClassVar[tuple[str, ...]]

    @abstractmethod
    def run_cycle(self, trainer: BaseTrainer) -> bool:
        """Acquires, optimises and advances `trainer.progress`.

        Returns:
            True if the cycle was completed; False if it stopped early at a point from which it can be resumed.

        Raises:
            CycleDropped: If a signal arrived before anything was changed.
        """

    @abstractmethod
    def cycle(self, progress: TrainingProgress) -> int:
        """The counter of cycles that `max_epochs` limits."""

    @abstractmethod
    def checkpoint_number(self, progress: TrainingProgress) -> int:
        """The number in a checkpoint's name; it grows from any state that can be saved to the next."""

    @property
    def inside_cycle(self) -> bool:
        """True if a cycle was left in its middle, at a point from which it can be gone on with."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What the driver must remember beyond `TrainingProgress`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if state:
            raise RunError(f"{type(self).__name__} keeps no state, but the checkpoint holds {sorted(state)} for it.")

    @classmethod
    def check_hooks(cls, trainer_cls: type[BaseTrainer]) -> None:
        """Checks that the trainer class defines the hooks of this contract.

        Raises:
            TypeError: Naming the missing hooks.
        """
        from flow_factory.trainers.abc import BaseTrainer

        missing = [h for h in cls.required_hooks if getattr(trainer_cls, h, None) is getattr(BaseTrainer, h)]
        if missing:
            raise TypeError(
                f"{trainer_cls.__name__} has the contract {trainer_cls.execution_contract} but does not define "
                f"{' and '.join(f'{h}()' for h in missing)}; a trainer with this contract must define "
                f"{' and '.join(f'{h}()' for h in cls.required_hooks)}."
            )


class OnlineDriver(AcquisitionDriver):
    """Generation with runtime rewards: `sample`, `prepare_feedback`, `optimize`."""

    required_hooks = ("sample", "optimize")

    def run_cycle(self, trainer: BaseTrainer) -> bool:
        trainer.seed_cycle(trainer.progress.rollout_iteration)
        trainer._run_training_step()
        trainer.progress = replace(trainer.progress, rollout_iteration=trainer.progress.rollout_iteration + 1)
        return True

    def cycle(self, progress: TrainingProgress) -> int:
        return progress.rollout_iteration

    def checkpoint_number(self, progress: TrainingProgress) -> int:
        return progress.rollout_iteration


class OnlineNoFeedbackDriver(OnlineDriver):
    """Generation without feedback (distillation): `sample`, `optimize`."""


class OfflineDriver(AcquisitionDriver):
    """A finite dataset: `optimize_batch` for every batch until clean exhaustion.

    An epoch can be left between two optimizer steps; the driver then remembers the next batch.
    """

    required_hooks = ("optimize_batch", "_build_train_dataloader")

    def __init__(self) -> None:
        self.next_batch = 0

    def run_cycle(self, trainer: BaseTrainer) -> bool:
        epoch = trainer.progress.data_epoch
        trainer.seed_cycle(epoch)
        sampler = getattr(trainer.dataloader, "sampler", None)
        if not hasattr(sampler, "set_epoch"):
            raise RunError(
                f"the training loader of {type(trainer).__name__} has no sampler with set_epoch(): every epoch would "
                f"come in the same order. Use torch.utils.data.DistributedSampler."
            )
        sampler.set_epoch(epoch)  # type: ignore[union-attr]
        trainer.adapter.train()
        with trainer.phase("optimize"), _counting(trainer, self.next_batch) as advance:
            if not self._pass_over_data(trainer, epoch, advance):
                return False
        if not trainer.at_update_boundary:
            raise RunError(
                f"epoch {epoch} ended inside an accumulation window of {trainer.accumulation_steps} batches: partial "
                f"windows are never flushed. Choose a train.gradient_accumulation_steps that divides the batches per "
                f"rank."
            )
        self.next_batch = 0
        trainer.progress = replace(trainer.progress, data_epoch=epoch + 1)
        return True

    def _pass_over_data(self, trainer: BaseTrainer, epoch: int, advance: Callable[[int], None]) -> bool:
        """Optimises on the epoch's batches; False if it was left in its middle."""
        batches = _batches_from(trainer.dataloader, self.next_batch)
        for number in itertools.count(self.next_batch):
            # Before the batch is read, so that an epoch that is gone on with here draws the same numbers.
            trainer.seed_cycle(epoch, number)
            batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                break
            if trainer.at_update_boundary:
                # Only here are there no half-accumulated gradients, so only here may an epoch be left.
                self.next_batch = number
                if trainer.interrupt_requested() or not trainer.should_continue_training():
                    return False
            trainer.optimize_batch(batch)
            advance(1)
        return True

    def cycle(self, progress: TrainingProgress) -> int:
        return progress.data_epoch

    def checkpoint_number(self, progress: TrainingProgress) -> int:
        return progress.optimizer_step  # an epoch can be left in its middle

    @property
    def inside_cycle(self) -> bool:
        return self.next_batch > 0

    def state_dict(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_batch = int(state["next_batch"])


def _counting(trainer: BaseTrainer, first: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows how far the epoch is, if the loader tells its length."""
    try:
        total = len(trainer.dataloader) - first
    except TypeError:
        return nullcontext(lambda count: None)
    return trainer.tracker.progress("optimize", total, "batches")


def _batches_from(loader: Any, first: int) -> Iterator[Any]:
    """The loader's batches from number `first` on; a loader that can skip does not make those before."""
    if hasattr(loader, "skip_batches"):
        loader.skip_batches(first)
        return iter(loader)
    return itertools.islice(iter(loader), first, None)


_DRIVERS: dict[ExecutionContract, type[AcquisitionDriver]] = {
    ONLINE_EXECUTION_CONTRACT: OnlineDriver,
    ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT: OnlineNoFeedbackDriver,
    OFFLINE_EXECUTION_CONTRACT: OfflineDriver,
}


def get_driver_class(contract: ExecutionContract) -> type[AcquisitionDriver]:
    """The driver that runs trainers of this contract."""
    return _DRIVERS[contract]
