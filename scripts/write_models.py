"""Writes the tables of guidance/models.md from the models' specs, the examples and the parity suite's lists.

python scripts/write_models.py            # rewrites the part below the marker
python scripts/write_models.py --check    # exit code 1 if the file is not up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flow_factory.hparams import ModelSpec, get_model_spec, load_config, model_keys
from write_configuration import field_rows, write_below_marker

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "guidance" / "models.md"
MARKER = "<!-- The tables below are written by scripts/write_models.py. -->"
GUIDANCE = {
    "cfg": "a second prediction",
    "embedded": "an input of the network",
    "none": "none",
}


def example(spec: ModelSpec) -> Path:
    """The configuration that trains the model with grpo and LoRA."""
    return ROOT / "examples" / "grpo" / "lora" / re.sub(r"[-.]", "_", spec.key) / "default.yaml"


def overview() -> list[str]:
    """One row for each model."""
    columns = ("key", "takes and makes", "sides are multiples of", "guidance_scale", "stored media", "LoRA for ComfyUI")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key in model_keys():
        spec = get_model_spec(key)
        cells = (
            f"[`{key}`](#{anchor(key)})",
            spec.io.describe().replace("->", "→"),
            str(spec.size_multiple(None)),
            GUIDANCE[spec.guidance_kind(None)],
            "yes" if spec.no_stored_media is None else "no",
            "yes" if list((ROOT / "tests" / "parity" / "lora_keys").glob(f"{key}*.comfyui.txt")) else "no",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, ""]


def anchor(key: str) -> str:
    """How Markdown readers call the heading of a key."""
    return re.sub(r"[^\w-]", "", key.lower())


def section(spec: ModelSpec) -> list[str]:
    """What is peculiar to a model, and its own fields."""
    path = example(spec)
    config = load_config(path)
    need = re.search(r"a process needs (\d+ GB)", path.read_text())
    facts = [
        f"`{spec.pipeline_class}`; for example `{config.model_args.model_name_or_path}`, in "
        f"[{path.relative_to(ROOT / 'examples')}](../{path.relative_to(ROOT)})"
        + (f" (by estimate {need[1]} a process)." if need else "."),
        f"`target_components` can name {' and '.join(f'`{name}`' for name in spec.trainable_components)}. "
        f"Transitions: {', '.join(spec.dynamics)}.",
    ]
    if spec.max_batch is not None:
        facts.append(f"At most {spec.max_batch} row in a forward.")
    if spec.uncounted_steps:
        facts.append("`num_inference_steps` counts the end of the grid.")
    if spec.no_stored_media is not None:
        facts.append(f"No training on stored media: {spec.no_stored_media}.")
    rows = field_rows(spec.generation_arguments)
    fields = ["| field | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    return [f"### {spec.key}", "", *facts, "", *fields]


def tables() -> str:
    """The generated part."""
    parts = [MARKER, "", "## All", "", *overview(), "## Each, with its own fields of `train:` and `eval:`", ""]
    for key in model_keys():
        parts += section(get_model_spec(key))
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(write_below_marker(TARGET, MARKER, tables()))
