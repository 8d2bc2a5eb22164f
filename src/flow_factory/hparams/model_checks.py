"""Rules on what a model can do: guidance, rows of a forward, steps, trained components; part of `cross_checks`."""

from __future__ import annotations

import dataclasses
from typing import Any

from flow_factory.hparams.arguments import Arguments
from flow_factory.hparams.errors import Add, Path, nearest
from flow_factory.hparams.models import ModelSpec
from flow_factory.hparams.training_args import CommonTrainingArguments

# The fields of `train:` that hold a guidance scale.
_GUIDANCE_FIELDS = ("guidance_scale", "kl_cfg", "kl_guidance_scale")


def check_model(config: Arguments, add: Add) -> None:
    """Collects what the configured model cannot do.

    Args:
        config: A configuration whose single fields are valid.
        add: Receives path and message of everything that does not fit together.
    """
    _check_guidance(config, add)
    _check_limits(config, add)
    _check_components(config, add)


def guided_scales(config: Arguments) -> dict[Path, float]:
    """The fields that ask for guidance, with their values."""
    scales: dict[Path, float] = {
        ("train", name): getattr(config.training_args, name, None) or 1.0 for name in _GUIDANCE_FIELDS
    }
    scales["eval", "guidance_scale"] = config.eval_args.guidance_scale
    for index, spec in config.data_args.evaluations().items():
        scales["data", "datasets", index, "eval", "guidance_scale"] = spec.guidance_scale or 1.0
    return {path: scale for path, scale in scales.items() if scale > 1}


def unguided(section: type) -> dict[str, float]:
    """What turns guidance off where a section's defaults ask for it: field name to 1."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(section) if entry.init}
    scales = {name: defaults.get(name) for name in _GUIDANCE_FIELDS}
    return {name: 1.0 for name, scale in scales.items() if isinstance(scale, float) and scale > 1}


def rows_too_few(trainer: str, training: type[CommonTrainingArguments], spec: ModelSpec) -> str:
    """What to say of a trainer whose forwards have more rows than the model takes."""
    return (
        f"trainer {trainer!r} compares {training.smallest_micro_batch} samples in one forward, but model {spec.key!r} "
        f"takes at most {spec.max_batch}; use another trainer, such as nft or grpo."
    )


def no_stored_media(trainer: str, training: type[CommonTrainingArguments], spec: ModelSpec) -> str | None:
    """What to say of a trainer that learns from stored media, and a model that cannot; None of all others."""
    if spec.no_stored_media is None or getattr(training, "supervision", None) is None:
        return None
    return (
        f"{spec.key!r} cannot be trained on stored media, from which trainer {trainer!r} learns: "
        f"{spec.no_stored_media}. Use another model, or a trainer that generates, such as nft or grpo."
    )


def _check_guidance(config: Arguments, add: Add) -> None:
    """A guidance scale only where the model has guidance."""
    if config.spec.guidance != "none":
        return
    for path, scale in guided_scales(config).items():
        add(path, f"is {scale}, but model {config.spec.key!r} has no guidance; use 1.")


def _check_limits(config: Arguments, add: Add) -> None:
    """Rows of a forward, and the fewest steps, that the model has."""
    args, spec = config.training_args, config.spec
    if spec.max_batch is not None:
        sections = {"train": args.per_device_batch_size}
        if config.eval_args.eval_freq:
            sections["eval"] = config.eval_args.per_device_batch_size
        for section, batch in sections.items():
            if batch > spec.max_batch:
                add(
                    (section, "per_device_batch_size"),
                    f"is {batch}, but a forward of model {spec.key!r} takes at most {spec.max_batch} "
                    f"{'row' if spec.max_batch == 1 else 'rows'}; use {spec.max_batch}.",
                )
        if spec.max_batch < args.smallest_micro_batch:
            add(("train", "trainer_type"), rows_too_few(config.trainer_key, type(args), spec))
    name = "num_inference_steps"
    steps: dict[Path, tuple[int | None, Any]] = {("train", name): (getattr(args, name, None), config.train_generation)}
    if config.eval_args.eval_freq:
        steps["eval", name] = (config.eval_args.num_inference_steps, config.eval_generation)
        for index, own in config.data_args.evaluations().items():
            steps["data", "datasets", index, "eval", name] = (own.num_inference_steps, config.eval_generation)
    for path, (number, fields) in steps.items():
        if number is not None and spec.rollout_steps(number, fields) < 1:
            add(
                path,
                f"is {number}, of which model {spec.key!r} takes {spec.taken(fields)}: none; use at least "
                f"{spec.fewest_steps(1, fields)}.",
            )


def _check_components(config: Arguments, add: Add) -> None:
    """Only components that the model can train."""
    spec = config.spec
    for name in config.model_args.components:
        if name not in spec.trainable_components:
            close = nearest(name, spec.trainable_components)
            hint = f" Did you mean {close!r}?" if close else ""
            known = ", ".join(map(repr, spec.trainable_components))
            add(("model", "target_components"), f"{name!r} of {spec.key!r} cannot be trained; use {known}.{hint}")
