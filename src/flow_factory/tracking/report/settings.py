"""Settings and environments as rows of a table: of one run with what differs from the defaults, of several with what
differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flow_factory.errors import InputError
from flow_factory.tracking.formatting import flatten
from flow_factory.tracking.report.read import RunRecord

# What names a run is different in every run, and says nothing.
_NAMES = ("log.run_name",)
_ABSENT = "not set"


@dataclass(frozen=True)
class Setting:
    """A row of the settings of one run.

    Attributes:
        name: Dotted name.
        value: As text.
        given: Whether it was given on the command line.
        changed: Whether it differs from the default; None where the default is not known.
        default: The default, as text.
    """

    name: str
    value: str
    given: bool
    changed: bool | None
    default: str


@dataclass(frozen=True)
class Difference:
    """A row of a comparison.

    Attributes:
        name: Dotted name.
        values: One text per run.
        differs: Whether they are not all the same.
    """

    name: str
    values: tuple[str, ...]
    differs: bool


def settings_of(run: RunRecord) -> dict[str, list[Setting]]:
    """All settings of a run by section; what stands at the top level comes under "launcher"."""
    schema = _schema_of(run)
    sections: dict[str, list[Setting]] = {}
    sectioned = [
        (key if isinstance(value, (dict, list)) and value else "launcher", *item)
        for key, value in run.config.items()
        for item in flatten(value, key).items()
    ]
    for section, name, value in sectioned:
        known, default = _default_of(schema, run.config, name)
        if not known and value in (None, [], {}):
            known, default = True, value  # the schema does not tell defaults that are made anew each time: empty ones
        changed = None if schema is None else not known or not _same(value, default)
        if name.startswith("eval.") and _same(value, run.setting(f"train.{name[5:]}", _ABSENT)):
            changed = False  # eval takes some fields from train where they are not given
        sections.setdefault(section, []).append(
            Setting(name, as_text(value), _is_given(run, name), changed, as_text(default) if known else _ABSENT)
        )
    return sections


def compare_settings(runs: Sequence[RunRecord]) -> list[Difference]:
    """The settings in which runs differ."""
    rows = _compare([flatten(_by_name(run.config)) for run in runs])
    return [row for row in rows if row.differs and row.name not in _NAMES]


def compare_environments(runs: Sequence[RunRecord]) -> list[Difference]:
    """Everything that is known of what the runs ran on."""
    return _compare([flatten(run.environment) for run in runs])


def makes_videos(run: RunRecord) -> bool:
    """Whether a run's model makes videos; False if the model is not ours to know."""
    from flow_factory.contracts import Modality
    from flow_factory.hparams.models.registry import get_model_spec

    try:
        return Modality.VIDEO in get_model_spec(str(run.setting("model.model_type"))).io.outputs
    except InputError:
        return False


def made_by(runs: Sequence[RunRecord]) -> str:
    """What runs make: "images", "videos", or "samples" where some make one and some the other."""
    kinds = {makes_videos(run) for run in runs}
    return "samples" if len(kinds) > 1 else "videos" if kinds == {True} else "images"


def as_text(value: Any) -> str:
    """A value as YAML would write it on a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def _compare(flats: Sequence[Mapping[str, Any]]) -> list[Difference]:
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    missing = object()
    rows = []
    for name in names:
        found = [flat.get(name, missing) for flat in flats]
        texts = tuple(_ABSENT if value is missing else as_text(value) for value in found)
        rows.append(Difference(name, texts, len(set(texts)) > 1))
    return rows


def _by_name(value: Any) -> Any:
    """Lists of named entries as mappings: a reward is compared with the one of its name, wherever it stands."""
    if isinstance(value, Mapping):
        return {key: _by_name(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        return {str(item["name"]): _by_name({k: v for k, v in item.items() if k != "name"}) for item in value}
    return value


def _is_given(run: RunRecord, name: str) -> bool:
    given = run.overridden or frozenset()
    return any(name == path or name.startswith((f"{path}.", f"{path}[")) for path in given)


def _same(value: Any, default: Any) -> bool:
    return as_text(value) == as_text(default)


# ------------------------------------------------------------------------------------------------------- defaults
def _schema_of(run: RunRecord) -> dict[str, Any] | None:
    """The schema of the run's trainer and model, or None if they are not ours to know."""
    from flow_factory.hparams.schema import config_schema

    trainer, model = run.setting("train.trainer_type"), run.setting("model.model_type")
    if not isinstance(trainer, str) or not isinstance(model, str):
        return None
    try:
        return config_schema(trainer, model)
    except InputError:
        return None  # a trainer or a model from outside the package


def _default_of(schema: dict[str, Any] | None, config: Any, name: str) -> tuple[bool, Any]:
    """Whether the default of a dotted name is known, and what it is."""
    if schema is None:
        return False, None
    node: dict[str, Any] | None = schema
    for part in name.replace("[", ".[").split("."):
        node = _child(schema, node, part)
        if node is None:
            return False, None
    return ("default" in node, node.get("default"))


def _child(schema: dict[str, Any], node: dict[str, Any], part: str) -> dict[str, Any] | None:
    for alternative in (node, *node.get("anyOf", ())):
        if "$ref" in alternative:
            alternative = schema["$defs"].get(alternative["$ref"].rpartition("/")[2], {})
        found = alternative.get("items") if part.startswith("[") else alternative.get("properties", {}).get(part)
        if isinstance(found, dict):
            return found if "$ref" not in found else {**schema["$defs"][found["$ref"].rpartition("/")[2]], **found}
    return None
