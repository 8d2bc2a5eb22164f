"""From a configuration to a trainer."""

from __future__ import annotations

from flow_factory.hparams import Arguments
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.registry import get_trainer_class


def build_trainer(config: Arguments) -> BaseTrainer:
    """Builds the trainer that `train.trainer_type` names, with its model, data, rewards and run folder.

    Args:
        config: A resolved configuration from `load_config`.

    Returns:
        A trainer; `trainer.start()` runs it and returns a `TrainingResult`.

    Raises:
        InputError: If anything in the configuration does not hold, before the model is loaded where possible.
    """
    return get_trainer_class(config.trainer_key)(config)
