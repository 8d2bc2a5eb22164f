"""The memory of one process, part by part: what belongs to parameters, exactly; what passes through, as an estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flow_factory.hparams import Arguments
from flow_factory.models.abc import REFERENCE, BaseAdapter
from flow_factory.models.bundle import has_gradient_checkpointing
from flow_factory.models.components import pipeline_modules
from flow_factory.models.shapes.runner import ShapeRuns, Trace, UnknownShapesError
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.planning.parameters import (
    optimizer_bytes,
    reduction_bytes,
    snapshot_bytes,
    step_bytes,
    tensor_bytes,
)
from flow_factory.trainers.planning.report import ComponentPlan, MemoryPart, unknown_part


def component_plans(adapter: BaseAdapter[Any]) -> tuple[ComponentPlan, ...]:
    """The networks of a pipeline, with the parameters of their LoRA layers apart from their own."""
    trained = {id(p) for role in adapter.weights.roles.values() for p in role.values()}
    lora = adapter.config.model_args.finetune_type == "lora"
    found = []
    for name, module in pipeline_modules(adapter.pipeline).items():
        parameters = list(module.parameters())
        own = [p for p in parameters if not (lora and id(p) in trained)]
        sizes: dict[torch.dtype, int] = {}
        for parameter in own:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        found.append(
            ComponentPlan(
                name=name,
                kind=type(module).__name__,
                parameters=sum(sizes.values()),
                trainable=sum(p.numel() for p in parameters if id(p) in trained),
                dtype=dtype_name(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else "",
                bytes=tensor_bytes([*own, *module.buffers()]),
            )
        )
    return tuple(found)


def dtype_name(dtype: torch.dtype) -> str:
    """As the configuration writes it: "fp32", "bf16"."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def declared_snapshots(config: Arguments, trainer_class: type[BaseTrainer]) -> dict[str, str]:
    """The frozen copies of a run, by name, and the device that is asked for each.

    The trainer's hooks are asked on an instance that has its configuration alone: in a run they are called before there
    is a model, too. A LoRA's reference is the base beneath it, unless it is the start of the run, and needs no copy.
    """
    arguments = config.training_args
    trainer = trainer_class.__new__(trainer_class)
    trainer.config, trainer.training_args = config, arguments
    variants = trainer._declare_model_variants()
    found = dict(variants) if isinstance(variants, Mapping) else dict.fromkeys(variants, "auto")
    base_is_there = config.model_args.finetune_type == "lora" and arguments.reference == "base"
    if trainer.needs_reference() and not base_is_there:
        found[REFERENCE] = getattr(arguments, "ref_param_device", "auto")
    if arguments.ema_decay > 0:
        found["ema"] = arguments.ema_device
    return found


def parameter_parts(
    config: Arguments, adapter: BaseAdapter[Any], trainer_class: type[BaseTrainer], device_type: str
) -> list[MemoryPart]:
    """Weights, gradients, optimizer state, frozen copies, and what an optimizer step needs for itself."""
    lora = config.model_args.finetune_type == "lora"
    roles = {role: list(parameters.values()) for role, parameters in adapter.weights.roles.items()}
    entries = {role: config.optimizer_for(role) for role in roles}
    components = component_plans(adapter)
    parts = [MemoryPart("weights", sum(c.bytes for c in components), note="every network of the pipeline")]
    if lora:
        held = tensor_bytes(p for parameters in roles.values() for p in parameters)
        parts.append(MemoryPart("lora weights", held, note=f"rank {config.model_args.lora_rank}"))
    elif len(roles) > 1:
        copies = tensor_bytes(p for role, parameters in roles.items() if role != next(iter(roles)) for p in parameters)
        parts.append(MemoryPart("weights of further roles", copies, note=", ".join(list(roles)[1:])))
    # One role is optimised at a time, and gradients are dropped after its step.
    parts.append(MemoryPart("gradients", max(map(tensor_bytes, roles.values())), note="of the role that is stepped"))
    for role, parameters in roles.items():
        name = "optimizer" if len(roles) == 1 else f"optimizer {role}"
        parts.append(MemoryPart(name, optimizer_bytes(parameters, entries[role]), note=entries[role].optimizer))
    first = next(iter(roles.values()))
    for name, device in declared_snapshots(config, trainer_class).items():
        on_host = device == "cpu" and not lora and device_type != "cpu"
        note = "a LoRA of its own, fp32" if lora else "a copy in fp32"
        parts.append(MemoryPart(f"snapshot {name}", snapshot_bytes(first), "host" if on_host else "device", note=note))
    needed = max(
        step_bytes(parameters, entries[role], device_type) + reduction_bytes(parameters, config.num_processes)
        for role, parameters in roles.items()
    )
    parts.append(MemoryPart("optimizer step", needed, always=False, note="temporary copies and gradient buckets"))
    return parts


def traced_part(name: str, note: str, run: Callable[[], Trace]) -> MemoryPart:
    """A part that is an estimate from a run on shapes, or says why there is none."""
    try:
        return MemoryPart(name, run().peak, always=False, estimate=True, note=note)
    except UnknownShapesError as error:
        return unknown_part(name, str(error))


def has_checkpointing(runs: ShapeRuns) -> bool:
    """Whether every trained network can compute its activations again."""
    bundle = runs.adapter.bundle
    return all(has_gradient_checkpointing(bundle.component(name)) for name in bundle.component_names)
