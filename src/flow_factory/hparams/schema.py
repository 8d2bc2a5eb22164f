"""The JSON Schema of the configuration, with the help texts, for editors and for people."""

from __future__ import annotations

import dataclasses
from typing import Any

from flow_factory.hparams.arguments import LauncherArguments
from flow_factory.hparams.data_args import DataArguments, DatasetArguments, DatasetEvalSpec, DatasetTrainSpec
from flow_factory.hparams.model_args import ModelArguments
from flow_factory.hparams.models import get_model_spec
from flow_factory.hparams.optimizer_args import (
    AccelerationArguments,
    OptimizerArguments,
    RolloutAcceleration,
    SharedAcceleration,
)
from flow_factory.hparams.reward_args import RewardArguments
from flow_factory.hparams.run_args import EvaluationArguments, LogArguments
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args import get_training_args_class
from flow_factory.hparams.validation import adapter_for

_NESTED = (DatasetArguments, DatasetTrainSpec, DatasetEvalSpec, SharedAcceleration, RolloutAcceleration)


def config_schema(trainer_type: str = "grpo", model_type: str = "sd3-5") -> dict[str, Any]:
    """The schema of a whole configuration file for one trainer and one model.

    Args:
        trainer_type: Whose `train:` fields are described.
        model_type: Whose model-specific fields are accepted in `train:` and `eval:`.

    Raises:
        InputError: If there is no such trainer or model.
    """
    training, spec = get_training_args_class(trainer_type), get_model_spec(model_type)
    definitions: dict[str, Any] = {}
    generation = _section(spec.generation_arguments, definitions)
    rewards = _one_or_list(_section(RewardArguments, definitions))
    sections = {
        "data": _section(DataArguments, definitions),
        "model": _section(ModelArguments, definitions),
        "scheduler": _section(SchedulerArguments, definitions),
        "train": _merged(_section(training, definitions), generation),
        "eval": _merged(_section(EvaluationArguments, definitions), generation),
        "log": _section(LogArguments, definitions),
        "rewards": {**rewards, "description": "What judges the samples in training."},
        "eval_rewards": {
            "anyOf": [*rewards["anyOf"], {"type": "null"}],
            "description": "What judges the samples in evaluation; null: the training rewards.",
        },
        "optimizers": {
            **_one_or_list(_section(OptimizerArguments, definitions)),
            "description": "One optimizer per trainable role; none: the short form in train.",
        },
        "acceleration": _section(AccelerationArguments, definitions),
    }
    top = _section(LauncherArguments, definitions)
    top["properties"].update(sections)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Flow-Factory configuration ({trainer_type} on {model_type})",
        **{key: value for key, value in top.items() if key not in ("title", "$defs", "description")},
        "required": ["model", *(["rewards"] if training.execution_contract.needs_rewards else [])],
        "$defs": definitions,
    }


def _section(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one dataclass; the definitions it refers to are added to `definitions`."""
    schema = adapter_for(cls).json_schema()
    nested = schema.pop("$defs", {})
    for nested_class in _NESTED:
        if nested_class.__name__ in nested:
            _add_help(nested_class, nested[nested_class.__name__])
    definitions.update(nested)
    _add_help(cls, schema)
    schema.pop("title", None)
    return schema


def _add_help(cls: type, schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    for entry in dataclasses.fields(cls):
        if entry.name in properties:
            properties[entry.name].pop("title", None)
            properties[entry.name] = _accept_single(properties[entry.name])
            if entry.metadata.get("help"):
                properties[entry.name]["description"] = entry.metadata["help"]


def _accept_single(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of mappings may also be given as one mapping."""
    if schema.get("type") == "array" and "$ref" in schema.get("items", {}):
        rest = {key: value for key, value in schema.items() if key not in ("type", "items")}
        return {"anyOf": [schema["items"], {"type": "array", "items": schema["items"]}], **rest}
    if "anyOf" in schema:
        extra = [m["items"] for m in schema["anyOf"] if m.get("type") == "array" and "$ref" in m.get("items", {})]
        return {**schema, "anyOf": [*schema["anyOf"], *extra]}
    return schema


def _one_or_list(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": item}, item]}


def _merged(own: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    merged = {**own, "properties": {**own.get("properties", {}), **model.get("properties", {})}}
    required = [*own.get("required", []), *model.get("required", [])]
    return {**merged, "required": required} if required else merged
