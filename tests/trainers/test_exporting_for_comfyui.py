"""The files of `--format comfyui` and what the model card says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.errors import InputError
from flow_factory.hparams import load_config_from_mapping
from flow_factory.models.export import WEIGHT_NAME
from flow_factory.trainers.export_request import ExportRequest
from flow_factory.trainers.exporting import export_weights

EXPERTS = ["transformer", "transformer_2"]


def request(
    tmp_path: Path, model: str, components: Sequence[str], module: str = "blocks.0.attn1.to_q"
) -> ExportRequest:
    """An export of a run called `style`, whose LoRA has one module in each component."""
    folder = tmp_path / "style" / "checkpoints" / "checkpoint-000002"
    (folder / "lora").mkdir(parents=True)
    state = {f"{name}.{module}.lora_{side}.weight": torch.randn(4, 4) for name in components for side in "AB"}
    save_file(state, folder / "lora" / WEIGHT_NAME)
    config = load_config_from_mapping(
        {
            "data": {"dataset_dir": "shapes"},
            "model": {"model_type": model, "model_name_or_path": f"org/{model}", "target_components": list(components)},
            "train": {"trainer_type": "grpo"},
            "rewards": {"name": "dark", "reward_model": "brightness"},
        }
    )
    weights = SavedWeights(folder / "lora", "lora", averaged=False, checkpoint=folder, step=2)
    return ExportRequest(config, tmp_path / "style", weights, "comfyui")


def exported(request: ExportRequest, folder: Path) -> tuple[list[str], str]:
    """The LoRA files' names, and how the card says they are loaded."""
    folder.mkdir()
    export_weights(request, folder)
    card = (folder / "README.md").read_text()
    return sorted(f.name for f in folder.glob("*.safetensors")), card.partition("## How to load it\n\n")[2]


def test_two_experts_are_two_files_named_in_the_card(tmp_path: Path) -> None:
    names, card = exported(request(tmp_path, "wan2_t2v", EXPERTS), tmp_path / "out")
    assert names == ["style_high_noise.safetensors", "style_low_noise.safetensors"]
    assert "Put `style_high_noise.safetensors` and `style_low_noise.safetensors` into ComfyUI's `models/loras`" in card
    assert "`style_high_noise.safetensors` on the high noise model" in card
    assert "`style_low_noise.safetensors` on the low noise model, at strength 1." in card
    high, low = (load_file(tmp_path / "out" / name) for name in names)
    assert high.keys() == low.keys() and not torch.equal(*(next(iter(file.values())) for file in (high, low)))


@pytest.mark.parametrize(
    ("components", "name", "where"),
    [
        (EXPERTS[:1], "style", "with the node *Load LoRA* on the base model (of two, on the high noise one), at"),
        (EXPERTS[1:], "style_low_noise", "for each model: `style_low_noise.safetensors` on the low noise model, at"),
    ],
)
def test_one_expert_is_one_file(tmp_path: Path, components: list[str], name: str, where: str) -> None:
    names, card = exported(request(tmp_path, "wan2_i2v", components), tmp_path / "out")
    assert names == [f"{name}.safetensors"] and where in card


def test_a_family_with_one_network_is_one_file(tmp_path: Path) -> None:
    module = "transformer_blocks.0.attn.to_q"
    names, card = exported(request(tmp_path, "flux1", EXPERTS[:1], module), tmp_path / "out")
    assert names == ["style.safetensors"]
    assert "load it with the node *Load LoRA* on the base model, at strength 1." in card


def test_a_family_that_comfyui_does_not_know(tmp_path: Path) -> None:
    module = "transformer_blocks.0.attn1.to_q"
    with pytest.raises(InputError, match=r"not known here for SanaAdapter\. Use --format diffusers"):
        exported(request(tmp_path, "sana", EXPERTS[:1], module), tmp_path / "out")


@pytest.mark.parametrize(
    ("averaged", "words"), [(True, r"moving average.*train\.ema_update_interval.*--live"), (False, "made an update")]
)
def test_a_lora_that_changes_nothing_is_refused(tmp_path: Path, averaged: bool, words: str) -> None:
    asked = request(tmp_path, "flux1", EXPERTS[:1], "transformer_blocks.0.attn.to_q")
    file = asked.weights.folder / WEIGHT_NAME
    save_file({k: torch.zeros_like(v) if "lora_B" in k else v for k, v in load_file(file).items()}, file)
    asked = dataclasses.replace(asked, weights=dataclasses.replace(asked.weights, averaged=averaged))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=rf"(?s)lora_B weights are zero\..*{words}"):
        export_weights(asked, tmp_path / "out")
