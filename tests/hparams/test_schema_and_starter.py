"""The JSON Schema and the starter come from the dataclasses, whose fields all have a help text."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from flow_factory.errors import InputError
from flow_factory.hparams import (
    AccelerationArguments,
    DataArguments,
    DatasetArguments,
    DatasetEvalSpec,
    DatasetTrainSpec,
    EvaluationArguments,
    LauncherArguments,
    LogArguments,
    ModelArguments,
    OfflineFlowMatchingTrainingArguments,
    OptimizerArguments,
    RewardArguments,
    SchedulerArguments,
    TrainingArguments,
    get_model_spec,
    get_training_args_class,
    load_config,
    model_keys,
    training_args_keys,
)
from flow_factory.hparams.schema import config_schema
from flow_factory.hparams.shaping import field_types
from flow_factory.hparams.starter import starter_config

PLAIN = [
    AccelerationArguments,
    DataArguments,
    DatasetArguments,
    DatasetEvalSpec,
    DatasetTrainSpec,
    EvaluationArguments,
    LauncherArguments,
    LogArguments,
    ModelArguments,
    OfflineFlowMatchingTrainingArguments,
    OptimizerArguments,
    RewardArguments,
    SchedulerArguments,
    TrainingArguments,
]
BUILTIN_TRAINERS = [key for key in training_args_keys() if not key.startswith(("test-", "from-"))]
BUILTIN_MODELS = [key for key in model_keys() if not key.startswith("test-")]


@pytest.mark.parametrize(
    "cls",
    [
        *PLAIN,
        *(get_training_args_class(key) for key in BUILTIN_TRAINERS),
        *(get_model_spec(key).generation_arguments for key in BUILTIN_MODELS),
    ],
)
def test_every_field_has_a_help_text(cls: type) -> None:
    for entry in dataclasses.fields(cls):
        assert len(entry.metadata.get("help", "")) > 3, f"{cls.__name__}.{entry.name}"


@pytest.mark.parametrize("cls", [*PLAIN, *(get_training_args_class(key) for key in BUILTIN_TRAINERS)])
def test_every_choice_stands_in_the_help_text(cls: type) -> None:
    hints = field_types(cls)
    for entry in dataclasses.fields(cls):
        choices = _choices(hints[entry.name]) - {"auto", "cpu", "cuda", "state", "float32", "bfloat16", "float16"}
        missing = sorted(choice for choice in choices if choice not in entry.metadata["help"])
        assert not missing or entry.name == "trainer_type", f"{cls.__name__}.{entry.name}: {missing}"


def _choices(hint: Any) -> set[str]:
    if get_origin(hint) is Literal:
        return {choice for choice in get_args(hint) if isinstance(choice, str)}
    return {choice for argument in get_args(hint) for choice in _choices(argument)}


def test_clip_range_help_says_that_log_probs_are_means() -> None:
    help_text = {f.name: f.metadata["help"] for f in dataclasses.fields(get_training_args_class("grpo"))}["clip_range"]
    assert "means over latent elements" in help_text


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in _references(value)]
    return [ref for item in node for ref in _references(item)] if isinstance(node, list) else []


@pytest.mark.parametrize("trainer", BUILTIN_TRAINERS)
@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_schema_is_whole(trainer: str, model: str) -> None:
    schema = config_schema(trainer, model)
    assert json.loads(json.dumps(schema)) == schema
    for reference in _references(schema):
        assert reference.startswith("#/$defs/") and reference.removeprefix("#/$defs/") in schema["$defs"]
    properties = schema["properties"]
    assert schema["additionalProperties"] is False
    for section in ("data", "model", "scheduler", "train", "eval", "log", "acceleration"):
        assert properties[section]["additionalProperties"] is False
    spec = get_model_spec(model)
    wanted = {*field_types(get_training_args_class(trainer)), *spec.generation_fields()}
    assert set(properties["train"]["properties"]) == wanted
    assert set(properties["eval"]["properties"]) == {*field_types(EvaluationArguments), *spec.generation_fields()}
    for section in ("data", "model", "scheduler", "train", "eval", "log"):
        for name, field in properties[section]["properties"].items():
            assert field.get("description"), f"{section}.{name}"
    assert set(properties["model"]["required"]) == {"model_type", "model_name_or_path"}


def test_schema_knows_types_bounds_and_short_forms() -> None:
    train = config_schema()["properties"]["train"]["properties"]
    assert train["group_size"]["minimum"] == 1
    assert train["kl_type"]["enum"] == ["v-based", "x-based", "transition", "transition_dt"]
    assert {"type": "number"} in train["clip_range"]["anyOf"]
    assert train["max_sequence_length"]["maximum"] == 512
    rewards = config_schema()["properties"]["rewards"]
    assert {option.get("type") for option in rewards["anyOf"]} == {"array", "object"}
    with pytest.raises(InputError, match=r"unknown trainer type 'gpro'.*Did you mean 'grpo'"):
        config_schema("gpro")


@pytest.mark.parametrize("trainer", BUILTIN_TRAINERS)
@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_starter_loads_and_shows_the_true_defaults(tmp_path: Path, trainer: str, model: str) -> None:
    limit = get_model_spec(model).max_batch
    if limit is not None and get_training_args_class(trainer).smallest_micro_batch > limit:
        with pytest.raises(InputError, match=f"{trainer!r} compares 2 samples in one forward.*at most {limit}"):
            starter_config(trainer, model)
        return
    if get_model_spec(model).no_stored_media and trainer in ("sft", "offline-dpo"):
        with pytest.raises(InputError, match=f"{model!r} cannot be trained on stored media, .*{trainer!r} learns"):
            starter_config(trainer, model)
        return
    text = starter_config(trainer, model)
    (tmp_path / "starter.yaml").write_text(text)
    config = load_config(tmp_path / "starter.yaml")
    assert config.trainer_key == trainer and config.model_args.model_type == model
    # With every commented default made explicit, the configuration is the same.
    explicit = re.sub(r"^( *)#(?=\w+:)", r"\1", text, flags=re.MULTILINE)
    assert explicit != text
    (tmp_path / "explicit.yaml").write_text(explicit)
    assert load_config(tmp_path / "explicit.yaml") == config
    for name in field_types(get_training_args_class(trainer)):
        assert re.search(rf"^ *#?{name}:", text, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        ("sd3-5", "builtin/shapes"),
        ("flux2", "builtin/shapes"),
        ("flux1-kontext", "builtin/edits"),
        ("qwen-image-edit-plus", "builtin/edits"),
        ("wan2_i2v", "data"),
        ("ltx2_i2av", "data"),
        ("minimax-h3-ref2va", "data"),
    ],
)
def test_starter_names_prompts_that_the_model_takes(tmp_path: Path, model: str, dataset: str) -> None:
    """Text alone is not enough for a model that starts from a picture."""
    (tmp_path / "starter.yaml").write_text(starter_config("grpo", model))
    assert load_config(tmp_path / "starter.yaml").data_args.dataset_dir == dataset


def test_starter_has_short_lines() -> None:
    assert max(len(line) for line in starter_config().split("\n")) <= 120
