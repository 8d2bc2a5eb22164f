"""What operations on the meta device must be told, so that they make the tensors that a GPU's would make.

* Attention: on the meta device it would be written out, with its [L, L] scores. Fused kernels (flash, memory-efficient,
  cuDNN) keep queries, keys, values, the output and a log-sum-exp per query.
* Autocast: it acts on CPU and CUDA tensors only, so its casts are made here.
* Values of masks and lengths: networks that cut texts to their length read them. Integer tensors that come in with
  values keep them through operations on integers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# The operations that CUDA's autocast runs in low precision, and those that it runs in float32 (of those that networks
# call by these names): https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
_LOW = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm),
}
_FLOAT32 = {
    *(F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax),
    *(torch.pow, Tensor.pow, torch.rsqrt, Tensor.rsqrt),
}
_KEPT_ELEMENTS = 1 << 20  # a mask of attention scores is larger, and is not read
META = torch.device("meta")


class FusedAttention(torch.autograd.Function):
    """Scaled dot-product attention as far as memory goes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Kernels(TorchFunctionMode):
    """Stands in for a GPU's kernels while networks run on the meta device.

    Args:
        autocast: The low-precision dtype, or None for no autocast.
    """

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast = autocast
        self._values = WeakIdKeyDictionary()

    def to_meta(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape on the meta device; of integers, the values are remembered."""
        moved = tensor.detach().to("meta")
        if tensor.device.type != "meta":
            self._remember(moved, tensor)
        return moved

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor in self._values for tensor in tensors]
        if known and all(known):
            found = self._on_values(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if any(known):
            args, kwargs = self._with_sizes(func, args, kwargs)
        if self._autocast is not None and func in _LOW:
            args, kwargs = _as(self._autocast, args, kwargs)
        elif self._autocast is not None and func in _FLOAT32:
            args, kwargs = _as(torch.float32, args, kwargs)
        result = func(*args, **kwargs)
        for written in (result, args[0] if func is Tensor.__setitem__ else None):
            if isinstance(written, Tensor):
                self._values.pop(written, None)  # written in place: no longer what it was
        return result

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        if self._autocast is not None:
            (query, key, value), _nothing = _as(self._autocast, (query, key, value), {})
        return FusedAttention.apply(query, key, value)

    def _remember(self, tensor: Tensor, value: Tensor) -> None:
        if _is_integer(value) and value.numel() <= _KEPT_ELEMENTS:
            self._values[tensor] = value

    def _on_values(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operation on integers with values: numbers, or integers with values again.

        Returns:
            NotImplemented if the result is something else.
        """
        real_args, real_kwargs = tree_map(self._real, (args, kwargs))
        with torch.device("cpu"):
            result = func(*real_args, **real_kwargs)
        if any(isinstance(leaf, Tensor) and not _is_integer(leaf) for leaf in tree_leaves(result)):
            return NotImplemented
        if result is None or any(result is leaf for leaf in tree_leaves((real_args, real_kwargs))):
            return NotImplemented  # an operation in place
        return tree_map(lambda leaf: self.to_meta(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _with_sizes(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of operations whose result has a shape that depends on values, with that shape made known."""
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return (args[0], tuple(part for given in index for part in self._index(given))), kwargs
        if func in (torch.repeat_interleave, Tensor.repeat_interleave) and args[1:2] and args[1] in self._values:
            return args, {**kwargs, "output_size": int(self._values[args[1]].sum())}
        return args, kwargs

    def _index(self, given: Any) -> list[Any]:
        """A boolean mask as the positions where it is true."""
        value = self._values.get(given) if isinstance(given, Tensor) else None
        if value is None or value.dtype != torch.bool:
            return [given]
        return [self.to_meta(positions) for positions in value.nonzero(as_tuple=True)]

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._values[leaf]
        return torch.device("cpu") if leaf == META else leaf


def _as(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, (args, kwargs))


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
