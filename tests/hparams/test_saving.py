"""A saved configuration loads back to an equal object; differences are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flow_factory.hparams import diff_mappings, load_config, load_config_from_mapping, save_config
from flow_factory.hparams.saving import dump_yaml
from flow_factory.hparams.yaml_source import parse_yaml
from tests.hparams.helpers import load

VARIANTS: list[dict[str, Any]] = [
    {},
    {"mixed_precision": "no", "log": {"run_name": "no"}},
    {"log": {"run_name": "12:30"}, "data": {"dataset_dir": "1e-4"}},
    {"log": {"run_name": "a: b # c"}, "train": {"seed": -3, "learning_rate": 1.2345678901234567e-7}},
    {"train": {"resolution": [64, 128], "width": 96}, "eval": {"resolution": 32, "max_sequence_length": 5}},
    {"train": {"gradient_accumulation_steps": 8, "max_grad_norm": None, "clip_range": [-1e-5, 3e-4]}},
    {"optimizers": {"learning_rate": 3e-4, "lr_warmup_steps": 5}},
    {"optimizers": [{"optimizer": "muon", "momentum": 0.9, "eps": 1e-6}]},
    {"scheduler": {"sde_steps": [3, 1], "sde_window": "contiguous", "sde_window_range": [0, 4], "num_sde_steps": 2}},
    {
        "rewards": [
            {
                "reward_model": "brightness",
                "name": "x",
                "params": {"t": "1e-4", "u": [1, "no", None, True], "v": {"w": 0.1}},
            },
            {"reward_model": "my.module.Reward", "name": "y", "weight": {"default": 2}},
        ],
        "eval_rewards": {"reward_model": "brightness"},
    },
    {
        "data": {
            "dataset_dir": "data",
            "datasets": [
                {"name": "no", "dataset_dir": "a", "train": {"weight": 3}, "eval": {"resolution": 64}},
                {"name": "7", "dataset_dir": "b", "source_id": 2**62},
            ],
        }
    },
    {"model": {"frozen_parameters_dtype": {"vae": "fp32"}, "target_modules": ["to_q", "on"], "lora_alpha": 3}},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_round_trip_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load(changes)
    save_config(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert again.to_mapping() == config.to_mapping()
    assert load_config_from_mapping(config.to_mapping()) == config


def test_every_difference_is_seen() -> None:
    """The comparison that the round trip relies on is not blind."""
    assert load() != load({"train": {"max_sequence_length": 8}})
    assert load() != load({"eval": {"max_sequence_length": 8}})
    assert load() != load({"rewards": {"params": {"a": 1}}})


def test_a_saved_configuration_can_be_overridden(tmp_path: Path) -> None:
    save_config(load({"train": {"resolution": 256, "learning_rate": 1e-3}}), tmp_path / "config.yaml")
    config = load_config(tmp_path / "config.yaml", ["train.resolution=128", "train.learning_rate=1e-4"])
    assert (config.training_args.height, config.training_args.width) == (128, 128)
    assert config.optimizer_args[0].learning_rate == 1e-4


@pytest.mark.parametrize(
    "value",
    [
        "no",
        "On",
        "y",
        "12:30",
        "1e-4",
        "1.5",
        "0x1F",
        "null",
        "~",
        "",
        " a ",
        "a\nb",
        "é",
        "- x",
        "{",
        "007",
        ".inf",
        "5",
    ],
)
def test_text_stays_text(value: str) -> None:
    """Pitfall 53, on the way out: an unquoted scalar must not come back as something else."""
    text = dump_yaml({"a": value, "b": [value]})
    assert parse_yaml(text, "f")[0] == {"a": value, "b": [value]}


@pytest.mark.parametrize("value", [1e-5, 1e-4, 0.1, 1e22, -3.0, 5e-324, 1.7976931348623157e308, 0.0])
def test_floats_are_exact(value: float) -> None:
    import yaml

    got = parse_yaml(dump_yaml({"a": value}), "f")[0]["a"]
    assert got == value and isinstance(got, float)
    assert isinstance(yaml.safe_load(dump_yaml({"a": value}))["a"], float)  # other readers see a number too


def test_differences_are_named_with_both_values() -> None:
    a, b = load(), load({"train": {"seed": 7, "clip_range": 2e-4}, "rewards": {"weight": 2, "params": {"x": 1}}})
    assert diff_mappings(a.to_mapping(), a.to_mapping()) == []
    assert diff_mappings(a.to_mapping(), b.to_mapping()) == [
        "train.seed: 42 -> 7",
        "train.clip_range: [-0.0001, 0.0001] -> [-0.0002, 0.0002]",
        "rewards[0].weight: 1.0 -> 2.0",
        "rewards[0].params.x: (not given) -> 1",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"max_epochs": 9}},
        {"train": {"resume": "never"}},
        {"log": {"save_freq": 3}},
        {"eval": {"eval_freq": 2, "seed": 5}},
        {"data": {"dataloader_num_workers": 3}},
        {"main_process_port": 1},
        {"num_processes": 2},
    ],
)
def test_what_may_change_on_resume(changes: dict[str, Any]) -> None:
    assert load().fingerprint_mapping() == load(changes).fingerprint_mapping()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"seed": 9}},
        {"train": {"max_sequence_length": 8}},
        {"scheduler": {"noise_level": 0.5}},
        {"model": {"lora_rank": 4}},
        {"rewards": {"weight": 2}},
        {"rewards": {"params": {"x": 1}}},
        {"optimizers": {"learning_rate": 3e-4}},
        {"data": {"dataset_dir": "other"}},
    ],
)
def test_what_may_not_change_on_resume(changes: dict[str, Any]) -> None:
    assert load().fingerprint_mapping() != load(changes).fingerprint_mapping()
