"""A configuration that loads, to be changed by the tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from flow_factory.hparams import Arguments, ConfigError, load_config, load_config_from_mapping

BASE: dict[str, Any] = {
    "model": {"model_type": "sd3-5", "model_name_or_path": "org/model"},
    "data": {"dataset_dir": "data"},
    "train": {"trainer_type": "grpo", "per_device_batch_size": 8},
    "rewards": {"reward_model": "jpeg_compressibility"},
}

BASE_YAML = """\
model:
  model_type: sd3-5
  model_name_or_path: org/model
train:
  per_device_batch_size: 8
rewards:
  reward_model: jpeg_compressibility
"""


def load(changes: dict[str, Any] | None = None, overrides: list[str] | None = None) -> Arguments:
    """The base configuration with changes (nested mappings are merged) and overrides."""
    return load_config_from_mapping(merged(BASE, changes or {}), overrides or [])


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def load_text(tmp_path: Path, text: str, overrides: list[str] | None = None) -> Arguments:
    """Loads YAML text from a file called run.yaml."""
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides or [])


def problems_of(changes: dict[str, Any], overrides: list[str] | None = None) -> dict[str, str]:
    """Path -> message of everything wrong with the base configuration after changes."""
    from flow_factory.hparams.errors import show_path

    with pytest.raises(ConfigError) as caught:
        load(changes, overrides)
    return {show_path(problem.path): problem.message for problem in caught.value.problems}
