"""What can be known of a checkpoint folder without loading it: that it exists, is of the right kind, and fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from flow_factory.errors import InputError
from flow_factory.hparams.arguments import Arguments
from flow_factory.hparams.builtin import resolve_builtin
from flow_factory.hparams.errors import FieldError, Problem, show_path
from flow_factory.hparams.errors import Path as ConfigPath
from flow_factory.hparams.model_checks import guided_scales
from flow_factory.hparams.models import ModelSpec, get_model_spec, model_keys
from flow_factory.hparams.models.folder import component_config

_NAME = ("model", "model_name_or_path")


@dataclass
class LocalModel:
    """Findings about the configured checkpoint.

    Attributes:
        folder: Its local folder, or None if it is a Hub id.
        problems: What makes the run impossible.
        warnings: What makes the run doubtful.
    """

    folder: Path | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_local_model(config: Arguments) -> LocalModel:
    """Checks `model.model_name_or_path` as far as it is local, and the sizes that the model can make."""
    found = LocalModel()
    spec = config.spec
    try:
        found.folder = local_folder(config.model_args.model_name_or_path)
        if found.folder is not None:
            check_pipeline_folder(found.folder, spec)
            found.warnings += _foreign_components(found.folder, spec)
        with _facts_of(found.folder, spec):
            _check_facts(found, config)
    except InputError as error:
        found.problems.append(Problem(_NAME, str(error), config.origins.place(_NAME)))
    return found


def _check_facts(found: LocalModel, config: Arguments) -> None:
    """What the configuration asks for, against what the checkpoint's own configurations say."""
    spec = config.spec
    if callable(spec.guidance) and spec.guidance_kind(found.folder) == "none":
        for path, scale in guided_scales(config).items():
            if path[0] == "train" or config.eval_args.eval_freq:
                message = f"is {scale}, but {found.folder} is a {spec.key} without guidance; use 1."
                found.problems.append(Problem(path, message, config.origins.place(path)))
    sizes: dict[ConfigPath, tuple[int, int] | None] = {("train", "resolution"): config.training_args.resolution}
    if config.eval_args.eval_freq:
        sizes["eval", "resolution"] = config.eval_args.resolution
        for index, own in config.data_args.evaluations().items():
            sizes["data", "datasets", index, "eval", "resolution"] = own.resolution
    for path, size in sizes.items():
        if size is None:
            continue
        try:
            spec.check_size(*size, folder=found.folder)
        except FieldError as error:
            found.problems.append(Problem(path, f"{list(size)} {error.message}", config.origins.place(path)))
        floor = spec.floor(found.folder)
        if min(size) < floor:
            found.warnings.append(
                f"{show_path(path)} {list(size)} is below {floor}, the smallest side that {spec.key} draws well."
            )
    found.problems += [*_lacking(config, found.folder), *unfit_fields(config, found.folder)]


def _lacking(config: Arguments, folder: Path | None) -> Iterator[Problem]:
    """Components that are to be trained, and that the checkpoint does not have."""
    if folder is None:
        return
    index = _read_json(folder / config.spec.index_file)
    missing = [name for name in config.model_args.components if not _present(index, name, folder)]
    if missing:
        path = ("model", "target_components")
        yield Problem(path, f"{folder} has no {', '.join(missing)}; take it out.", config.origins.place(path))


def unfit_fields(config: Arguments, folder: Path | None) -> Iterator[Problem]:
    """The model's own fields, and names of components, that do not fit the checkpoint, if it is known (else None)."""
    if folder is not None:
        yield from _unused_dtypes(config, folder)
    check = config.spec.check_fields
    if check is None:
        return
    sections = {"train": config.train_generation}
    if config.eval_args.eval_freq:
        sections["eval"] = config.eval_generation
    for section, fields in sections.items():
        try:
            with _facts_of(folder, config.spec):
                check(fields, folder)
        except FieldError as error:
            path = (section, error.field)
            yield Problem(path, error.message, config.origins.place(path))


