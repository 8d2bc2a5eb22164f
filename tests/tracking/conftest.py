"""A small real configuration, resolved without loading a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flow_factory.hparams import Arguments, load_config_from_mapping


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Arguments]:
    """Builds a configuration whose runs go to `tmp_path/save`; dotted keyword-like overrides as a mapping."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    (model / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    for split in ("train", "test"):
        (data / f"{split}.txt").write_text("".join(f"prompt {i}\n" for i in range(16)))

    def build(**sections: dict[str, Any]) -> Arguments:
        mapping: dict[str, Any] = {
            "model": {"model_type": "sd3-5", "model_name_or_path": str(model)},
            "data": {"dataset_dir": str(data)},
            "train": {"trainer_type": "grpo", "max_epochs": 3},
            "log": {"save_dir": str(tmp_path / "save"), "run_name": "run", "verbose": False},
            "rewards": [{"name": "r", "reward_model": "brightness"}],
        }
        for section, values in sections.items():
            mapping[section] = {**mapping[section], **values} if isinstance(mapping.get(section), dict) else values
        return load_config_from_mapping(mapping)

    return build
