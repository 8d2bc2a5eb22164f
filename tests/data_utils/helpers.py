"""A stand-in for an adapter, and small prompt folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.hparams import DatasetArguments
from flow_factory.samples import Condition, ConditionInputs

TEXT_ONLY = PipelineIOContract((MediaSlot(Modality.TEXT, "prompt"),), (Modality.IMAGE,))


@dataclass(frozen=True)
class FakeCondition(Condition):
    """Two tensors and an optional negative, of three dtypes."""

    embeds: Tensor
    mask: Tensor
    negative: Tensor | None = None


class FakeAdapter:
    """Encodes a text as its bytes; counts what it is asked to do."""

    condition_class = FakeCondition

    def __init__(self, identity: str = "encoder 1", io: PipelineIOContract = TEXT_ONLY) -> None:
        self.identity = identity
        self.spec = SimpleNamespace(io=io)
        self.encoded: list[list[str]] = []
        self.negatives: list[Any] = []
        self.generations: list[Any] = []
        self.inputs: list[list[ConditionInputs]] = []
        self.collated = 0

    def encode_prompt(
        self,
        prompts: list[str],
        negative_prompts: list[str | None] | None,
        need_negative: bool,
        generation: Any = None,
    ) -> FakeCondition:
        self.generations.append(generation)
        self.encoded.append(list(prompts))
        self.negatives.append(negative_prompts)
        negative = None
        if need_negative:
            negative = torch.stack([_bytes(text or "") for text in negative_prompts or [None] * len(prompts)])
        embeds = torch.stack([_bytes(prompt) for prompt in prompts]).to(torch.bfloat16)
        return FakeCondition(embeds, embeds[..., 0] > 0, negative)

    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> FakeCondition:
        self.inputs.append(list(inputs))
        negatives = [i.negative_prompt for i in inputs] if need_negative else None
        return self.encode_prompt([i.prompt for i in inputs], negatives, need_negative, generation)

    def collate_conditions(self, conditions: Sequence[FakeCondition]) -> FakeCondition:
        self.collated += 1
        return FakeCondition.cat(conditions)

    def encoder_identity(self, generation: Any = None) -> str:
        return self.identity

    def guidance(self, guidance_scale: float, generation: Any = None) -> Any:
        return SimpleNamespace(needs_negative=lambda: guidance_scale > 1)


def _bytes(text: str) -> Tensor:
    codes = list(text.encode())[:8]
    return torch.tensor(codes + [0] * (8 - len(codes)), dtype=torch.float32).reshape(4, 2)


def write_txt(folder: Path, split: str, prompts: Sequence[str]) -> Path:
    """A text file of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.txt"
    path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    return path


def write_jsonl(folder: Path, split: str, rows: Sequence[Any]) -> Path:
    """A JSON-lines file; strings are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def dataset(folder: Path, name: str = "a", **fields: Any) -> DatasetArguments:
    """The arguments of a dataset in `folder`."""
    return DatasetArguments(name=name, dataset_dir=str(folder), **fields)


def run_config(sources: Sequence[DatasetArguments], cache: Path, **data: Any) -> Any:
    """The few fields of a configuration that loaders read."""
    from flow_factory.hparams import DataArguments

    scale = data.pop("guidance_scale", 1.0)
    preprocess_scale = data.pop("preprocess_guidance_scale", scale)
    eval_scale = data.pop("eval_guidance_scale", 1.0)
    return SimpleNamespace(
        data_args=DataArguments(datasets=list(sources), cache_dir=str(cache), **data),
        training_args=SimpleNamespace(
            seed=42, guidance_scale=scale, resolution=(16, 24), get_preprocess_guidance_scale=lambda: preprocess_scale
        ),
        eval_args=SimpleNamespace(guidance_scale=eval_scale, per_device_batch_size=2, resolution=(16, 24)),
        model_args=SimpleNamespace(frozen_parameters_dtype="bf16"),
        train_generation=SimpleNamespace(max_sequence_length=77),
        eval_generation=SimpleNamespace(max_sequence_length=55),
        mixed_precision="no",
    )


def geometry(per_source: dict[str, int], group_size: int, batch: int, sampler: str, world_size: int = 1) -> Any:
    """The few numbers of a geometry that loaders read."""
    return SimpleNamespace(
        per_source=per_source, group_size=group_size, batch=batch, sampler=sampler, world_size=world_size
    )
