"""How many bytes of tensors are alive while code runs: also of tensors that have a shape and no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside make, each once, from its first tensor to its last.

    What autograd keeps for the backward pass is alive, so after a forward pass `now` is what that pass holds. Memory
    that a kernel uses inside itself is not seen.

    Attributes:
        now: Bytes alive.
        peak: The most that were alive at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Starts at 0.

        Args:
            known: Tensors that were there before and are not counted: parameters, inputs.
        """
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any] | None] = {}
        for tensor in known:
            self._storages[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return  # a view, or written in place
        # Torch keeps one Python object for a storage until the last tensor is gone, so its end is the storage's.
        self._storages[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.now -= size
