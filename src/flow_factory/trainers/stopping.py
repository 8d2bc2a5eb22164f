"""Ending a run on a signal: all ranks agree that there was one, and the message says what was saved."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from flow_factory.checkpoints.signals import SignalGuard
from flow_factory.distributed import Comm
from flow_factory.errors import Interrupted


class DeadlinePassedError(Exception):
    """Internal: the optimisation phase outlived `train.signal_deadline_s`; its cycle is lost."""


class Stopping:
    """What the ranks of a run do about signals. Its methods are collectives.

    Args:
        comm: Process group.
        deadline_s: `train.signal_deadline_s`: seconds that an optimisation phase may take to finish after a signal.
    """

    def __init__(self, comm: Comm, deadline_s: float) -> None:
        self._comm = comm
        self._deadline_s = deadline_s

    def requested(self, signals: SignalGuard | None) -> bool:
        """True on every rank once any rank has received a signal."""
        return self._comm.any_true(signals is not None and signals.requested)

    def overdue(self, signals: SignalGuard | None) -> bool:
        """Whether this rank's signal came longer ago than the deadline (no collective; see `RoleOptimizer`)."""
        return signals is not None and signals.overdue(self._deadline_s)

    def abandonable(self, signals: SignalGuard | None) -> AbstractContextManager[None]:
        """A block that a signal on this rank ends at once (no collective); ask `requested` after it."""
        return nullcontext() if signals is None else signals.abandonable()

    def saved(self, signals: SignalGuard | None, what: str, epoch: int, checkpoint: Path | None) -> Interrupted:
        """The end of a run whose state was saved."""
        # Without log.run_name the same command would start another run; the folder's own configuration never does.
        where = f", or: flow-factory train {checkpoint.parent.parent / 'config.yaml'}" if checkpoint else ""
        return Interrupted(
            f"stopped by a signal: {what}; the state after cycle {epoch} is in {checkpoint}. Run the same command "
            f"again to go on{where}.",
            self._signum(signals),
        )

    def lost(self, signals: SignalGuard | None, checkpoint: Path | None) -> Interrupted:
        """The end of a run whose optimisation phase could not be finished in time."""
        return Interrupted(
            f"stopped by a signal: the optimisation phase did not finish within train.signal_deadline_s = "
            f"{self._deadline_s} seconds, so this cycle is lost and nothing was saved. The newest checkpoint is "
            f"{checkpoint}. Raise the deadline if the scheduler allows it.",
            self._signum(signals),
        )

    def _signum(self, signals: SignalGuard | None) -> int:
        local = 0 if signals is None or signals.signum is None else int(signals.signum)
        return max(self._comm.gather_objects(local)) or 15