def _unused_dtypes(config: Arguments, folder: Path) -> Iterator[Problem]:
    """dtypes of what is no network of the checkpoint, which would have no effect."""
    model = config.model_args
    frozen = model.frozen_parameters_dtype if isinstance(model.frozen_parameters_dtype, dict) else {}
    networks = sorted(file.parent.name for file in folder.glob("*/config.json"))
    for field_name, dtypes in (
        ("frozen_parameters_dtype", frozen),
        ("component_load_dtypes", model.component_load_dtypes),
    ):
        path = ("model", field_name)
        for name in sorted(dtypes.keys() - {"default", *networks}):
            known = ", ".join(networks)
            yield Problem(
                path, f"{name!r} is no network of {folder}; its networks: {known}.", config.origins.place(path)
            )
    path = ("model", "frozen_parameters_dtype")
    for name in model.components if model.finetune_type == "full" else ():
        if name in frozen:
            message = f"{name!r} is trained in full, in trainable_parameters_dtype; take it out."
            yield Problem(path, message, config.origins.place(path))


def local_folder(name: str) -> Path | None:
    """The local folder that a model name stands for; None if it can only be a Hub id.

    Raises:
        InputError: If it is an unknown built-in name, a file, or a path that does not exist.
    """
    path = Path(resolve_builtin(name, "model")).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{name!r} is a file; give the folder that holds model_index.json.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise InputError(
            f"{name!r} does not exist (looked for {path.absolute()}); give a folder, a Hub id such as org/name, or "
            f"builtin/<name>."
        )
    return None


def check_pipeline_folder(folder: Path, spec: ModelSpec) -> None:
    """Checks that a folder holds a pipeline of the spec's class with its required components.

    Raises:
        InputError: Naming the folder, what was found and what is expected.
    """
    index_file = _index_file(folder, spec)
    index = _read_json(index_file)
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise InputError(f"{index_file} has no _class_name, so it is not a diffusers pipeline folder.")
    found = index["_class_name"]
    if found not in (spec.pipeline_class, *spec.other_classes):
        specs = {key: get_model_spec(key) for key in model_keys()}
        fitting = [key for key, other in specs.items() if found in (other.pipeline_class, *other.other_classes)]
        remedy = (
            f"use model_type {' or '.join(fitting)}" if fitting else "no model type loads that class; use another one"
        )
        raise InputError(
            f"{folder} holds a {found}, but model_type {spec.key!r} loads a {spec.pipeline_class}; {remedy}."
        )
    for file in _component_configs(folder):
        if not isinstance(_read_json(file), dict):
            raise InputError(f"{file} holds no JSON object; download the checkpoint again.")
    with _facts_of(folder, spec):
        needed = dict.fromkeys(spec.needed_components(folder))
    if spec.workflow is None:  # a modular pipeline's repository also holds what other workflows use
        needed |= dict.fromkeys(name for name, entry in index.items() if _is_component(entry))
    missing = [name for name in needed if not _present(index, name, folder)]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)}, which model_type {spec.key!r} needs; complete it.")


def _foreign_components(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """Components whose own configuration names another class than the index, which is the one that is loaded."""
    for name, entry in _read_json(folder / spec.index_file).items():
        saved = component_config(folder, name).get("_class_name") if _is_component(entry) else None
        if saved is not None and entry[0] == "diffusers" and saved != entry[1]:
            yield (
                f"{spec.index_file} of {folder} calls {name} a {entry[1]}, and so it is loaded, but its own "
                f"config.json is that of a {saved}."
            )


def _component_configs(folder: Path) -> list[Path]:
    names = ("config.json", "scheduler_config.json", "guider_config.json")
    return sorted(file for name in names for file in folder.glob(f"*/{name}"))


@contextmanager
def _facts_of(folder: Path | None, spec: ModelSpec) -> Iterator[None]:
    """What is done inside asks a spec about a checkpoint: values in its configurations of no use are named."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        if folder is None or isinstance(error, FieldError):
            raise
        raise InputError(
            f"a config.json in {folder} holds a value that {spec.key} cannot have ({error}); download the checkpoint "
            f"again."
        ) from error


def _index_file(folder: Path, spec: ModelSpec) -> Path:
    """The index of the kind that the spec needs, else the other kind's."""
    names = sorted(("model_index.json", "modular_model_index.json"), key=lambda name: name != spec.index_file)
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise InputError(f"{folder} has no {spec.index_file}, so it is not a diffusers pipeline folder.")
    return files[0]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error}); download the checkpoint again.") from error


def _present(index: dict[str, object], name: str, folder: Path) -> bool:
    return _is_component(index.get(name)) and (folder / name).is_dir() and any((folder / name).iterdir())


def _is_component(entry: object) -> TypeGuard[list[Any]]:
    """Whether an entry of the index names the class of a component that is there."""
    return isinstance(entry, list) and len(entry) > 1 and all(isinstance(part, str) for part in entry[:2])
