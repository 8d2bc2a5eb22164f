"""A nested value with tensors as two files: `<name>.json` (structure and scalars) and `<name>.safetensors`.

The round trip is exact: tensors bit for bit in any dtype and shape, floats and integers in full, None, booleans,
strings, tuples and keys that are not strings. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flow_factory.checkpoints import values
from flow_factory.checkpoints.atomic import checkpointed
from flow_factory.errors import InputError

# Dtypes that safetensors stores under their own name. Others are stored as raw bytes, with the dtype in the JSON.
_NATIVE_DTYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
)


def save_tree(folder: str | os.PathLike[str], name: str, tree: Any) -> None:
    """Writes `tree` as `<name>.json` and, if it holds tensors, `<name>.safetensors`.

    The two files are neither atomic nor durable by themselves: write them inside `atomic.atomic_folder`.

    Args:
        folder: An existing folder.
        name: File name without its ending.
        tree: Nested dicts, lists and tuples of tensors, int, float, bool, str and None.

    Raises:
        TypeError: For a leaf of another type, naming its place in the tree.
    """
    tensors: dict[str, Tensor] = {}
    seen_storages: set[int] = set()

    def leaf(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}{path} is a {type(value).__module__}.{type(value).__qualname__}: not storable")
        key = path.lstrip("/") or "value"
        while key in tensors:  # {"a": {"b": t}, "a/b": t} reaches one path twice
            key += "'"
        tensor = value.detach().to("cpu").contiguous()
        entry: dict[str, Any] = {"key": key}
        if tensor.dtype not in _NATIVE_DTYPES:
            entry |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            tensor = tensor.reshape(-1).view(torch.uint8)
        # safetensors refuses tensors that share memory; here sharing is not part of the value.
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen_storages:
            tensor = tensor.clone()
        seen_storages.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
        return {"$tensor": entry}

    structure = values.encode(tree, "", leaf)
    json_path, tensor_path = _paths(folder, name)
    text = json.dumps({"tensors": bool(tensors), "tree": structure}, indent=1, allow_nan=False, ensure_ascii=False)
    json_path.write_text(text + "\n", encoding="utf-8")
    checkpointed(f"wrote {json_path.name}")
    if tensors:
        save_file(tensors, tensor_path)
        checkpointed(f"wrote {tensor_path.name}")


def load_tree(folder: str | os.PathLike[str], name: str, device: str | torch.device = "cpu") -> Any:
    """Reads what `save_tree` wrote.

    Args:
        folder: The folder that holds the files.
        name: File name without its ending.
        device: Where the tensors go.

    Raises:
        InputError: If a file is missing or not readable, naming it.
    """
    json_path, tensor_path = _paths(folder, name)
    try:
        document = json.loads(json_path.read_text(encoding="utf-8"))
        structure, has_tensors = document["tree"], document["tensors"]
    except OSError as error:
        raise InputError(f"cannot read {json_path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{json_path} is corrupted ({error}); use another checkpoint.") from error

    tensors: dict[str, Tensor] = {}
    if has_tensors:
        try:
            with safe_open(tensor_path, framework="pt", device="cpu") as file:
                handle = cast(Any, file)  # a context manager without type information
                tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{tensor_path} is missing or corrupted ({error}); use another checkpoint.") from error

    def leaf(tag: str, payload: Any) -> Tensor:
        if tag != "$tensor":
            raise ValueError(f"unknown tag {tag!r}")
        tensor = tensors[payload["key"]]
        if "dtype" in payload:
            tensor = tensor.view(getattr(torch, payload["dtype"])).reshape(payload["shape"])
        return tensor.to(device)

    try:
        return values.decode(structure, leaf)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{json_path} and {tensor_path.name} do not fit together ({type(error).__name__}: {error}); "
            f"use another checkpoint."
        ) from error


def _paths(folder: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    return Path(folder) / f"{name}.json", Path(folder) / f"{name}.safetensors"
