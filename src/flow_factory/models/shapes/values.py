"""Values that networks read, on the meta device: of masks, lengths, positions, grid sizes.

Networks that cut texts to their length, or put pictures between tokens, have shapes that depend on such values. Integer
tensors that come in with values, and tensors that are made from numbers, keep them through operations on such tensors
alone. Numbers that nobody knows are equal to no number: a network may ask whether what it is given is all zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

META = torch.device("meta")
_KEPT_INTEGERS = 1 << 24  # a mask of attention scores may have more elements, and is not read
_KEPT_FLOATS = 1 << 16  # a mask of ones may be made as floats
_EQUALITIES = {Tensor.__eq__, Tensor.eq, torch.eq}
_NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty}
_FACTORIES = {torch.arange, torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full}


class KnownValues(TorchFunctionMode):
    """Follows tensors with values while networks run on the meta device.

    Beside each such tensor its values lie on the CPU, and what is done to it is done to them. Views of values are views
    here too, so that writing in place stays right.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakIdKeyDictionary()

    def to_meta(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape on the meta device; of integers, the values are remembered."""
        return self._shadow(tensor) if _is_integer(tensor) else tensor.detach().to(META)

    def _shadow(self, value: Tensor) -> Tensor:
        """A tensor on the meta device that has these values, if they are not too many."""
        moved = value.detach().to(META)
        if value.device != META:
            self._remember(moved, value)
        return moved

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor in self._values for tensor in tensors]
        if func is Tensor.expand_as and known[0]:
            return self.__torch_function__(Tensor.expand, types, (args[0], args[1].shape))
        attribute = getattr(func, "__name__", "") == "__get__"  # `x.device` is that of the tensor, not of its values
        if known and all(known) and not attribute:
            found = self._on_values(func, args, kwargs, tensors)
            if found is not NotImplemented:
                return found
        elif any(known):
            args, kwargs = self._with_sizes(func, args, kwargs)
        result = func(*args, **kwargs)
        if not tensors and func in _FACTORIES and result.numel() <= _limit(result):
            self._remember(result, self._on_cpu(func, args, {**kwargs, "device": META}))
        if func in _EQUALITIES and isinstance(result, Tensor) and len(tensors) == 1 and not known[0]:
            self._values[result] = torch.zeros((), dtype=torch.bool, device="cpu").expand(result.shape)
        for written in (result, args[0] if func is Tensor.__setitem__ else None):
            if isinstance(written, Tensor) and any(written is tensor for tensor in tensors):
                self._values.pop(written, None)  # no longer what it was
        return result

    def _remember(self, tensor: Tensor, value: Tensor) -> None:
        if value.numel() <= _limit(value):
            self._values[tensor] = value

    def _on_values(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """The result of an operation on tensors with values: numbers, or tensors with values again.

        Returns:
            NotImplemented if the result has too many of them.
        """
        result = self._on_cpu(func, args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.numel() > _limit(leaf) for leaf in tree_leaves(result)):
            return NotImplemented
        for tensor in tensors:
            if result is self._values[tensor]:
                return tensor  # written in place

        return tree_map(lambda leaf: self._shadow(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _on_cpu(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._values[leaf]
            return torch.device("cpu") if leaf == META else leaf

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        return func(*real_args, **real_kwargs)

    def _with_sizes(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of operations on other tensors whose shapes depend on values, with those shapes made known."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            return (args[0], tuple(part for index in given for part in self._positions(index)), *args[2:]), kwargs
        if func in _NEW:
            sizes = (int(self._values[s]) if isinstance(s, Tensor) and s in self._values else s for s in args[1:])
            return (args[0], *sizes), kwargs
        if func in (torch.repeat_interleave, Tensor.repeat_interleave) and args[1:2] and args[1] in self._values:
            return args, {**kwargs, "output_size": int(self._values[args[1]].sum())}
        return args, kwargs

    def _positions(self, index: Any) -> list[Any]:
        """A boolean mask as the positions where it is true; other indices as they are."""
        value = self._values.get(index) if isinstance(index, Tensor) else None
        if value is None or value.dtype != torch.bool:
            return [index]
        return [self._shadow(positions) for positions in value.nonzero(as_tuple=True)]


def _limit(tensor: Tensor) -> int:
    return _KEPT_INTEGERS if _is_integer(tensor) else _KEPT_FLOATS


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
