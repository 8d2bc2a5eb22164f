"""Pictures of chosen prompts, with the base model's weights, the trained ones, or both from the same noise.

Pictures are made one at a time. Matrix products round differently for other batch sizes, so a batch of one is what
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
from flow_factory.samples import BaseSample, ConditionInputs, ImageSample, NoiseKey, Purpose, derive_seed
from flow_factory.tracking.grids import save_comparison, save_grid, to_pil
from flow_factory.trainers import setup
from flow_factory.trainers.inference import InferenceModel, Variant
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch

RECORD = "samples.json"
GRID = "grid.png"
_MAX_GRID = 64  # pictures on the sheet; single files are written for all


@dataclass(frozen=True)
class Picture:
    """A picture with what is needed to make it again.

    Attributes:
        choice: Prompt, row and member.
        variant: "base" or "trained".
        image: uint8 [C, H, W].
        latents: Final latents, float32 [C, h, w] (of the first component).
        torch_seed: Seed of the initial noise for `torch.Generator().manual_seed`.
        call: Arguments of the pipeline's `__call__`: prompts, size, steps, guidance and the model's own.
        precision: What else the bits depend on; see `_precision`.
        setup: Python statements that come before the call.
    """

    choice: PromptChoice
    variant: Variant
    image: Tensor
    latents: Tensor
    torch_seed: int
    call: dict[str, Any]
    precision: dict[str, Any]
    setup: tuple[str, ...] = ()


def check_makes_pictures(config: Arguments) -> None:
    """Checks, before the model is loaded, that its output can be saved as a picture.

    Raises:
        InputError: If it is something else.
    """
    from flow_factory.models.registry import get_adapter_class

    sample_class = get_adapter_class(config.model_args.model_type).sample_class
    if not issubclass(sample_class, ImageSample):
        raise InputError(
            f"model.model_type {config.model_args.model_type!r} makes a {sample_class.__name__}, which is no picture; "
            f"sample writes pictures only."
        )


def make_pictures(
    model: InferenceModel,
    config: Arguments,
    choices: Sequence[PromptChoice],
    variants: Sequence[Variant],
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[Variant, list[Picture]]:
    """Makes the chosen pictures with each variant of the weights.

    Args:
        model: The model.
        config: `eval:` says how pictures are made.
        choices: What to make.
        variants: Whose weights to use; all see the same noise.
        seed: Seed of the noise, with row and member.
        advance: Called with 1 after each picture.

    Returns:
        Variant to pictures, in the order of `choices`.
    """
    plans: dict[str | None, RolloutPlan] = {}
    made: dict[Variant, list[Picture]] = {}
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
) -> Picture:
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
    assert isinstance(sample, ImageSample) and sample.image is not None
    final = next(iter(sample.trajectory.states.values()))
    latents = next(tensor for _, tensor in final.items())
    torch_seed = derive_seed(key.seed, Purpose.INITIAL, cycle=key.cycle, group_id=key.group_id, member=key.member)
    scale = setup.eval_guidance_scale(config, choice.source)
    call = _pipeline_call(config, adapter, choice, plan, scale)
    return Picture(
        choice,
        variant,
        sample.image,
        latents.float().cpu(),
        torch_seed,
        call,
        _precision(config, adapter),
        adapter.call_setup(scale, config.eval_generation, (plan.height, plan.width)),
    )


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


def write_pictures(folder: Path, made: dict[Variant, list[Picture]], facts: dict[str, Any]) -> None:
    """Writes one PNG for each picture, a labelled sheet of all, and `samples.json`, which says how to make them again.

    Args:
        folder: An existing, empty folder.
        made: What `make_pictures` returned.
        facts: Further entries of `samples.json`.
    """
    listed = []
    for variant, pictures in made.items():
        for number, picture in enumerate(pictures):
            suffix = f".{variant}" if len(made) > 1 else ""
            name = f"{number:03d}-{_slug(picture.choice.prompt)}{suffix}.png"
            to_pil(picture.image).save(folder / name)
            choice = picture.choice
            listed.append(
                {
                    "file": name,
                    "prompt": choice.prompt,
                    "negative_prompt": choice.negative_prompt,
                    "dataset": choice.source,
                    "row": choice.index,
                    "member": choice.member,
                    "weights": variant,
                    "torch_seed": picture.torch_seed,
                    **({"setup": list(picture.setup)} if picture.setup else {}),
                    "call": picture.call,
                    "precision": picture.precision,
                }
            )
    first = next(iter(made.values()))[:_MAX_GRID]
    captions = [p.choice.prompt for p in first]
    if len(made) > 1:
        rows = [(variant, [p.image for p in pictures[:_MAX_GRID]]) for variant, pictures in made.items()]
        save_comparison(rows, captions, folder / GRID)
    else:
        save_grid([p.image for p in first], folder / GRID, captions=captions)
    record = {"format": "flow-factory samples", "format_version": 2, **facts, "pictures": listed}
    (folder / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _slug(prompt: str) -> str:
    """A short name for a file: letters and digits of any script."""
    words = re.findall(r"\w+", prompt.lower())
    return "-".join(words)[:40].strip("-") or "prompt"
