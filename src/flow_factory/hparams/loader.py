"""From a YAML file and overrides to a validated `Arguments`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from flow_factory.errors import InputError
from flow_factory.hparams.arguments import SECTIONS, Arguments, LauncherArguments
from flow_factory.hparams.cross_checks import cross_check
from flow_factory.hparams.data_args import DataArguments
from flow_factory.hparams.errors import ConfigError, Problem, nearest
from flow_factory.hparams.model_args import ModelArguments
from flow_factory.hparams.model_checks import unguided
from flow_factory.hparams.models import ModelSpec, get_model_spec, model_keys
from flow_factory.hparams.models.registry import check_field_clash
from flow_factory.hparams.optimizer_args import AccelerationArguments, OptimizerArguments
from flow_factory.hparams.plugins import import_plugins, locate_plugins
from flow_factory.hparams.reward_args import MultiRewardArguments, RewardArguments
from flow_factory.hparams.run_args import INHERITED_BY_EVAL, EvaluationArguments, LogArguments, settle_resolution
from flow_factory.hparams.scheduler_args import SchedulerArguments
from flow_factory.hparams.shaping import field_types
from flow_factory.hparams.training_args import (
    CommonTrainingArguments,
    TrainingArguments,
    get_training_args_class,
    training_args_keys,
)
from flow_factory.hparams.validation import validate_section
from flow_factory.hparams.yaml_source import Origin, Origins, apply_overrides, read_yaml_file


def load_config(path: str | FilePath, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> Arguments:
    """Loads and validates a configuration file.

    Args:
        path: The YAML file.
        overrides: `key=value` strings, applied in order; `train.learning_rate=1e-5`, `rewards[0].weight=0.5`.
        plugins: Modules and files beside those of the file's `plugins:`; files relative to the working directory.

    Raises:
        InputError: If the file cannot be read or is wrong. All field errors come in one go; when there are none, all
            cross-field errors.
    """
    values, origins = read_yaml_file(path)
    apply_overrides(values, origins, overrides)
    locate_plugins(values, FilePath(path).absolute().parent, plugins)
    return build_arguments(_interpolate(values, origins), origins)


def load_config_from_mapping(
    mapping: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "<python>"
) -> Arguments:
    """As `load_config`, from a mapping in the shape of the YAML file.

    Args:
        mapping: Sections and top-level fields.
        overrides: `key=value` strings.
        origin: Shown as the place of values in errors.
    """
    values = copy.deepcopy(dict(mapping))
    origins = Origins(_python_origins(values, origin), default_place=origin)
    apply_overrides(values, origins, overrides)
    locate_plugins(values, FilePath.cwd())
    return build_arguments(_interpolate(values, origins), origins)


def build_arguments(values: Mapping[str, Any], origins: Origins) -> Arguments:
    """Validates resolved values, section by section, then across sections."""
    problems: list[Problem] = []
    top = {key: value for key, value in values.items() if key not in SECTIONS}
    _check_top_level_keys(top, origins, problems)
    launcher = validate_section(
        LauncherArguments, {k: v for k, v in top.items() if k in field_types(LauncherArguments)}, (), origins, problems
    )
    if launcher is not None:
        import_plugins(launcher.plugins)
    builder = _Builder(values, origins, problems)
    config = builder.build(launcher or LauncherArguments())
    if problems or config is None:
        raise ConfigError(problems)
    cross_check(config, builder.given, problems)
    if problems:
        raise ConfigError(problems)
    return config


class _Builder:
    """Validates the sections; `given` remembers which fields of a section were written."""

    def __init__(self, values: Mapping[str, Any], origins: Origins, problems: list[Problem]) -> None:
        self.values, self.origins, self.problems = values, origins, problems
        self.given: dict[str, set[str]] = {}

    def build(self, launcher: LauncherArguments) -> Arguments | None:
        model_values = self._section("model")
        train_values = self._section("train")
        spec = self._spec(model_values)
        training_class = self._training_class(train_values)
        trainer_key = str(train_values.get("trainer_type", _default_key(training_class)))
        if trainer_key.lower() == _default_key(training_class).lower():
            trainer_key = _default_key(training_class)

        data = self._plain("data", DataArguments)
        model = self._validate(ModelArguments, "model", model_values)
        scheduler = self._plain("scheduler", SchedulerArguments)
        log = self._plain("log", LogArguments)
        acceleration = self._plain("acceleration", AccelerationArguments)
        given_eval = self._section("eval")
        if spec is not None and spec.guidance == "none" and training_class is not None:
            train_values = {**unguided(training_class), **train_values}
            if "guidance_scale" not in field_types(training_class):
                given_eval |= {n: v for n, v in unguided(EvaluationArguments).items() if given_eval.get(n) is None}
        train, train_generation = self._train(training_class, spec, train_values)
        eval_values = self._inherit(given_eval, train, train_generation, spec)
        evaluation, eval_generation = self._split("eval", EvaluationArguments, spec, eval_values)
        rewards = self._rewards("rewards")
        eval_rewards = self._rewards("eval_rewards") if self.values.get("eval_rewards") is not None else None
        optimizers = self._list("optimizers", OptimizerArguments)

        if self.problems or spec is None or train is None:
            return None
        return Arguments(
            **{name: getattr(launcher, name) for name in field_types(LauncherArguments)},
            data_args=cast(DataArguments, data),
            model_args=cast(ModelArguments, model),
            scheduler_args=cast(SchedulerArguments, scheduler),
            training_args=cast(TrainingArguments, train),
            eval_args=cast(EvaluationArguments, evaluation),
            log_args=cast(LogArguments, log),
            reward_args=cast(MultiRewardArguments, rewards),
            eval_reward_args=eval_rewards,
            optimizer_args=optimizers,
            acceleration_args=cast(AccelerationArguments, acceleration),
            train_generation=train_generation,
            eval_generation=eval_generation,
            trainer_key=trainer_key,
            origins=self.origins,
        )

    def _section(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            place = self.origins.place((name,))
            self.problems.append(Problem((name,), f"must be a mapping of fields, not {value!r}.", place))
            value = {}
        self.given[name] = set(value)
        return dict(value)

    def _plain(self, name: str, cls: type) -> Any:
        return self._validate(cls, name, self._section(name))

    def _validate(self, cls: type, name: str, values: Mapping[str, Any], also_known: Sequence[str] = ()) -> Any:
        return validate_section(cls, values, (name,), self.origins, self.problems, also_known)

    def _spec(self, values: Mapping[str, Any]) -> ModelSpec | None:
        key = values.get("model_type")
        if not isinstance(key, str):
            return None  # missing or not text: reported with the section
        try:
            return get_model_spec(key)
        except InputError as error:
            self._unknown_key(("model", "model_type"), key, model_keys(), error)
            return None

    def _training_class(self, values: Mapping[str, Any]) -> type[CommonTrainingArguments] | None:
        key = values.get("trainer_type", "grpo")
        if not isinstance(key, str):
            place = self.origins.place(("train", "trainer_type"))
            self.problems.append(Problem(("train", "trainer_type"), f"{key!r} is not text; name a trainer.", place))
            return None
        try:
            return get_training_args_class(key)
        except InputError as error:
            self._unknown_key(("train", "trainer_type"), key, training_args_keys(), error)
            return None

    def _unknown_key(self, path: tuple[str, str], key: str, known: Sequence[str], error: InputError) -> None:
        if "." in key:
            message = str(error)
        else:
            close = nearest(key, known, cutoff=0.4)
            hint = f" Did you mean {close!r}?" if close else ""
            message = f"{key!r} is not one of {', '.join(map(repr, known))}, nor a dotted path.{hint}"
        self.problems.append(Problem(path, message, self.origins.place(path)))

    def _train(
        self, cls: type[CommonTrainingArguments] | None, spec: ModelSpec | None, values: dict[str, Any]
    ) -> tuple[CommonTrainingArguments | None, Any]:
        if cls is None:
            return None, None
        if spec is not None:
            check_field_clash(spec, cls)
        own = _default_key(cls)
        if own and "trainer_type" in values:
            # The key is written in any case, or as the path of a class: the class knows its own name.
            written = str(values["trainer_type"])
            if written.lower() == own.lower() or "." in written:
                values = {**values, "trainer_type": own}
        train, generation = self._split("train", cls, spec, values)
        if train is not None and train.height is None:  # a __post_init__ that did not call its parent's
            settle_resolution(train)
        return train, generation

    def _split(self, name: str, cls: type, spec: ModelSpec | None, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """Splits a section between its own class and the model's fields."""
        if spec is None:
            # Model-specific names cannot be told from typos until the model is known, so judge known names only.
            known = {key: value for key, value in values.items() if key in field_types(cls)}
            return self._validate(cls, name, known), None
        model_fields = spec.generation_fields()
        own = {key: value for key, value in values.items() if key not in model_fields}
        rest = {key: value for key, value in values.items() if key in model_fields}
        arguments = self._validate(cls, name, own, model_fields)
        generation = self._validate(spec.generation_arguments, name, rest)
        return arguments, generation

    def _inherit(self, values: dict[str, Any], train: Any, generation: Any, spec: ModelSpec | None) -> dict[str, Any]:
        """Fields of `eval:` that are not given take train's value; so does null where it has no meaning of its own."""
        filled = dict(values)
        for field in INHERITED_BY_EVAL:
            if filled.get(field) is None and hasattr(train, field):
                filled[field] = getattr(train, field)
            elif filled.get(field, field) is None:
                del filled[field]  # a trainer that rolls nothing out has no such field: eval's own default holds
        if spec is None or generation is None:
            return filled
        kinds = get_type_hints(spec.generation_arguments)
        for field in spec.generation_fields():
            means_itself = field in filled and type(None) in get_args(kinds[field])
            if filled.get(field) is None and not means_itself:
                filled[field] = getattr(generation, field)
        return filled

    def _rewards(self, name: str) -> MultiRewardArguments | None:
        rewards = self._list(name, RewardArguments)
        names = [reward.name for reward in rewards]
        for index, reward in enumerate(rewards):
            if reward.name in names[:index]:
                path = (name, index, "name")
                message = (
                    f"{reward.name!r} is also the name of {name}[{names.index(reward.name)}]; give each its own name."
                )
                self.problems.append(Problem(path, message, self.origins.nearest_place(path)))
                return None
        return MultiRewardArguments(rewards)

    def _list(self, name: str, cls: type) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        entries = [value] if isinstance(value, Mapping) else value
        if not isinstance(entries, list):
            place = self.origins.place((name,))
            self.problems.append(Problem((name,), f"must be a list of mappings, not {value!r}.", place))
            return []
        built = []
        for index, entry in enumerate(entries):
            path = (name, index)
            if not isinstance(entry, Mapping):
                place = self.origins.nearest_place(path)
                self.problems.append(Problem(path, f"must be a mapping of fields, not {entry!r}.", place))
                continue
            built.append(validate_section(cls, entry, path, self.origins, self.problems))
        return [item for item in built if item is not None]


