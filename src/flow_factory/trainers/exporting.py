"""A run's weights for other programs: a LoRA file, or a whole pipeline folder, with a model card beside it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_factory.checkpoints.atomic import atomic_write_json
from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.errors import InputError
from flow_factory.hparams.builtin import resolve_builtin
from flow_factory.models.components import checkpoint_folder, parse_dtype
from flow_factory.models.export import WEIGHT_NAME
from flow_factory.models.merge import copy_pipeline, write_component
from flow_factory.models.registry import get_adapter_class
from flow_factory.trainers.export_request import ExportRequest
from flow_factory.trainers.model_card import model_card

RECORD = "export.json"


def export_weights(request: ExportRequest, folder: Path) -> None:
    """Writes the export.

    Args:
        request: What to export.
        folder: An empty folder; it is not complete before this returns.

    Raises:
        InputError: If the weights or the base model cannot be read or do not fit together.
    """
    files = None
    if request.is_pipeline:
        _write_pipeline(request, folder)
    else:
        files = _write_lora(request, folder)
    card = model_card(request.config, request.run, request.weights, request.format, files)
    (folder / "README.md").write_text(card, encoding="utf-8")
    facts = {"checkpoint": request.weights.checkpoint.name, "averaged": request.weights.averaged}
    atomic_write_json(folder / RECORD, {"format": "flow-factory export", "layout": request.format, **facts})


def _write_lora(request: ExportRequest, folder: Path) -> dict[str, str] | None:
    """Returns the names of ComfyUI's files, by the model that they are for."""
    source = request.weights.folder / WEIGHT_NAME
    state = _load(request.weights)
    if request.format == "diffusers":
        shutil.copyfile(source, folder / WEIGHT_NAME)
        return None
    contents = get_adapter_class(request.config.model_args.model_type).comfyui_lora(state)
    run = request.run.absolute().name  # ComfyUI shows the file's name in its list
    files = {model: f"{run}_{model}.safetensors" if model else f"{run}.safetensors" for model in contents}
    for model, name in files.items():
        save_file(contents[model], folder / name, metadata={"format": "pt"})
    return files


def _write_pipeline(request: ExportRequest, folder: Path) -> None:
    model = request.config.model_args
    spec = request.config.spec
    base = checkpoint_folder(resolve_builtin(model.model_name_or_path, "model"), spec.modular_components)
    copy_pipeline(base, folder, model.components, spec.index_file, spec.modular_components)
    dtype = None if request.dtype is None else parse_dtype(request.dtype, "--dtype")
    lora = _load(request.weights) if request.weights.kind == "lora" else {}
    for name in model.components:
        source = base / name
        if request.weights.kind == "full":
            source = request.weights.folder / name
        elif model.resume_kind == "full":  # the LoRA was trained on these weights
            source = Path(str(model.resume_path)).expanduser() / name
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in lora.items() if key.startswith(prefix)}
        write_component(source, folder / name, own, dtype)


def _load(weights: SavedWeights) -> Mapping[str, Tensor]:
    file = weights.folder / WEIGHT_NAME
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} cannot be read ({error}).") from error
    if not any(bool(torch.any(value)) for key, value in state.items() if key.endswith(".lora_B.weight")):
        why = (
            "The moving average has not been updated yet (train.ema_update_interval); --live takes the trained weights."
            if weights.averaged
            else "Has the run made an update?"
        )
        raise InputError(f"{file} changes nothing: all its lora_B weights are zero. {why}")
    return state
