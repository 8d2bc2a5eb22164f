"""Pitfall 10 as a table: optimizer steps per cycle equal gradient_step_per_epoch, for every trainer that generates."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from flow_factory.errors import InputError
from flow_factory.hparams import (
    DecoupledTrainingArguments,
    DPOTrainingArguments,
    TrainingArguments,
    get_training_args_class,
)
from flow_factory.trainers.registry import _TRAINER_REGISTRY
from tests.trainers.decoupled_cases import ODE
from tests.trainers.support import make_config, make_trainer
from tests.trainers.test_contracts import built_in


def trainers() -> list[str]:
    """The package's own trainers that learn from what they generate."""
    classes = {key: get_training_args_class(key) for key in built_in(_TRAINER_REGISTRY)}
    return [k for k, c in classes.items() if issubclass(c, TrainingArguments) and c.execution_contract.needs_rewards]


def variants(key: str) -> list[dict[str, Any]]:
    """Windows of coupled trainers, times of decoupled ones."""
    cls = get_training_args_class(key)
    if not issubclass(cls, DecoupledTrainingArguments):
        return [{"scheduler.num_sde_steps": size} for size in (1, 2, None)]
    free = ("uniform", "logit_normal")
    if issubclass(cls, DPOTrainingArguments):
        drawn = [{"train.weighting_scheme": name} for name in free]
    else:
        grid = ("discrete", "discrete_with_init", "discrete_wo_init")
        drawn = [{"train.time_sampling_strategy": name} for name in (*free, *grid)]
    counts = itertools.cycle((0, 1, 2))
    return [{**ODE, **how, "train.num_train_timesteps": next(counts)} for how in drawn]


TABLE = [(key, steps, changes) for key in trainers() for steps, changes in itertools.product((1, 2, 3), variants(key))]


def cycle_of(key: str, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    """One cycle of three batches of two groups; two passes over it where an update takes a whole pass."""
    return {
        "train.trainer_type": key,
        "train.gradient_step_per_epoch": steps,
        "train.max_epochs": 1,
        "train.unique_sample_num_per_epoch": 6,
        "train.num_inner_epochs": 2 if steps == 1 else 1,
        **changes,
    }


@pytest.mark.parametrize(("key", "steps", "changes"), TABLE)
def test_optimizer_steps_per_cycle(
    tiny_sd3_dir: Path, tmp_path: Path, key: str, steps: int, changes: dict[str, Any]
) -> None:
    """Either the configuration is refused before anything is loaded, or the cycle makes exactly so many steps."""
    changes = cycle_of(key, steps, changes)
    try:
        make_config(tiny_sd3_dir, tmp_path, changes)
    except InputError as refused:
        assert steps > 1 and "gradient_step_per_epoch" in str(refused)
        return
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    result = trainer.start()
    inner = trainer.training_args.num_inner_epochs
    assert result.counts["optimizer_steps"] == steps * inner == trainer.step == len(result.losses)


def test_several_steps_are_not_always_refused(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The table would say nothing of a trainer all of whose rows with `steps > 1` are refused."""
    accepted = set()
    for key, steps, changes in TABLE:
        if steps > 1:
            with contextlib.suppress(InputError):
                make_config(tiny_sd3_dir, tmp_path, cycle_of(key, steps, changes))
                accepted.add(key)
    assert accepted == set(trainers()) >= {"grpo", "nft", "awm", "dpo", "dgpo", "crd"}
