"""What operations on the meta device must be told, so that they make the tensors that a GPU's would make.

* Attention: on the meta device it would be written out, with its [L, L] scores. Fused kernels (flash, memory-efficient,
  cuDNN) keep queries, keys, values, the output, a log-sum-exp per query, and a mask as numbers.
* Autocast: it acts on CPU and CUDA tensors only, so its casts are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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


class FusedAttention(torch.autograd.Function):
    """Scaled dot-product attention as far as memory goes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # A boolean mask is made one that is added to the scores.
        mask = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        ctx.save_for_backward(query, key, value, output, log_sum_exp, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class Kernels(TorchFunctionMode):
    """Stands in for a GPU's kernels while networks run on the meta device.

    Args:
        autocast: The low-precision dtype, or None for no autocast.
    """

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        if self._autocast is not None and (attends or func in _LOW):
            args, kwargs = _cast(self._autocast, args, kwargs)
        elif self._autocast is not None and func in _FLOAT32:
            args, kwargs = _cast(torch.float32, args, kwargs)
        return _attention(*args, **kwargs) if attends else func(*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Any:
    return FusedAttention.apply(query, key, value, attn_mask)


def _cast(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, (args, kwargs))
