"""Pipeline folders with trained weights in place, written shard by shard: no model is built, so little memory is used.

Everything that is not trained is copied as it is. W' = W + B A is computed in float32 and rounded once, to the dtype of
the file or to the one asked for (alpha / r is folded into B already).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flow_factory.errors import InputError

INDEX = "model_index.json"
# Pickles and other programs' formats; what a pipeline loads is safetensors and JSON.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".onnx", ".gguf"}


def copy_pipeline(
    source: Path, target: Path, without: Sequence[str] = (), index_name: str = INDEX, only: Sequence[str] = ()
) -> None:
    """Copies a diffusers pipeline folder: its index and the components that the index names.

    Pickled weights and weight variants (`*.fp16.safetensors`) are left out.

    Args:
        source: The pipeline.
        target: An existing folder.
        without: Components to leave out.
        index_name: The index's file name.
        only: Components to copy, of an index that names others as well (a modular one); empty: all.

    Raises:
        InputError: If the folder is no pipeline, its index names something else than folders in it, or a component has
            no weights in safetensors.
    """
    index_file = source / index_name
    if not index_file.is_file():
        raise InputError(f"{source} has no {index_name}, so it is no diffusers pipeline.")
    index = json.loads(index_file.read_text(encoding="utf-8"))
    shutil.copyfile(index_file, target / index_name)
    for name, value in index.items():
        if not isinstance(value, list) or value == [None, None] or name in without or (only and name not in only):
            continue
        # The name becomes a path on both sides, so "../x" or "/x" would read and write outside of the pipelines.
        if not name.isidentifier():
            raise InputError(
                f"{index_file} names a component {name!r}, which is no plain name as 'vae' is; the file is damaged or "
                f"not to be trusted. Save the pipeline again with save_pretrained."
            )
        folder = source / name
        if not folder.is_dir():
            raise InputError(f"{index_file} names a component {name!r}, but there is no folder {folder}.")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if any(path.suffix in _OTHER_WEIGHTS for path in files) and not any(map(_is_weights, files)):
            raise InputError(
                f"{folder} holds no safetensors weights, and pickled ones are not copied. Save the pipeline again with "
                f"save_pretrained(..., safe_serialization=True) and give that folder as model.model_name_or_path."
            )
        for path in files:
            if path.suffix in _OTHER_WEIGHTS or (path.suffix == ".safetensors" and not _is_weights(path)):
                continue
            destination = target / name / path.relative_to(folder)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)


def write_component(
    source: Path, target: Path, lora: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Writes a component's folder with a LoRA merged into its weights.

    Args:
        source: The component's folder: configuration and safetensors, in one file or in shards.
        target: Folder to create.
        lora: `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r], with alpha folded; None merges
            nothing.
        dtype: Of the floating-point weights written; None keeps each weight's own.

    Raises:
        InputError: If there are no safetensors, or the LoRA has a module that the component lacks or of another shape.
    """
    target.mkdir(parents=True)
    pairs = _pairs(lora or {}, source)
    shards = [path for path in sorted(source.glob("*.safetensors")) if _is_weights(path)]
    if not shards:
        raise InputError(f"{source} holds no safetensors weights.")
    total = 0
    for shard in shards:
        tensors: dict[str, Tensor] = {}
        for name, value in _read(shard):
            if name in pairs:
                weight = _merged(value, *pairs.pop(name), name, source).to(dtype or value.dtype)
            elif dtype is not None and value.is_floating_point():
                weight = value.to(dtype)
            else:
                weight = value
            tensors[name] = weight.contiguous()
            total += weight.numel() * weight.element_size()
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
    if pairs:
        raise InputError(
            f"the LoRA has weights for {next(iter(pairs))!r} and {len(pairs) - 1} more that {source} does not have; is "
            f"model.model_name_or_path the model it was trained on?"
        )
    for path in sorted(source.iterdir()):
        if path.name.endswith(".safetensors.index.json"):
            if path.name.count(".") == 3:  # of a variant otherwise
                listing: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                listing["metadata"] = {**listing.get("metadata", {}), "total_size": total}
                (target / path.name).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
        elif path.is_file() and path.suffix not in {*_OTHER_WEIGHTS, ".safetensors"}:
            shutil.copyfile(path, target / path.name)


def _is_weights(path: Path) -> bool:
    """Whether a file is safetensors of no variant: `model.safetensors`, `model-00001-of-00002.safetensors`."""
    return path.suffix == ".safetensors" and "." not in path.stem


def _read(shard: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{shard} is damaged or no safetensors file ({error}); copy it again.") from error


def _pairs(lora: Mapping[str, Tensor], source: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of the wrapped weight to A and B."""
    pairs = {}
    for key, up in lora.items():
        if key.endswith(".lora_B.weight"):
            module = key.removesuffix(".lora_B.weight")
            down = lora.get(f"{module}.lora_A.weight")
            if down is None:
                raise InputError(f"the LoRA for {source.name} has {key!r} without its lora_A.")
            pairs[f"{module}.weight"] = (down, up)
    return pairs


def _merged(weight: Tensor, down: Tensor, up: Tensor, name: str, source: Path) -> Tensor:
    """W + B A in float32, not yet rounded to what is written."""
    change = up.float() @ down.float()
    if change.shape != weight.shape:
        raise InputError(
            f"the LoRA changes {name!r} by {tuple(change.shape)}, but {source} has {tuple(weight.shape)} there; is "
            f"model.model_name_or_path the model it was trained on?"
        )
    return weight.float() + change
