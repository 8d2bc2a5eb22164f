"""A small run of every decoupled trainer, with what each has switched on."""

from __future__ import annotations

from typing import Any

ODE = {"scheduler.dynamics_type": "ODE"}
# Group size 4 in batches of 2 rows: the members of a group lie in different micro-batches.
SPREAD = {"train.group_size": 4, "train.unique_sample_num_per_epoch": 2, "train.per_device_batch_size": 2}

# Every optional part of each method, so that what it keeps is saved and restored.
FULL: dict[str, dict[str, Any]] = {
    "nft": {"train.off_policy": True, "train.old_model_decay": "1-0.0-0.1-0.5", "train.kl_beta": 1e-2},
    "awm": {
        "train.awm_weighting": "ghuber", "train.clip_range": 1.0, "train.kl_beta": 1e-2, "train.ema_kl_beta": 0.5,
        "train.off_policy": True, "train.num_train_timesteps": 2, "train.time_sampling_strategy": "discrete_wo_init",
    },
    "dpo": {"train.beta": 10.0, "train.num_train_timesteps": 2},
    "dgpo": {
        "train.kl_beta": 0.02, "train.kl_cfg": 2.0, "train.clip_range": 0.05, "train.ema_ref_ramp_rate": 0.1,
        "train.switch_ema_ref": 1, "train.num_train_timesteps": 2,
    },
    "crd": {"train.num_train_timesteps": 2, "train.weight_temp": 0.5, "train.old_model_decay": "1-0.25-0.1-0.5",
            "train.sampling_model_decay": "1-0.1-0.1-0.5"},
}  # fmt: skip
DECOUPLED = list(FULL)


def run_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Changes to the base mapping for a run of `kind`; keyword arguments are fields of `train:`."""
    return {"train.trainer_type": kind, **ODE, **{f"train.{name}": value for name, value in changes.items()}}
