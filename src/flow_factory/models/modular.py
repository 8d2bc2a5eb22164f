"""Pipelines of blocks (`modular_model_index.json`): loading one workflow's components, and running single blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import nn

INDEX = "modular_model_index.json"


def load_workflow(
    cls: type[Any],
    folder: Path,
    workflow: str,
    dtypes: Mapping[str, torch.dtype],
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """A modular pipeline with the components of one workflow, on CPU, each in its own dtype.

    The pipeline's own `load_components` goes on without a component that it could not load; this raises.

    Args:
        cls: The pipeline class.
        folder: The checkpoint; all components are read from it, whatever repository its index names.
        workflow: Which blocks of the pipeline, and with them which components.
        dtypes: Component name to dtype; "default" covers the rest.
        modules: Components that are there already; the folder's are not loaded.
    """
    pipeline = cls(pretrained_model_name_or_path=str(folder), workflow=workflow)
    components: dict[str, Any] = {}
    for name in pipeline.pretrained_component_names:
        if modules is not None and name in modules:
            components[name] = modules[name]
        else:
            spec = pipeline.get_component_spec(name)
            dtype = dtypes.get(name, dtypes["default"])
            components[name] = spec.load(pretrained_model_name_or_path=str(folder), subfolder=name, dtype=dtype)
    pipeline.register_components(**components)
    return pipeline


def download(path: str, components: Collection[str]) -> Path:
    """The local folder of a modular checkpoint on the Hub, of which some components are fetched."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=[INDEX, *(f"{name}/*" for name in components)]))


def run_blocks(pipeline: Any, *blocks: Any, **inputs: Any) -> dict[str, Any]:
    """Runs some blocks of a modular pipeline one after another, without gradients.

    Args:
        pipeline: Whose components and configuration they use.
        blocks: Block instances.
        inputs: What the pipeline's state holds before the first of them.

    Returns:
        What it holds after the last of them.
    """
    state = PipelineState()
    for name, value in inputs.items():
        state.set(name, value)
    for block in blocks:
        _, state = block(pipeline, state)
    return state.values
