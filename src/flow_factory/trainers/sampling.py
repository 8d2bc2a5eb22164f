"""Pictures and videos of chosen prompts, with the base model's weights, the trained ones, or both from the same noise.

They are made one at a time. Matrix products round differently for other batch sizes, so a batch of one is what
`pipeline(prompt, generator=torch.Generator().manual_seed(torch_seed))` of plain diffusers gives bit for bit in float32.
Prompts of an evaluation set have the noise that evaluations in training give them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_factory.data_utils.conditions import PromptBatch
from flow_factory.data_utils.media_files import load_media
from flow_factory.data_utils.prompt_choice import PromptChoice
from flow_factory.data_utils.prompt_dataset import PromptRecord, group_id_of
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.components import pipeline_modules
from flow_factory.samples import (
    BaseSample,
    ConditionInputs,
    ImageSample,
    NoiseKey,
    Purpose,
    VideoSample,
    derive_seed,
)
from flow_factory.tracking.grids import png_bytes
from flow_factory.tracking.previews import Preview, preview_of, save_previews, sound_of
from flow_factory.trainers import setup
from flow_factory.trainers.inference import InferenceModel, Variant
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch

RECORD = "samples.json"
GRID = "grid.png"
_SUFFIXES = frozenset({"mp4", "wav"})
_MAX_GRID = 64  # pictures on the sheet; single files are written for all
_MAX_STRIPS = 16  # videos on the sheet, each a row


@dataclass(frozen=True)
class MadeSample:
    """A picture or a video with what is needed to make it again.

    Attributes:
        choice: Prompt, row and member.
        variant: "base" or "trained".
        preview: What is seen of it, and its files; the frames themselves are not kept.
        facts: Of a video, `fps` and `frames`; with sound, `sample_rate`.
        latents: Final latents, float32 [C, h, w] or [C, f, h, w] (of the first component).
        torch_seed: Seed of the initial noise for `torch.Generator().manual_seed`.
        call: Arguments of the pipeline's `__call__`: prompts, size, steps, guidance and the model's own.
        precision: What else the bits depend on; see `_precision`.
        setup: Python statements that come before the call.
    """

    choice: PromptChoice
    variant: Variant
    preview: Preview
    facts: dict[str, float | int]
    latents: Tensor
    torch_seed: int
    call: dict[str, Any]
    precision: dict[str, Any]
    setup: tuple[str, ...] = ()


def check_makes_pictures(config: Arguments) -> None:
    """Checks, before the model is loaded, that its output is a picture.

    Raises:
        InputError: If it is something else.
    """
    from flow_factory.models.registry import get_adapter_class

    sample_class = get_adapter_class(config.model_args.model_type).sample_class
    if not issubclass(sample_class, ImageSample):
        raise InputError(
            f"model.model_type {config.model_args.model_type!r} makes a {sample_class.__name__}, which is no picture; "
            f"only pairs of pictures are made."
        )


def make_samples(
    model: InferenceModel,
    config: Arguments,
    choices: Sequence[PromptChoice],
    variants: Sequence[Variant],
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[Variant, list[MadeSample]]:
    """Makes a picture or a video of each choice with each variant of the weights.

    Args:
        model: The model.
        config: `eval:` says how they are made.
        choices: What to make.
        variants: Whose weights to use; all see the same noise.
        seed: Seed of the noise, with row and member.
        advance: Called with 1 after each.

    Returns:
        Variant to what was made, in the order of `choices`.

    Raises:
        InputError: If a video is made and cannot be written (see `players.require_video_encoder`).
    """
    plans: dict[str | None, RolloutPlan] = {}
    made: dict[Variant, list[MadeSample]] = {}
    for variant in variants:
        made[variant] = []
        with torch.no_grad(), model.use(variant):
            for choice in choices:
                if choice.source not in plans:
                    plans[choice.source] = setup.build_eval_plan(config, model.adapter, choice.source)
                made[variant].append(_make(model, config, choice, variant, plans[choice.source], seed))
                advance(1)
    return made


def _make(
    model: InferenceModel, config: Arguments, choice: PromptChoice, variant: Variant, plan: RolloutPlan, seed: int
) -> MadeSample:
    adapter = model.adapter
    inputs = ConditionInputs(choice.prompt, (plan.height, plan.width), choice.negative_prompt, load_media(choice.media))
    condition = adapter.encode_inputs([inputs], plan.guidance.needs_negative(), config.eval_generation)
    source = choice.source or "prompts"
    record = PromptRecord(
        prompt=choice.prompt,
        source=source,
        source_id=0,
        index=choice.index,
        group_id=group_id_of(source, choice.prompt, choice.negative_prompt, choice.media),
        negative_prompt=choice.negative_prompt,
        media=choice.media,
    )
    key = NoiseKey(seed, 0, choice.index, choice.member)
    samples: list[BaseSample] = rollout_batch(
        adapter,
        PromptBatch((record,), (choice.member,), condition, (inputs,)),
        plan,
        [key],
        compute_log_prob=False,
        trajectory_indices=(-1,),
        solver=config.eval_args.solver,
    )
    sample = samples[0]
    preview = preview_of(sample, _SUFFIXES)
    if preview is None:
        raise InputError(
            f"{config.model_args.model_type} makes a {type(sample).__name__}, of which nothing can be seen."
        )
    final = next(iter(sample.trajectory.states.values()))
    latents = next(tensor for _, tensor in final.items())
    torch_seed = derive_seed(key.seed, Purpose.INITIAL, cycle=key.cycle, group_id=key.group_id, member=key.member)
    scale = setup.eval_guidance_scale(config, choice.source)
    call = _pipeline_call(config, adapter, choice, plan, scale)
    return MadeSample(
        choice,
        variant,
        preview,
        _facts(sample),
        latents.float().cpu(),
        torch_seed,
        call,
        _precision(config, adapter),
        adapter.call_setup(scale, config.eval_generation, (plan.height, plan.width)),
    )


def _facts(sample: BaseSample) -> dict[str, float | int]:
    if not isinstance(sample, VideoSample) or sample.video is None or sample.fps is None:
        return {}
    sound = sound_of(sample)
    timing: dict[str, float | int] = {"fps": sample.fps, "frames": len(sample.video)}
    return timing if sound is None else {**timing, "sample_rate": sound.sample_rate}


def _pipeline_call(
    config: Arguments, adapter: BaseAdapter[Any], choice: PromptChoice, plan: RolloutPlan, scale: float
) -> dict[str, Any]:
    call = {
        "prompt": choice.prompt,
        **adapter.size_arguments(plan.height, plan.width),
        "num_inference_steps": plan.num_inference_steps,
        **adapter.call_arguments(scale, config.eval_generation),
    }
    if choice.negative_prompt is not None and plan.guidance.needs_negative():
        call["negative_prompt"] = choice.negative_prompt
    return call


def _precision(config: Arguments, adapter: BaseAdapter[Any]) -> dict[str, Any]:
    """Device, `mixed_precision`, the dtype of the trained network's products, and that of each component's weights."""
    modules = pipeline_modules(adapter.pipeline)
    return {
        "device": adapter.device.type,
        "mixed_precision": config.mixed_precision,
        "compute_dtype": _name(adapter.compute_dtype),
        "weight_dtypes": {name: _name(next(module.parameters()).dtype) for name, module in modules.items()},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_samples(folder: Path, made: dict[Variant, list[MadeSample]], facts: dict[str, Any]) -> None:
    """Writes a PNG of each picture, or an MP4 of each video and a WAV of its sound, a labelled sheet of all, and
    `samples.json`, which says how to make them again.

    Args:
        folder: An existing, empty folder.
        made: What `make_samples` returned.
        facts: Further entries of `samples.json`.
    """
    listed = []
    for variant, samples in made.items():
        for number, sample in enumerate(samples):
            suffix = f".{variant}" if len(made) > 1 else ""
            files = _write_files(folder, f"{number:03d}-{_slug(sample.choice.prompt)}{suffix}", sample.preview)
            choice = sample.choice
            listed.append(
                {
                    **files,
                    **sample.facts,
                    "prompt": choice.prompt,
                    "negative_prompt": choice.negative_prompt,
                    **({"given": _given(choice)} if choice.media else {}),
                    "dataset": choice.source,
                    "row": choice.index,
                    "member": choice.member,
                    "weights": variant,
                    "torch_seed": sample.torch_seed,
                    **({"setup": list(sample.setup)} if sample.setup else {}),
                    "call": sample.call,
                    "precision": sample.precision,
                }
            )
    first = next(iter(made.values()))
    limit = _MAX_STRIPS if any(sample.preview.is_strip for sample in first) else _MAX_GRID
    rows = [
        (variant if len(made) > 1 else "", [sample.preview for sample in samples[:limit]])
        for variant, samples in made.items()
    ]
    save_previews(rows, [sample.choice.prompt for sample in first[:limit]], folder / GRID)
    record = {"format": "flow-factory samples", "format_version": 3, **facts, "samples": listed}
    (folder / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_files(folder: Path, stem: str, preview: Preview) -> dict[str, str]:
    """Writes what was made; returns the entries of `samples.json` that name the files."""
    files = preview.files or {"png": png_bytes(preview.picture)}
    for suffix, content in files.items():
        (folder / f"{stem}.{suffix}").write_bytes(content)
    names = {"sound" if suffix == "wav" else "file": f"{stem}.{suffix}" for suffix in files}
    return dict(sorted(names.items()))


def _given(choice: PromptChoice) -> dict[str, list[str]]:
    """Slot to the files that the sample was made from."""
    files: dict[str, list[str]] = {}
    for item in choice.media:
        files.setdefault(item.slot, []).append(str(item.path))
    return files


def _slug(prompt: str) -> str:
    """A short name for a file: letters and digits of any script."""
    words = re.findall(r"\w+", prompt.lower())
    return "-".join(words)[:40].strip("-") or "prompt"
