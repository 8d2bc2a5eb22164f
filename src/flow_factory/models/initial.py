"""The weights a run starts from: LoRA or full, fresh or read from `model.resume_path`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flow_factory.errors import InputError
from flow_factory.hparams import Arguments, ModelSpec
from flow_factory.models import export
from flow_factory.models.bundle import ModelBundle
from flow_factory.models.lora import LoraSettings, select_targets
from flow_factory.models.weights import FIRST_ROLE, FullWeights, LoraWeights, Weights


def make_weights(
    config: Arguments, spec: ModelSpec, bundle: ModelBundle, components: Sequence[str], dtype: torch.dtype
) -> Weights:
    """The first role, and the further roles that the training arguments require.

    Full weights at `model.resume_path` are loaded beneath a LoRA here, before its layers are wrapped.

    Args:
        config: The run's configuration.
        spec: The model's default LoRA targets and dead modules.
        bundle: Holds the components, frozen.
        components: Names of the trained components.
        dtype: Of the LoRA weights.
    """
    model = config.model_args
    if model.finetune_type == "full":
        weights: Weights = FullWeights(bundle, components)
    else:
        if model.resume_kind == "full":
            for name in components:
                export.load_full(name, bundle.component(name), str(model.resume_path))
        wanted = spec.default_lora_targets if model.target_modules == "all" else model.target_modules
        targets = {name: select_targets(bundle.component(name), wanted, spec.dead_modules) for name in components}
        settings = LoraSettings(
            rank=model.lora_rank,
            alpha=model.lora_alpha if model.lora_alpha is not None else 2 * model.lora_rank,
            init=model.lora_init,
            seed=config.training_args.seed,
            dtype=dtype,
        )
        weights = LoraWeights(bundle, targets, settings, model.lora_adapter_name)
    for role in config.training_args.required_trainable_roles:
        if role not in weights.roles:
            weights.add_role(role)
    return weights


@torch.no_grad()
def load_initial_weights(config: Arguments, bundle: ModelBundle, components: Sequence[str], weights: Weights) -> None:
    """Reads `model.resume_path` into the first role and lets the other roles start from it.

    Raises:
        InputError: If the path holds something else than the run trains.
    """
    path, kind = config.model_args.resume_path, config.model_args.resume_kind
    if path is None or kind is None:
        return
    if isinstance(weights, LoraWeights):
        if kind == "lora":
            load_lora(weights, components, path)
    elif kind == "full":
        for name in components:
            export.load_full(name, bundle.component(name), path)
    else:
        raise InputError(
            f"model.resume_path: {path!r} holds a LoRA, but model.finetune_type is 'full'. Use finetune_type: lora, or "
            f"start from full weights."
        )
    first = weights.roles[FIRST_ROLE]
    for role, parameters in weights.roles.items():
        if role != FIRST_ROLE:
            for source, target in zip(first.values(), parameters.values(), strict=True):
                target.copy_(source)


@torch.no_grad()
def load_lora(weights: LoraWeights, components: Sequence[str], path: str) -> None:
    """Reads a LoRA file into the first role.

    Raises:
        InputError: If it does not fit, or holds weights of components that are not trained.
    """
    found = export.read_lora(path)
    foreign = sorted(set(found) - set(components))
    if foreign:
        raise InputError(f"model.resume_path: {path!r} holds LoRA weights for {foreign}, which are not trained.")
    for name in components:
        weights.layers.load_folded(weights.adapter_name(FIRST_ROLE), name, found.get(name, {}), path)
