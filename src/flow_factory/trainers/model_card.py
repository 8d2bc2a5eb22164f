"""The README.md of an export: what it is, how it was made, how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers

from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.contracts import Modality
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.hparams.builtin import is_builtin
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.export import WEIGHT_NAME
from flow_factory.models.registry import get_adapter_class
from flow_factory.samples import VideoSample
from flow_factory.tracking.metrics import read_metrics


def model_card(
    config: Arguments, run: Path, weights: SavedWeights, layout: str, files: Mapping[str, str] | None = None
) -> str:
    """A Markdown text with a snippet that loads the export. Names no folder of the machine that wrote it.

    Args:
        config: The run's configuration.
        run: Its folder, for the scores of its evaluations.
        weights: What was exported.
        layout: "diffusers", "comfyui" or "merged".
        files: Of the layout "comfyui": the files' names by the model that they are for (see `ComfyUINames`).
    """
    lora = weights.kind == "lora" and layout != "merged"
    base = _base_name(config)
    kind = f"A LoRA for `{base}`" if lora else f"`{base}` with trained weights in place"
    sections = [
        _front_matter(config, lora),
        f"# {run.absolute().name}\n\n{kind}, fine-tuned with {config.training_args.trainer_type}.",
        "## How it was trained\n\n" + _table(_facts(config, weights)),
    ]
    counter = "cycle" if config.training_args.execution_contract.generates else "step"
    scores = _scores(run, weights.step, counter)
    if scores:
        about = "Means over the evaluation sets, at the first evaluation and at the last one up to this checkpoint."
        if config.training_args.ema_decay > 0 and not weights.averaged:
            about += " They were made with the averaged weights, not with the live ones of this export."
        sections.append(f"## Evaluations of the run\n\n{about}\n\n{scores}")
    if files is not None:
        loading = _loading_in_comfyui(config, files)
    elif hasattr(diffusers, config.spec.pipeline_class):
        loading = _loading(config, lora)
    else:
        loading = _loading_elsewhere(config, lora)
    sections.append("## How to load it\n\n" + loading)
    sections.append("The licence of the base model applies.")
    return "\n\n".join(sections) + "\n"


def _front_matter(config: Arguments, lora: bool) -> str:
    name = config.model_args.model_name_or_path
    lines = ["---", "library_name: diffusers"]
    if not is_builtin(name) and not _is_local(name):
        lines.append(f"base_model: {name}")
        lines.append(f"base_model_relation: {'adapter' if lora else 'finetune'}")
    tags = ["flow-factory", config.training_args.trainer_type, *(["lora"] if lora else [])]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _facts(config: Arguments, weights: SavedWeights) -> list[tuple[str, Any]]:
    train, model = config.training_args, config.model_args
    generates = train.execution_contract.generates
    facts: list[tuple[str, Any]] = [
        ("base model", f"`{_base_name(config)}` ({model.model_type})"),
        ("trainer", train.trainer_type),
        ("trained", f"{weights.step} {'cycles' if generates else 'optimizer steps'}"),
        ("weights", "moving average" if weights.averaged else "live"),
    ]
    if weights.kind == "lora":
        facts.append(("LoRA", f"rank {model.lora_rank}, alpha {model.lora_alpha} (folded into the weights: scale 1)"))
    for reward in config.reward_args.reward_configs:
        facts.append(("reward", f"`{reward.name}`: {reward.reward_model}, weight {reward.weight}"))
    facts.append(("learning rate", f"{config.optimizer_args[0].learning_rate:g}"))
    facts.append(("resolution", " x ".join(map(str, train.resolution))))
    for field, name in (("num_frames", "frames"), ("frame_rate", "frames per second")):
        if hasattr(config.train_generation, field):
            facts.append((name, f"{getattr(config.train_generation, field):g}"))
    if model.resume_kind == "full" and weights.kind == "lora":
        facts.append(
            ("started from", f"full weights `{Path(str(model.resume_path)).name}`, which the base must have too")
        )
    facts.append(("seed", train.seed))
    return facts


def _table(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _scores(run: Path, number: int, counter: str) -> str:
    """First and last evaluation up to a checkpoint, whose number counts cycles or optimizer steps."""
    try:
        rows = [row for row in read_metrics(run, kind="eval") if row[counter] <= number]
    except InputError:
        return ""  # a card without scores is still a card; `report` says what is wrong with the file
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    lines = [f"| | cycle {first['cycle']} | cycle {last['cycle']} |", "|---|---|---|"]
    for name, value in last.items():
        if "/" in name and isinstance(value, float) and isinstance(first.get(name), float):
            lines.append(f"| {name} | {first[name]:.4f} | {value:.4f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _loading_in_comfyui(config: Arguments, files: Mapping[str, str]) -> str:
    """Args: the files' names by the model that they are for, "" being the only one."""
    names = get_adapter_class(config.model_args.model_type).comfyui
    assert names is not None
    put = f"Put {' and '.join(f'`{file}`' for file in files.values())} into ComfyUI's `models/loras`"
    end = "at strength 1. The text encoders are not changed."
    if list(files) != [""]:
        which = "; ".join(f"`{file}` on the {model.replace('_', ' ')} model" for model, file in files.items())
        return f"{put}, and load with a node *Load LoRA* for each model: {which}, {end}"
    # What is one network in some checkpoints of a family is the first of two in others.
    first = names.models.get("transformer")
    where = f" (of two, on the {first.replace('_', ' ')} one)" if first else ""
    return f"{put} and load it with the node *Load LoRA* on the base model{where}, {end}"


