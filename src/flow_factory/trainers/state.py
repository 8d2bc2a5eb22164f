"""The whole state of a run as named trees of tensors and numbers: what a checkpoint holds and what resume restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flow_factory.trainers.drivers import TrainingProgress

if TYPE_CHECKING:
    from flow_factory.trainers.abc import BaseTrainer


def run_state(trainer: BaseTrainer) -> dict[str, Any]:
    """Everything a resumed run needs. Random numbers need no state: they are drawn from counters (samples/noise.py).

    Returns:
        Part name to tree: "weights" (every role and snapshot by parameter name), "optimizer" (per role) and "trainer"
        (counters, histories, and the memories of algorithm and advantage estimator).
    """
    estimators = trainer.advantage_processor
    return {
        "weights": trainer.adapter.variant_state(),
        "optimizer": trainer.roles.state_dict(),
        "trainer": {
            "progress": trainer.progress.to_mapping(),
            "driver": trainer.driver.state_dict(),
            "ema": {} if trainer.ema is None else trainer.ema.state_dict(),
            "algorithm": trainer.algorithm_state(),
            "advantage": {} if estimators is None else estimators.state_dict(trainer.progress.rollout_iteration),
            "history": trainer.result.history(),
            "evaluated_epoch": trainer._evaluated_epoch,
            "monitor": trainer.watch.state_dict(),
            "cycle": _cycle_state(trainer) if trainer.driver.inside_cycle else None,
        },
    }


def load_run_state(trainer: BaseTrainer, parts: Mapping[str, Any]) -> None:
    """Restores what `run_state` returned, strictly.

    Raises:
        InputError: If roles, snapshots, parameter names or shapes differ from this run's model.
    """
    trainer.adapter.load_variant_state(parts["weights"])
    trainer.roles.load_state_dict(parts["optimizer"])
    state = parts["trainer"]
    trainer.progress = TrainingProgress(**state["progress"])
    trainer.driver.load_state_dict(state["driver"])
    if trainer.ema is not None:
        trainer.ema.load_state_dict(state["ema"])
    trainer.load_algorithm_state(state["algorithm"])
    if trainer.advantage_processor is not None:
        trainer.advantage_processor.load_state_dict(state.get("advantage", {}))
    trainer.result.load_history(state["history"])
    trainer._evaluated_epoch = int(state["evaluated_epoch"])
    trainer.watch.load_state_dict(state.get("monitor"))  # checkpoints from before there was a monitor have none
    if state["cycle"] is not None:
        trainer._cycle_losses, trainer._cycle_metrics = state["cycle"]["losses"], state["cycle"]["metrics"]
    trainer._saved = (trainer.progress, trainer._evaluated_epoch)


def _cycle_state(trainer: BaseTrainer) -> dict[str, Any]:
    """What the row of a cycle that was left in its middle is made of."""
    return {"losses": trainer._cycle_losses, "metrics": trainer._cycle_metrics}
