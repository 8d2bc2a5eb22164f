"""Writes a commented starter configuration from the dataclasses themselves, so that it cannot drift from them."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any, get_args, get_type_hints

from flow_factory.contracts import Modality
from flow_factory.errors import InputError
from flow_factory.hparams.arguments import LauncherArguments
from flow_factory.hparams.builtin import builtin_names
from flow_factory.hparams.data_args import DataArguments
from flow_factory.hparams.model_args import ModelArguments
from flow_factory.hparams.model_checks import no_stored_media, rows_too_few, unguided
from flow_factory.hparams.models import get_model_spec
from flow_factory.hparams.reward_args import RewardArguments
from flow_factory.hparams.run_args import INHERITED_BY_EVAL, EvaluationArguments, LogArguments
from flow_factory.hparams.saving import dump_yaml
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.training_args import CommonTrainingArguments, get_training_args_class

_WIDTH = 110
# What suits the embedded pipeline: seconds per cycle on a CPU, and rates at which a model this small visibly learns.
_EMBEDDED_TRAIN = {
    "resolution": 64,
    "num_inference_steps": 6,
    "guidance_scale": 1.0,
    "max_sequence_length": 16,
    "group_size": 12,
    "per_device_batch_size": 24,
    "learning_rate": 2e-3,
    "ema_decay": 0.0,
}
_EMBEDDED_EVAL = {"num_inference_steps": 6}


def starter_config(trainer_type: str = "grpo", model_type: str = "sd3-5") -> str:
    """A configuration that loads as it is: the fields a run needs are set, all others are comments with their default.

    Raises:
        InputError: If there is no such trainer or model, or they do not go together.
    """
    training, spec = get_training_args_class(trainer_type), get_model_spec(model_type)
    if spec.max_batch is not None and training.smallest_micro_batch > spec.max_batch:
        raise InputError(rows_too_few(trainer_type, training, spec))
    if unfit := no_stored_media(trainer_type, training, spec):
        raise InputError(unfit)
    rewards = training.execution_contract.needs_rewards
    chosen = _chosen(trainer_type, model_type, training)
    parts = [
        f"# A starter for {trainer_type} on {model_type}, made by `flow-factory config init`.",
        "# Lines such as `#seed: 42`, without a space, show a default: remove the `#` to change it.",
        *(
            ["# What is set suits the small pipeline that ships with the package; a large one wants other values."]
            if chosen["eval"] is _EMBEDDED_EVAL
            else []
        ),
        "",
        *_fields(LauncherArguments, {}, 0),
    ]
    sections: list[tuple[str, tuple[type, ...]]] = [
        ("model", (ModelArguments,)),
        ("data", (DataArguments,)),
        ("scheduler", (SchedulerArguments,)),
        ("train", (training, spec.generation_arguments)),
        ("eval", (EvaluationArguments, spec.generation_arguments)),
        ("log", (LogArguments,)),
    ]
    for name, classes in sections:
        lines = [line for cls in classes for line in _fields(cls, chosen.get(name, {}), 2, section=name)]
        # A section of comments alone is null to YAML, which means: all defaults.
        parts += ["", f"{name}:", *lines]
    reward_lines = _fields(RewardArguments, chosen["rewards"] if rewards else {}, 4, section="rewards")
    if rewards:
        first = next(i for i, line in enumerate(reward_lines) if not line.lstrip().startswith("#"))
        reward_lines[first] = "  - " + reward_lines[first][4:]
        reward_lines = _marker_first(reward_lines, first)
        parts += ["", "rewards:", *reward_lines]
    return "\n".join(parts) + "\n"


def _chosen(trainer_type: str, model_type: str, training: type[CommonTrainingArguments]) -> dict[str, dict[str, Any]]:
    """The fields a starter sets, by section."""
    models, prompts = builtin_names("model"), builtin_names("prompts")
    embedded = model_type == "sd3-5" and bool(models)
    train: dict[str, Any] = {"trainer_type": trainer_type, "max_epochs": 20}
    evaluation: dict[str, Any] = {}
    own = {
        entry.name
        for cls in (training, get_model_spec(model_type).generation_arguments)
        for entry in dataclasses.fields(cls)
    }
    if get_model_spec(model_type).guidance == "none":
        train.update(unguided(training))
        evaluation = {} if "guidance_scale" in own else unguided(EvaluationArguments)
    if embedded:
        train.update({name: value for name, value in _EMBEDDED_TRAIN.items() if name in own})
        evaluation = _EMBEDDED_EVAL
    dataset = "shapes" if "shapes" in prompts else next(iter(prompts), None)
    io = get_model_spec(model_type).io
    media = {slot.name for slot in io.inputs if slot.required and slot.modality is not Modality.TEXT} | set(io.one_of)
    if media:  # of the built-in ones, one has pictures with its prompts
        dataset = "edits" if media == {"image"} and io.outputs == (Modality.IMAGE,) and "edits" in prompts else None
    if not training.execution_contract.generates:
        dataset = None  # the built-in ones hold prompts, not stored examples
    model: dict[str, Any] = {
        "model_type": model_type,
        "model_name_or_path": f"builtin/{models[0]}" if embedded else "path/or/hub-id",
    }
    trainable = get_model_spec(model_type).trainable_components
    if ModelArguments(**model).target_components not in trainable:
        model["target_components"] = trainable[0]
    return {
        "model": model,
        "data": {"dataset_dir": f"builtin/{dataset}" if dataset else "data"},
        "train": train,
        "eval": evaluation,
        "rewards": {"reward_model": "prompt_match" if embedded and dataset == "shapes" else "jpeg_compressibility"},
    }


def _fields(cls: type, chosen: dict[str, Any], indent: int, section: str = "") -> list[str]:
    lines: list[str] = []
    pad = " " * indent
    # Fields of `eval:` that are not given take the value of `train:`, and so does null where it means nothing else.
    inherits = cls is not EvaluationArguments
    kept = {name for name, kind in get_type_hints(cls).items() if inherits and type(None) in get_args(kind)}
    for entry in dataclasses.fields(cls):
        if not entry.init:
            continue
        help_text = entry.metadata.get("help", "")
        lines += [f"{pad}# {line}" for line in textwrap.wrap(help_text, _WIDTH - indent)]
        if entry.name in chosen:
            lines += [pad + line for line in _assignment(entry.name, chosen[entry.name])]
        elif section == "eval" and entry.name not in kept and (inherits or entry.name in INHERITED_BY_EVAL):
            lines.append(f"{pad}#{entry.name}: null")
        else:
            lines += [f"{pad}#{line}" for line in _assignment(entry.name, _default(entry))]
    return lines


def _assignment(name: str, value: Any) -> list[str]:
    if isinstance(value, tuple):
        value = list(value)
    return dump_yaml({name: value}).rstrip("\n").split("\n")


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default is not dataclasses.MISSING:
        return entry.default
    return entry.default_factory() if entry.default_factory is not dataclasses.MISSING else None


def _marker_first(lines: list[str], marker: int) -> list[str]:
    """Moves the field with the list marker, and its help, to the front of the entry."""
    start = marker
    while start > 0 and lines[start - 1].lstrip().startswith("# "):
        start -= 1
    own, rest = lines[start : marker + 1], [*lines[:start], *lines[marker + 1 :]]
    return [*own, *rest]