def _loading_elsewhere(config: Arguments, lora: bool) -> str:
    """Of a pipeline class that is not diffusers' own (`PseudoPipeline`)."""
    field = "resume_path" if lora else "model_name_or_path"
    return (
        f"`{config.spec.pipeline_class}` is no part of diffusers. In a configuration with `model_type: "
        f"{config.model_args.model_type}`, give this folder as `model.{field}`, and name the module that registers the "
        f"model under `plugins`."
    )


def _loading(config: Arguments, lora: bool) -> str:
    evaluation = config.eval_args
    adapter_class = get_adapter_class(config.model_args.model_type)
    call = {
        "num_inference_steps": evaluation.num_inference_steps,
        **adapter_class.size_arguments(*evaluation.resolution),
        **adapter_class.call_arguments(evaluation.guidance_scale, config.eval_generation),
    }
    arguments = [f"{name}={json.dumps(v) if isinstance(v, str) else repr(v)}" for name, v in call.items()]
    example = adapter_class.example_call or _example_call(config)
    lines = _open(config, lora, example.imports)
    lines += _load_lora(config.spec.pipeline_class, config.model_args.components) if lora else []
    height, width = evaluation.resolution
    lines += adapter_class.call_setup(evaluation.guidance_scale, config.eval_generation, (height, width))
    made = f'pipeline(prompt="a prompt", {", ".join([*example.arguments, *arguments])})'
    values = {"call": made, **{name: repr(value) for name, value in asdict(config.eval_generation).items()}}
    lines += [re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), line) for line in example.result]
    return "```python\n" + "\n".join(lines) + "\n```"


def _example_call(config: Arguments) -> ExampleCall:
    """From the slots that must be filled, and whether there are pictures or videos."""
    is_video = issubclass(get_adapter_class(config.model_args.model_type).sample_class, VideoSample)
    needed = {slot.modality for slot in config.spec.io.inputs if slot.required}
    loaders = {Modality.IMAGE: 'image=load_image("input.png")', Modality.VIDEO: 'video=load_video("input.mp4")'}
    helpers = ["export_to_video"] * is_video + [f"load_{modality.value}" for modality in loaders if modality in needed]
    saved = ("picture = {call}.images[0]", 'picture.save("picture.png")')
    if is_video:
        export = 'export_to_video(frames, "video.mp4", fps=16)  # or what the checkpoint was trained with'
        saved = ("frames = {call}.frames[0]", export)
    return ExampleCall(
        imports=(f"from diffusers.utils import {', '.join(helpers)}",) if helpers else (),
        arguments=tuple(call for modality, call in loaders.items() if modality in needed),
        result=saved,
    )


def _open(config: Arguments, lora: bool, imports: Sequence[str]) -> list[str]:
    """Lines that import, and open the pipeline: the base model, or what is in this folder."""
    spec, name = config.spec, config.model_args.model_name_or_path
    # A checkpoint of another class must be told which one is meant.
    loader = spec.pipeline_class if spec.other_classes else "DiffusionPipeline"
    lines, more, loaded, here = [], "", [], '"."'
    if spec.workflow is not None:
        loader, more = "ModularPipeline", f', workflow="{spec.workflow}"'
        lines, loaded = ["import torch"], ["pipeline.load_components(dtype=torch.bfloat16)"]
        if not lora:  # components that transformers loads are not found in "."
            lines, here = ["from pathlib import Path", "", *lines], "str(Path.cwd())"
    lines += [f"from diffusers import {loader}", *imports]
    if not lora:
        return [*lines, "", f"pipeline = {loader}.from_pretrained({here}{more})  # this folder", *loaded]
    if is_builtin(name):
        lines += ["from flow_factory.hparams.builtin import resolve_builtin"]
        given = f'resolve_builtin("{name}", "model")'
    else:
        given = f'"path/to/{_base_name(config)}"' if _is_local(name) else f'"{name}"'
    return [*lines, "", f"pipeline = {loader}.from_pretrained({given}{more})", *loaded]


def _load_lora(pipeline_class: str, components: Sequence[str]) -> list[str]:
    """Lines that load a LoRA: `load_lora_weights` reads the main network, others have a method of their own."""
    reads_main = hasattr(getattr(diffusers, pipeline_class, None), "load_lora_weights")
    lines = []
    for name in components:
        if name.endswith("_2") or not reads_main:
            lines += [f'pipeline.{name}.load_lora_adapter(".", weight_name="{WEIGHT_NAME}", prefix="{name}")']
        else:
            lines += [f'pipeline.load_lora_weights(".", weight_name="{WEIGHT_NAME}")  # this folder']
    return lines


def _is_local(name: str) -> bool:
    return name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).expanduser().is_dir()


def _base_name(config: Arguments) -> str:
    """The Hub id or built-in name; of a local folder its own name alone."""
    name = config.model_args.model_name_or_path
    return Path(name).name if not is_builtin(name) and _is_local(name) else name
