"""The whole state of a run as named trees of tensors and numbers: what a checkpoint holds and what resume restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flow_factory.errors import RunError
from flow_factory.trainers.drivers import TrainingProgress

if TYPE_CHECKING:
    from flow_factory.trainers.abc import BaseTrainer


def run_state(trainer: BaseTrainer) -> dict[str, Any]:
    """Everything a resumed run needs. Random numbers need no state: they are drawn from counters (samples/noise.py).

    Returns:
        Part name to tree: "policy" (weights of every role by parameter name), "optimizer", "snapshots" (reference,
        EMA, the algorithm's own) and "trainer" (counters and histories).
    """
    return {
        "policy": {
            role: {name: p.detach() for name, p in optimizer.parameters.items()}
            for role, optimizer in trainer.roles.roles.items()
        },
        "optimizer": trainer.roles.state_dict(),
        "snapshots": trainer.adapter.snapshot_state(),
        "trainer": {
            "progress": trainer.progress.to_mapping(),
            "driver": trainer.driver.state_dict(),
            "algorithm": trainer.algorithm_state(),
            "history": trainer.result.history(),
            "evaluated_epoch": trainer._evaluated_epoch,
        },
    }


def load_run_state(trainer: BaseTrainer, parts: Mapping[str, Any]) -> None:
    """Restores what `run_state` returned, strictly.

    Raises:
        RunError: If roles, parameter names or shapes differ from this run's model; nothing is changed then.
    """
    policy = parts["policy"]
    _check_policy(trainer, policy)
    for role, optimizer in trainer.roles.roles.items():
        with torch.no_grad():
            for name, parameter in optimizer.parameters.items():
                parameter.copy_(policy[role][name])
    trainer.roles.load_state_dict(parts["optimizer"])
    trainer.adapter.load_snapshot_state(parts["snapshots"])
    state = parts["trainer"]
    trainer.progress = TrainingProgress(**state["progress"])
    trainer.driver.load_state_dict(state["driver"])
    trainer.load_algorithm_state(state["algorithm"])
    trainer.result.load_history(state["history"])
    trainer._evaluated_epoch = int(state["evaluated_epoch"])
    trainer._saved_epoch = trainer.epoch


def _check_policy(trainer: BaseTrainer, policy: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    if set(policy) != set(trainer.roles.roles):
        raise RunError(f"the checkpoint holds the roles {sorted(policy)}; this run has {sorted(trainer.roles.roles)}.")
    for role, optimizer in trainer.roles.roles.items():
        saved = {name: tuple(t.shape) for name, t in policy[role].items()}
        live = {name: tuple(p.shape) for name, p in optimizer.parameters.items()}
        wrong = sorted(name for name in saved.keys() | live.keys() if saved.get(name) != live.get(name))
        if wrong:
            listed = "; ".join(f"{n}: saved {saved.get(n)}, here {live.get(n)}" for n in wrong[:5])
            raise RunError(
                f"{len(wrong)} parameters of role {role!r} do not fit the checkpoint ({listed}). Resume with the model, "
                f"LoRA rank and target modules that the checkpoint was written with."
            )
