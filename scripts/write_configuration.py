"""Writes the field tables of guidance/configuration.md from the dataclasses, so that they cannot drift.

python scripts/write_configuration.py            # rewrites the part below the marker
python scripts/write_configuration.py --check    # exit code 1 if the file is not up to date
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from flow_factory import hparams
from flow_factory.hparams.arguments import LauncherArguments

TARGET = Path(__file__).resolve().parents[1] / "guidance" / "configuration.md"
MARKER = "<!-- The tables below are written by scripts/write_configuration.py. -->"

TABLES: list[tuple[str, str, type]] = [
    ("Top level", "", LauncherArguments),
    ("model", "`model:`", hparams.ModelArguments),
    ("data", "`data:`", hparams.DataArguments),
    ("data.datasets[]", "One dataset.", hparams.DatasetArguments),
    ("data.datasets[].train", "", hparams.DatasetTrainSpec),
    ("data.datasets[].eval", "Values of `eval:` that this dataset overrides.", hparams.DatasetEvalSpec),
    ("scheduler", "`scheduler:`", hparams.SchedulerArguments),
    ("train", "Of every trainer that learns from what it generates.", hparams.TrainingArguments),
    ("eval", "`eval:`", hparams.EvaluationArguments),
    ("rewards[] and eval_rewards[]", "", hparams.RewardArguments),
    ("optimizers[]", "One entry per trainable role; without the section, the short form in `train:`.",
     hparams.OptimizerArguments),
    ("log", "`log:`", hparams.LogArguments),
]  # fmt: skip
OWN_FIELDS = "Beside the fields of `train` above."
OFFLINE_FIELDS = "Beside those fields of `train` above that do not concern rollouts."


def shown(field: dataclasses.Field) -> str:  # type: ignore[type-arg]
    """A field's default as one writes it in YAML."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"
    value = field.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


def table(title: str, note: str, cls: type, base: type | None = None) -> list[str]:
    """Heading and rows of a dataclass's fields, without those that `base` has with the same default and meaning."""
    parts = [f"### {title}", ""]
    if note and not note.startswith("`"):
        parts += [note, ""]
    return [*parts, "| field | default | meaning |", "|---|---|---|", *field_rows(cls, base), ""]


def field_rows(cls: type, base: type | None = None) -> list[str]:
    """Rows of a dataclass's fields, without those that `base` has with the same default and meaning."""
    inherited = dataclasses.fields(base) if base is not None else ()
    known = {field.name: (shown(field), field.metadata.get("help")) for field in inherited}
    rows = []
    for field in dataclasses.fields(cls):
        if field.init and "help" in field.metadata and known.get(field.name) != (shown(field), field.metadata["help"]):
            meaning = " ".join(str(field.metadata["help"]).split()).replace("|", "\\|")
            rows.append(f"| `{field.name}` | {shown(field)} | {meaning} |")
    return rows


def trainer_tables() -> list[str]:
    """What each trainer of the package has beyond its base."""
    parts: list[str] = []
    for key in hparams.training_args_keys():
        cls = hparams.get_training_args_class(key)
        if cls.__module__.startswith("flow_factory."):
            generates = issubclass(cls, hparams.TrainingArguments)
            base = hparams.TrainingArguments if generates else hparams.CommonTrainingArguments
            note = OWN_FIELDS if generates else OFFLINE_FIELDS
            parts += table(f"train, with trainer_type {key}", note, cls, base)
    return parts


def tables() -> str:
    """The generated part."""
    parts = [MARKER, ""]
    for title, note, cls in TABLES:
        parts += table(title, note, cls)
        if title == "train":
            parts += trainer_tables()
    return "\n".join(parts).rstrip() + "\n"


def write_below_marker(target: Path, marker: str, text: str) -> int:
    """Puts `text`, which begins with the marker, in the place of what follows it in a file.

    Returns:
        The exit code: 1 if the command line says `--check` and the file is not up to date.
    """
    parser = argparse.ArgumentParser(description=f"Writes the tables of {target.name}.")
    parser.add_argument("--check", action="store_true", help="only say, by the exit code, whether it is up to date")
    check = parser.parse_args().check
    present = target.read_text()
    head, found, _ = present.partition(marker)
    if not found:
        sys.exit(f"{target.name} has no line {marker!r}")
    if check:
        return 0 if present == head + text else 1
    target.write_text(head + text)
    return 0


if __name__ == "__main__":
    sys.exit(write_below_marker(TARGET, MARKER, tables()))
