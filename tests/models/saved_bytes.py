"""What autograd keeps for a backward pass, asked from autograd itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Bytes of the storages that autograd saves inside, each once, without the module's own."""

    def __init__(self, module: nn.Module) -> None:
        self.total = 0
        self._kept: list[Any] = []
        self._known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._kept.append(storage)  # so that no other one gets its address
            self.total += storage.nbytes()
        return tensor
