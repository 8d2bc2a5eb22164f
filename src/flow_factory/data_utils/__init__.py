"""Prompts, cached conditions, group samplers and loaders. Names load on first use, so this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow_factory.data_utils.condition_cache import ConditionCache
    from flow_factory.data_utils.conditions import PromptBatch
    from flow_factory.data_utils.loaders import (
        EvalLoader,
        RolloutLoader,
        build_eval_loader,
        build_eval_loaders,
        build_prompt_loaders,
    )
    from flow_factory.data_utils.prompt_dataset import PromptDataset, PromptRecord, load_prompt_dataset
    from flow_factory.data_utils.prompt_files import PromptRow, find_prompt_file, read_prompts
    from flow_factory.data_utils.samplers import Draw, GroupSampler, SourceShare

_HOMES = {
    "ConditionCache": "condition_cache",
    "Draw": "samplers",
    "EvalLoader": "loaders",
    "GroupSampler": "samplers",
    "PromptBatch": "conditions",
    "PromptDataset": "prompt_dataset",
    "PromptRecord": "prompt_dataset",
    "PromptRow": "prompt_files",
    "RolloutLoader": "loaders",
    "SourceShare": "samplers",
    "build_eval_loader": "loaders",
    "build_eval_loaders": "loaders",
    "build_prompt_loaders": "loaders",
    "find_prompt_file": "prompt_files",
    "load_prompt_dataset": "prompt_dataset",
    "read_prompts": "prompt_files",
}

__all__ = [
    "ConditionCache",
    "Draw",
    "EvalLoader",
    "GroupSampler",
    "PromptBatch",
    "PromptDataset",
    "PromptRecord",
    "PromptRow",
    "RolloutLoader",
    "SourceShare",
    "build_eval_loader",
    "build_eval_loaders",
    "build_prompt_loaders",
    "find_prompt_file",
    "load_prompt_dataset",
    "read_prompts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
