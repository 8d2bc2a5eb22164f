"""A model for inference, from a configuration or with a run's trained weights: one way for sampling and evaluation.

A LoRA is read from the file that is exported, with alpha / r already folded into B, into layers whose own scale is 1.
(alpha / r) (B (A x)) and ((alpha / r) B) (A x) round differently when alpha / r is no power of two, so this, and not
the layers of the training run, is what makes pictures here equal to those of another program that loads the export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.models import export
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.initial import load_lora
from flow_factory.models.registry import get_adapter_class
from flow_factory.models.weights import FIRST_ROLE, LoraWeights

Variant = Literal["base", "trained"]
_BASE = "base"


@dataclass(frozen=True)
class InferenceModel:
    """An adapter whose weights can be switched between the base model's and the trained ones.

    Attributes:
        adapter: The model, prepared and in evaluation mode.
        variants: Whose weights are there.
    """

    adapter: BaseAdapter[Any]
    variants: tuple[Variant, ...]

    def use(self, variant: Variant) -> AbstractContextManager[None]:
        """Forwards inside see the base model or the trained weights.

        Raises:
            InputError: If the model was built without them.
        """
        if variant not in self.variants:
            raise InputError(f"the model was built with {' and '.join(self.variants)} weights, without {variant} ones.")
        if variant == "base" and isinstance(self.adapter.weights, LoraWeights):
            return self.adapter.use_component_variant(None)
        held = variant == "base" and _BASE in self.adapter.weights.snapshots
        return self.adapter.use_component_variant(_BASE if held else FIRST_ROLE)


def build_inference_model(
    config: Arguments, comm: Comm, trained: str | Path | None, variants: Sequence[Variant]
) -> InferenceModel:
    """Loads the pipeline and puts trained weights into it.

    Args:
        config: The configuration.
        comm: Process group; its device is where the model goes.
        trained: Folder or file of the trained weights: a run's, or `model.resume_path`. Full weights at
            `model.resume_path` that are not these lie beneath them and belong to the base.
        variants: Which weights are needed. Both together cost nothing with LoRA, and a second float32 copy in CPU
            memory with full fine-tuning.

    Raises:
        InputError: If the model cannot be loaded or the weights do not fit it.
    """
    model_args = config.model_args
    changes: dict[str, Any] = {}
    if model_args.resume_kind != "full" or str(trained) == model_args.resume_path:
        changes |= {"resume_path": None, "resume_type": None}
    lora = model_args.finetune_type == "lora"
    if lora:  # a scale of 1, and float32: as the exported file is read elsewhere
        changes |= {"lora_alpha": model_args.lora_rank, "trainable_parameters_dtype": "fp32"}
    config = dataclasses.replace(config, model_args=dataclasses.replace(model_args, **changes))
    adapter = get_adapter_class(model_args.model_type)(config, comm, as_stored=True)
    load = trained is not None and "trained" in variants
    if load and not lora and "base" in variants:
        adapter.add_snapshot(_BASE, device="cpu")
    adapter.prepare()  # the snapshot is taken here, after weights beneath have been read
    if load and isinstance(adapter.weights, LoraWeights):
        load_lora(adapter.weights, model_args.components, str(trained))
        _map_lora(adapter, export.lora_file(str(trained)))
    elif load:
        for name in model_args.components:
            export.load_full(name, adapter.bundle.component(name), str(trained))
    adapter.eval()
    return InferenceModel(adapter, tuple(v for v in variants if v == "base" or load))


@torch.no_grad()
def _map_lora(adapter: BaseAdapter[Any], file: Path) -> None:
    """Lets the layers use the file's own mapped tensors, as diffusers does, where they hold the same values already.

    On a CPU the last bits of a product depend on how its operands are aligned (see `components.place`).
    """
    stored = load_file(file)
    for name, parameter in adapter.trainable_parameters().items():
        component, _, rest = name.partition(".")
        *module, matrix, _, weight = rest.split(".")
        value = stored.get(".".join([component, *module, matrix, weight]))
        same = value is not None and value.dtype == parameter.dtype and value.device == parameter.device
        if value is not None and same and torch.equal(value, parameter):
            parameter.data = value
