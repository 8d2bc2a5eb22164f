"""Configurations of one training cycle of a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from flow_factory.hparams import Arguments, load_config_from_mapping
from flow_factory.samples import Audio, MediaItem, Video
from tests.parity.bench import Bench, set_path
from tests.parity.media import clip, save, save_with_sound, tone
from tests.trainers.offline_support import make_dataset, offline_mapping
from tests.trainers.support import base_mapping

CYCLES = ("grpo", "nft", "sft")


def cycle_config(bench: Bench, trainer: str, folder: Path) -> Arguments:
    """One optimizer step: on two prompts of two samples each, or on two stored pictures."""
    case = bench.case
    mapping = _offline(bench, folder) if trainer == "sft" else _online(bench, trainer, folder)
    mapping["model"] |= {"model_type": case.key, "target_components": list(case.components)}
    for section in ("train", "eval"):
        del mapping[section]["max_sequence_length"]  # a field of another model
        mapping[section] |= {"resolution": list(case.size), **case.generation, **case.settings[-1].generation}
    rows = min(2, bench.fresh.spec.max_batch or 2)
    mapping["train"] |= {"max_epochs": 1, "per_device_batch_size": rows, "ema_decay": 0.0}
    if "rewards" in mapping:
        mapping["rewards"] = [{"name": "bright", "reward_model": "brightness"}]
    for path, value in case.train.items():
        set_path(mapping, path, value)
    return load_config_from_mapping(mapping, origin=f"the {trainer} cycle of {case.name}")


def _online(bench: Bench, trainer: str, folder: Path) -> dict[str, Any]:
    mapping = base_mapping(bench.folder, folder)
    _add_media(bench, folder / "data")
    mapping["train"] |= {
        "trainer_type": trainer,
        "num_inference_steps": bench.case.steps,
        "guidance_scale": bench.case.settings[-1].scale,
        "unique_sample_num_per_epoch": 2,
    }
    mapping["scheduler"] = {"dynamics_type": "Flow-SDE", "noise_level": 0.7, "sde_steps": [0, 1], "num_sde_steps": 1}
    if trainer != "grpo":
        mapping["scheduler"] = {"dynamics_type": "ODE"}
    return mapping


def _add_media(bench: Bench, data: Path) -> None:
    """Writes the prompts again as rows that name condition media, for a model that takes any."""
    if not any(bench.case.media):
        return
    for split in ("train", "test"):
        text = data / f"{split}.txt"
        rows = [
            {"prompt": prompt, **save_media(bench, number % len(bench.case.media), data)}
            for number, prompt in enumerate(text.read_text().splitlines())
        ]
        text.unlink()
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_media(bench: Bench, row: int, data: Path) -> dict[str, list[str]]:
    """Writes the media of a row into the folders of a dataset; returns slot to file names."""
    names: dict[str, list[str]] = {}
    for slot, items in bench.case.media[row].items():
        for number, item in enumerate(items):
            names.setdefault(slot, []).append(save(item, data / f"{_kind(item)}s" / f"{row}-{slot}-{number}").name)
    return names


def _kind(item: MediaItem) -> str:
    return "image" if isinstance(item, Tensor) else "video" if isinstance(item, Video) else "audio"


def _offline(bench: Bench, folder: Path) -> dict[str, Any]:
    data = make_dataset(folder / "stored", count=2, sizes=(bench.case.size,))
    if bench.makes_videos:
        _store_videos(bench, data)
    _add_stored_media(bench, data)
    mapping = offline_mapping(bench.folder, folder, data)
    mapping["train"] |= {"gradient_accumulation_steps": 2 // min(2, bench.fresh.spec.max_batch or 2)}
    return mapping


def _store_videos(bench: Bench, data: Path) -> None:
    """Puts videos in the place of the dataset's pictures; with sound, if the model makes any."""
    file = data / "train.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for row, record in enumerate(records):
        name = _store_video(bench, row, data / "videos" / f"target-{row}").name
        record["supervision"]["target"]["media"] = [{"type": "video", "path": name}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def _store_video(bench: Bench, row: int, stem: Path) -> Path:
    spec, frames, size = bench.fresh.spec, bench.case.generation["num_frames"], bench.case.size
    if spec.sound is None:
        return save(clip(row, frames, size), stem)
    sound = spec.sound(bench.fresh.config.train_generation, bench.folder)
    mono = Audio(tone(row, frames / sound.frame_rate, 2 * sound.sample_rate).waveform[:1], 2 * sound.sample_rate)
    return save_with_sound(clip(row, frames, size, sound.frame_rate), mono, stem)


def _add_stored_media(bench: Bench, data: Path) -> None:
    """Adds condition media to the inputs of stored examples, for a model that takes any."""
    file = data / "train.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for row, record in enumerate(records):
        record["input"]["media"] = [
            {"type": _kind(item), "path": name, "slot": slot}
            for slot, names in save_media(bench, row, data).items()
            for item, name in zip(bench.case.media[row][slot], names, strict=True)
        ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
