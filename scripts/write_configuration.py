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
from flow_factory.hparams.models import get_model_spec

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
    ("train and eval, with model_type sd3-5", "", get_model_spec("sd3-5").generation_arguments),
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
    parts += ["| field | default | meaning |", "|---|---|---|"]
    inherited = dataclasses.fields(base) if base is not None else ()
    known = {field.name: (shown(field), field.metadata.get("help")) for field in inherited}
    for field in dataclasses.fields(cls):
        if field.init and "help" in field.metadata and known.get(field.name) != (shown(field), field.metadata["help"]):
            meaning = " ".join(str(field.metadata["help"]).split()).replace("|", "\\|")
            parts.append(f"| `{field.name}` | {shown(field)} | {meaning} |")
    return [*parts, ""]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    head, marker, _ = TARGET.read_text().partition(MARKER)
    if not marker:
        sys.exit(f"{TARGET.name} has no line {MARKER!r}")
    wanted = head + tables()
    if check:
        return 0 if TARGET.read_text() == wanted else 1
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
