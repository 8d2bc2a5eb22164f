"""Weights for other programs: LoRA files in the diffusers layout, whole components, and reading both back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flow_factory.errors import InputError
from flow_factory.models.snapshots import load_strict
from flow_factory.models.weights import LoraWeights

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter

WEIGHT_NAME = "pytorch_lora_weights.safetensors"


def export_lora(
    adapter: BaseAdapter[Any], folder: str | Path, weight_name: str = WEIGHT_NAME, variant: str = "default"
) -> Path:
    """Writes one variant's LoRA so that `pipeline.load_lora_weights(folder, weight_name=...)` reads it.

    Keys are `transformer.<module>.lora_A.weight`, float32, with alpha / r folded into B (see `LoraLayers.folded`). Of
    several trained components, `load_lora_weights` reads the pipeline's main network; another one's own
    `load_lora_adapter(folder, weight_name=..., prefix="transformer_2")` reads its part of the same file, as does the
    main network's where a pipeline has no `load_lora_weights`.

    Returns:
        The file.

    Raises:
        InputError: If the run trains no LoRA, or has no such variant.
    """
    weights = adapter.weights
    if not isinstance(weights, LoraWeights):
        raise InputError("model.finetune_type is 'full': there is no LoRA to export; save the full weights instead.")
    if variant not in weights.roles and variant not in weights.snapshots:
        raise weights.unknown(variant)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers = weights.layers.folded(weights.adapter_name(variant))
    state = {f"{component}.{name}": value for component, own in layers.items() for name, value in own.items()}
    save_file(state, folder / weight_name, metadata={"format": "pt"})
    return folder / weight_name


def save_full(adapter: BaseAdapter[Any], folder: str | Path) -> Path:
    """Writes every trained component as `folder/<component>`, for `from_pretrained(folder, subfolder=<component>)`.

    The files hold the master weights of the active variant in their own dtype.

    Raises:
        InputError: If the run trains LoRA.
    """
    if isinstance(adapter.weights, LoraWeights):
        raise InputError("model.finetune_type is 'lora': export the LoRA instead of the full weights.")
    folder = Path(folder)
    for name in adapter.trained_components:
        module: Any = adapter.bundle.component(adapter.weights.route(name))
        module.save_pretrained(str(folder / name), safe_serialization=True)
    return folder


def load_full(component: str, module: nn.Module, folder: str | Path) -> None:
    """Loads a component saved by `save_full`, strictly.

    Raises:
        InputError: If the folder or its weights do not fit.
    """
    path = Path(folder).expanduser() / component
    if not path.is_dir():
        raise InputError(f"model.resume_path: {str(folder)!r} has no folder {component!r} with full weights.")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"model.resume_path: {str(path)!r} holds no safetensors file.")
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(_load_weights(file))
    load_strict(module.state_dict(), state, f"model.resume_path {str(path)!r}")


def _load_weights(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"model.resume_path: {str(file)!r} is damaged or no safetensors file ({error}); give another, or copy it "
            f"again."
        ) from error


def lora_file(path: str | Path) -> Path:
    """The safetensors file meant by `path`: the file itself, or the only one in a folder.

    Raises:
        InputError: If there is none, or a choice.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    preferred = [file for file in files if file.name == WEIGHT_NAME]
    if len(files) == 1 or preferred:
        return (preferred or files)[0]
    what = f"holds {[f.name for f in files]}; name one" if files else "has no LoRA file (*.safetensors)"
    raise InputError(f"model.resume_path: {str(path)!r} {what}.")


def read_lora(path: str | Path) -> dict[str, dict[str, Tensor]]:
    """A LoRA file in the diffusers or PEFT layout, per component, with its alpha folded into B.

    Raises:
        InputError: If the file holds other keys.
    """
    file = lora_file(path)
    weights = _load_weights(file)
    with safe_open(file, framework="pt") as stream:
        metadata: Mapping[str, str] = stream.metadata() or {}
    alphas: dict[str, float] = {}
    result: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        component, name = _split_key(key, file)
        if name.endswith(".alpha"):
            alphas[f"{component}.{name.removesuffix('.alpha')}"] = float(value)
        else:
            result.setdefault(component, {})[name] = value
    packed = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    for component, state in result.items():
        for name in [n for n in state if n.endswith(".lora_B.weight")]:
            module = name.removesuffix(".lora_B.weight")
            rank = state[name].shape[1]
            alpha = alphas.get(f"{component}.{module}", float(packed.get(f"{component}.lora_alpha", rank)))
            state[name] = state[name] * (alpha / rank)
    return result


def _split_key(key: str, file: Path) -> tuple[str, str]:
    for prefix in ("base_model.model.", "diffusion_model."):
        if key.startswith(prefix) and not key.startswith("base_model.model.transformer."):
            key = "transformer." + key.removeprefix(prefix)
    key = key.removeprefix("base_model.model.")
    component, _, name = key.partition(".")
    if not name.endswith((".lora_A.weight", ".lora_B.weight", ".alpha")):
        raise InputError(
            f"model.resume_path: {str(file)!r} holds {key!r}, which is no LoRA weight in diffusers' layout."
        )
    return component, name
