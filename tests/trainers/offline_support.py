"""Small datasets of stored examples, and runs on them: a random SD3 pipeline, seconds on a CPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flow_factory.hparams import Arguments, load_config_from_mapping
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.build import build_trainer

KINDS = {"sft": "demonstration", "offline-dpo": "preference"}
PROMPTS = ("a red circle", "two blue squares", "a green star", "the number 7", "a cross", "three dots", "a line", "sky")


def picture(path: Path, seed: int, size: tuple[int, int] = (32, 32)) -> str:
    """Writes a smooth random picture of (height, width) and returns its name."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC).save(path)
    return path.name


def record(kind: str, prompt: str, *names: str) -> dict[str, Any]:
    """A record of the schema whose arms are the named pictures."""
    arms = {"demonstration": ("target",), "preference": ("chosen", "rejected")}[kind]
    media = {arm: {"media": [{"type": "image", "path": name}]} for arm, name in zip(arms, names, strict=True)}
    return {"schema_version": 2, "input": {"prompt": prompt}, "supervision": {"type": kind, **media}}


def write_records(folder: Path, records: Sequence[Any], split: str = "train") -> Path:
    """Writes `<split>.jsonl`; a text is written as it is."""
    path = folder / f"{split}.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def make_dataset(
    folder: Path, kind: str = "demonstration", count: int = 8, sizes: Sequence[tuple[int, int]] = ((32, 32),)
) -> Path:
    """A dataset of `count` examples whose pictures have the given sizes in turn, and a test split of prompts."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    arms = 1 if kind == "demonstration" else 2
    records = []
    for number in range(count):
        size = sizes[number % len(sizes)]
        names = [picture(images / f"{number}-{arm}.png", 100 * arm + number, size) for arm in range(arms)]
        records.append(record(kind, PROMPTS[number % len(PROMPTS)], *names))
    write_records(folder, records)
    (folder / "test.txt").write_text("\n".join(PROMPTS[:3]) + "\n")
    return folder


def offline_mapping(pipeline: Path, folder: Path, data: Path, trainer: str = "sft") -> dict[str, Any]:
    """A run over `data` in batches of two, two batches per optimizer step."""
    return {
        "num_processes": 1,
        "mixed_precision": "no",
        "data": {"cache_dir": str(folder / "cache"), "dataset_dir": str(data)},
        "model": {
            "model_type": "sd3-5",
            "model_name_or_path": str(pipeline),
            "finetune_type": "lora",
            "lora_rank": 2,
            "lora_alpha": 4,
        },
        "train": {
            "trainer_type": trainer,
            "max_epochs": 2,
            "resolution": 32,
            "max_sequence_length": 8,
            "per_device_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "ema_decay": 0.9,
            "ema_update_interval": 1,
            "seed": 7,
        },
        "eval": {"eval_freq": 0, "resolution": 32, "num_inference_steps": 2, "max_sequence_length": 8, "seed": 3},
        "log": {"save_dir": str(folder / "save"), "run_name": "run", "logging_backend": "none", "save_freq": 0},
    }


def offline_config(
    pipeline: Path, folder: Path, data: Path, trainer: str = "sft", changes: dict[str, Any] | None = None
) -> Arguments:
    """The run with dotted changes, for example `{"train.max_epochs": 1}`."""
    mapping = copy.deepcopy(offline_mapping(pipeline, folder, data, trainer))
    for path, value in (changes or {}).items():
        node = mapping
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return load_config_from_mapping(mapping, origin="the test")


def offline_trainer(
    pipeline: Path, folder: Path, data: Path, trainer: str = "sft", changes: dict[str, Any] | None = None
) -> BaseTrainer:
    """A trainer of `offline_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    return build_trainer(offline_config(pipeline, folder, data, trainer, changes))


def trainer_for(pipeline: Path, folder: Path, key: str = "sft", **changes: Any) -> BaseTrainer:
    """A trainer over eight examples in `folder/data`; keyword `train__seed` is `train.seed`."""
    data = folder / "data"
    if not data.exists():
        make_dataset(data, KINDS[key])
    return offline_trainer(pipeline, folder, data, key, {k.replace("__", "."): v for k, v in changes.items()})