def _default_key(cls: type | None) -> str:
    """The one key an arguments class accepts as trainer_type, or "" if any text is accepted."""
    if cls is None:
        return ""
    annotation = field_types(cls).get("trainer_type")
    if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
        return str(get_args(annotation)[0])
    return ""


def _check_top_level_keys(top: Mapping[str, Any], origins: Origins, problems: list[Problem]) -> None:
    known = [*field_types(LauncherArguments), *SECTIONS]
    for key in top:
        if key in field_types(LauncherArguments):
            continue
        homes = [section for section in SECTIONS if key in _fields_of_section(section)]
        close = nearest(key, known)
        if homes:
            hint = f"it belongs into {' or '.join(f'{home}:' for home in homes)}"
        elif close:
            hint = f"did you mean {close}?"
        else:
            hint = f"known here: {', '.join(known)}."
        problems.append(Problem((key,), f"unknown key; {hint}", origins.nearest_place((key,))))


def _fields_of_section(section: str) -> Sequence[str]:
    classes: dict[str, type] = {
        "data": DataArguments,
        "model": ModelArguments,
        "scheduler": SchedulerArguments,
        "train": get_training_args_class("grpo"),
        "eval": EvaluationArguments,
        "log": LogArguments,
    }
    return list(field_types(classes[section])) if section in classes else []


def _interpolate(values: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """Resolves `${...}` with OmegaConf; skipped where nothing is to be resolved, as its import takes time."""
    if not _has_interpolation(values):
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        path = _omegaconf_path(getattr(error, "full_key", None) or "")
        first_line = str(error).splitlines()[0]
        raise ConfigError([Problem(path, f"{first_line}.", origins.nearest_place(path))]) from error
    return cast(dict[str, Any], resolved)


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_interpolation(item) for item in value)


def _omegaconf_path(key: str) -> tuple[str | int, ...]:
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts if part)


def _python_origins(value: Any, origin: str, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Origin]:
    entries = {path: Origin(origin)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            entries.update(_python_origins(item, origin, (*path, key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            entries.update(_python_origins(item, origin, (*path, index)))
    return entries
