"""A user's own model through the commands: nothing of it is known to the package before its module is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flow_factory.errors import InputError
from flow_factory.hparams import load_config
from flow_factory.models.pseudo_pipeline import PseudoPipeline
from flow_factory.models.registry import get_adapter_class
from tests.cli.invoke import invoke
from tests.outside.tiny_pixels import TinyPixelsModel
from tests.parity.cases.outside import build


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration beside its checkpoint and its prompts."""
    folder = tmp_path_factory.mktemp("outside")
    build().save_pretrained(folder / "model")
    (folder / "prompts").mkdir()
    (folder / "prompts" / "train.txt").write_text("red dot\nblue bar\n")
    (folder / "prompts" / "test.txt").write_text("star\n")
    mapping = {
        "plugins": ["tests.outside.tiny_pixels"],
        "mixed_precision": "no",
        "model": {"model_type": "tiny-pixels", "model_name_or_path": str(folder / "model"), "lora_rank": 4},
        "data": {
            "datasets": [
                {
                    "name": "words",
                    "dataset_dir": str(folder / "prompts"),
                    "train": {"split": "train"},
                    "eval": {"split": "test"},
                }
            ]
        },
        "scheduler": {"dynamics_type": "Flow-SDE", "noise_level": 0.7},
        "train": {
            "trainer_type": "grpo",
            "resolution": [16, 24],
            "num_inference_steps": 3,
            "guidance_scale": 2.0,
            "group_size": 2,
            "unique_sample_num_per_epoch": 2,
            "per_device_batch_size": 2,
            "gradient_step_per_epoch": 1,
            "max_epochs": 1,
            "ema_decay": 0.0,
            "learning_rate": 1e-2,
        },
        "eval": {"resolution": [16, 24], "num_inference_steps": 3, "guidance_scale": 2.0, "eval_freq": 1},
        "rewards": {"name": "dark", "reward_model": "brightness"},
        "log": {"save_dir": str(folder / "save"), "run_name": "run", "logging_backend": "none", "save_freq": 1},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(mapping))
    return file


def test_commands(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("check", "plan"):
        done = invoke(capsys, monkeypatch, command, config)
        assert done.code == 0, done.err
    planned = done.out
    assert "TinyPixelsModel" in planned and "not known" not in planned

    assert invoke(capsys, monkeypatch, "train", config).code == 0
    run = config.parent / "save" / "run"
    done = invoke(capsys, monkeypatch, "sample", run, "--prompt", "a red dot", "--output", config.parent / "drawn")
    assert done.code == 0, done.err
    assert len(list((config.parent / "drawn").glob("*.png"))) >= 1

    merged = config.parent / "merged"
    assert invoke(capsys, monkeypatch, "export", run, "--format", "merged", "--output", merged).code == 0
    assert json.loads((merged / "model_index.json").read_text())["_class_name"] == "TinyPixelsPipeline"
    assert invoke(capsys, monkeypatch, "check", config, f"model.model_name_or_path={merged}").code == 0
    card = (merged / "README.md").read_text()
    assert "no part of diffusers" in card and "from diffusers" not in card


def test_a_pipeline_of_parts_cannot_sample() -> None:
    class Parts(PseudoPipeline):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(InputError, match="Parts holds the parts of a model"):
        Parts()("a prompt")


def test_a_network_without_checkpointing_says_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyPixelsModel, "_supports_gradient_checkpointing", False)
    loaded = load_config(config, ["train.enable_gradient_checkpointing=true"])
    with pytest.raises(InputError, match="enable_gradient_checkpointing: TinyPixelsModel does not support it"):
        get_adapter_class("tiny-pixels")(loaded)
